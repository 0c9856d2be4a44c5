"""The same roles as `build_mesh` gives, without any device: for dry runs, and to lay out meshes of any size.

Inputs: a `MeshConfig` and a number of devices. Outputs: `Roles` whose mesh is an `AbstractMesh`. No backend is started.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from moe_jax.parallel.mesh import MeshConfig, Roles, mesh_axes, roles_of


def build_abstract_roles(config: MeshConfig, num_devices: int, experts: Collection[int] = ()) -> Roles:
    """Return the roles of a mesh of `num_devices` devices that need not exist; `experts` as `build_mesh` takes them.

    Raises:
      UserError: where the sizes do not make `num_devices`, as `build_mesh` does.
    """
    config = config.resolve(num_devices)
    shape, model = mesh_axes(config, num_devices, experts)
    mesh: Any = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    return roles_of(config, mesh, tuple(shape), model)


def assumed_devices(config: MeshConfig) -> int:
    """Return the least number of devices that the sizes given can be built on; `expert` = -1 counts as 1."""
    groups = config.data * config.expert_shard * max(config.expert, 1)
    return groups if config.expert != -1 else math.lcm(groups, config.model, config.devices_per_node or 1)
