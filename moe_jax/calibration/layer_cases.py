"""Whole MoE layers, timed: what one takes beside the sum of what its parts take alone.

Inputs: devices and the fits of the parts. Outputs: points (predicted communication, predicted computation, seconds) and
one `Fit` over them per schedule, named `layer:SCHEDULE` in a cluster file. Parts in one program do not cost what they
cost alone: devices wait for each other, share cores and memory, and a program of many operations takes time to start.
Letters: docs/notation.md.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable

import numpy as np

from moe_jax.cluster import Cluster
from moe_jax.cluster.layer_seconds import ExpertLoad, LayerSeconds, layer_seconds
from moe_jax.grouped_matmul.ffn_cost import expert_work
from moe_jax.mesh.abstract import build_abstract_roles
from moe_jax.mesh.roles import MeshConfig, Roles, build_mesh
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.layer import layer_sizes
from moe_jax.schedules import schedule_record
from moe_jax.schedules.automatic import layer_shape
from moe_jax.schedules.contract import LayerSizes

SCHEDULES = schedule_record("parm").chooses_from  # whole layers are timed so that `parm` can compare them
GATHER = "saa"  # how s2 returns in timed layers: Parm's form
# (N, M, F, capacity factor, K): small and large, with few and with many rows
_SIZES = (
    (384, 192, 96, 1.0, 2),
    (96, 192, 192, 2.0, 2),
    (192, 96, 96, 0.4, 1),
    (768, 96, 192, 1.5, 2),
    (384, 192, 192, 0.3, 1),
    (96, 96, 96, 1.0, 2),
    (768, 192, 96, 0.7, 1),
)


class LayerCase(typing.NamedTuple):
    """One layer: N_MP, N_ESP, N, M, F, capacity factor, K; one data-parallel group, and as many experts as devices."""

    mp_size: int
    esp_size: int
    tokens: int
    model_dim: int
    hidden_dim: int
    factor: float
    top_k: int

    def mesh(self, devices: int) -> MeshConfig:
        """Return the mesh of `devices` devices."""
        return MeshConfig(expert=devices // self.esp_size, expert_shard=self.esp_size, model=self.mp_size)

    def config(self, schedule: str, devices: int, transport: str = "all_to_all") -> MoEConfig:
        """Return the layer under a schedule."""
        return MoEConfig(
            num_experts=devices,
            top_k=self.top_k,
            capacity_factor=self.factor,
            min_capacity=1,
            schedule=schedule,
            transport=transport,
            gather=GATHER,
        )

    def sizes(self, devices: int) -> tuple[Roles, LayerSizes]:
        """Return roles without devices, and static sizes."""
        roles = build_abstract_roles(self.mesh(devices), devices)
        return roles, layer_sizes(self.config("s1", devices), roles, self.tokens)


def schedules_of(case: LayerCase) -> tuple[str, ...]:
    """Return the schedules that are different programs: without MP s2 is s1, and without ESP too deepspeed is s1."""
    return tuple(name for name in SCHEDULES if schedule_record(name).on_mesh(case.mp_size, case.esp_size).name == name)


def predict(schedule: str, case: LayerCase, devices: int, cluster: Cluster, transport: str) -> LayerSeconds:
    """Return the predicted time of a layer whose experts are loaded evenly.

    Raises:
      UserError: the cluster lacks a fit.
    """
    roles, sizes = case.sizes(devices)
    shape = layer_shape(schedule, roles, sizes, case.model_dim)
    record = schedule_record(schedule).on_mesh(case.mp_size, case.esp_size)
    own = sizes if record.gates_group else sizes.split(case.mp_size)
    sources = shape.ep_size * shape.esp_size
    kept = min(own.capacity, case.top_k * own.tokens / devices)  # rows of an expert from one source
    sharing = case.mp_size if record.cuts_buckets else 1  # devices that have a part of each bucket
    kept /= sharing
    group = np.full(sizes.groups, round(kept * sources))
    buffer = shape.esp_size * shape.sent_rows // sharing
    work = expert_work(group, max(buffer, 8), case.model_dim, case.hidden_dim // case.esp_size)
    load = ExpertLoad(flops=3 * work.forward_flops, bytes=work.step_bytes)
    return layer_seconds(schedule, shape, load, cluster, gather=GATHER, transport=transport)


def layer_cases(devices: int, scale: float, mesh: MeshConfig | None, count: int = 14) -> list[LayerCase]:
    """Return the layers to time: over all (N_MP, N_ESP) of 1, 2, 4 that divide the devices, or on one mesh."""
    if mesh is not None:
        pairs = [(mesh.model, mesh.expert_shard)] if mesh.expert * mesh.expert_shard == devices else []
    else:
        pairs = [(n, s) for n in (4, 2, 1) for s in (4, 2, 1) if devices % n == 0 and devices % s == 0]
    if not pairs:
        return []
    found = []
    for index, (pair, sizes) in enumerate(zip(itertools.cycle(pairs), itertools.cycle(_SIZES), strict=False)):
        if index == count:
            return found
        tokens, *others = sizes
        unit = pair[0] * 16
        found.append(LayerCase(*pair, max(unit, round(tokens * scale / unit) * unit), *others))
    return found


def build_layer(schedule: str, case: LayerCase, devices, transport: str = "all_to_all") -> Callable:
    """Return a compiled call of the layer, forward and backward."""
    from moe_jax.calibration.layer_call import layer_call

    roles = build_mesh(case.mesh(len(devices)), devices)
    config = case.config(schedule, len(devices), transport)
    return layer_call(config, roles, case.tokens, case.model_dim, case.hidden_dim)
