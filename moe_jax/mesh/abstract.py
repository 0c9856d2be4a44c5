"""The same roles as `build_mesh` gives, without any device: for dry runs, and to lay out meshes of any size.

Inputs: a `MeshConfig` and a number of devices. Outputs: `Roles` whose mesh is an `AbstractMesh`. No backend is started.
"""

from __future__ import annotations

import math
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from moe_jax.mesh.roles import MeshConfig, Roles, mesh_axes


def build_abstract_roles(config: MeshConfig, num_devices: int) -> Roles:
    """Return the roles of a mesh of `num_devices` devices that need not exist.

    Raises:
      UserError: where the sizes do not make `num_devices`, as `build_mesh` does.
    """
    config = config.resolve(num_devices)
    shape, model = mesh_axes(config, num_devices)
    mesh: Any = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))

    def role(name: str) -> tuple[str, ...]:
        return tuple(axis for axis in shape if axis in (name, f"{name}_mp"))

    return Roles(
        config=config,
        mesh=mesh,
        data=role("data"),
        expert=role("expert"),
        expert_shard=role("expert_shard"),
        model=model,
        dense=tuple(axis for axis in shape if axis not in model),
    )


def assumed_devices(config: MeshConfig) -> int:
    """Return the least number of devices that the sizes given can be built on; `expert` = -1 counts as 1."""
    groups = config.data * config.expert_shard * max(config.expert, 1)
    return groups if config.expert != -1 else math.lcm(groups, config.model, config.devices_per_node or 1)
