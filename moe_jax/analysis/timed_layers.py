"""Whole MoE layers, timed: what one takes beside the sum of what its parts take alone.

Parts in one program do not cost what they cost alone: devices wait for each other, share cores and memory, and a
program of many operations takes time to start. Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
import itertools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.analysis.timed_parts import placed, spread
from moe_jax.cluster import Cluster
from moe_jax.cluster.layer_seconds import LayerSeconds, layer_seconds
from moe_jax.kernels.blocked import expert_work
from moe_jax.moe.bank import open_grad_sink, with_grad_sink
from moe_jax.moe.build import layer_sizes, make_moe
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.routers import RouterInputs
from moe_jax.moe.schedules import schedule_record
from moe_jax.moe.schedules.automatic import layer_shape
from moe_jax.moe.schedules.contract import LayerSizes
from moe_jax.moe.tables import even_tables, local
from moe_jax.parallel.mesh import MeshConfig, Roles, build_mesh
from moe_jax.parallel.replicated import varying_to_replicated
from moe_jax.parallel.sharding import expert_specs

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

    def config(self, schedule: str, devices: int) -> MoEConfig:
        """Return the layer under a schedule."""
        return MoEConfig(
            num_experts=devices,
            top_k=self.top_k,
            capacity_factor=self.factor,
            min_capacity=1,
            schedule=schedule,
            gather=GATHER,
        )

    def sizes(self, devices: int) -> tuple[Roles, LayerSizes]:
        """Return roles without devices, and static sizes."""
        roles = build_mesh(self.mesh(devices), devices)
        return roles, layer_sizes(self.config("s1", devices), roles, self.tokens)


def schedules_of(case: LayerCase) -> tuple[str, ...]:
    """Return the schedules that are different programs: without MP s2 is s1, and without ESP too deepspeed is s1."""
    return tuple(name for name in SCHEDULES if schedule_record(name).on_mesh(case.mp_size, case.esp_size).name == name)


def predict(schedule: str, case: LayerCase, devices: int, cluster: Cluster) -> LayerSeconds:
    """Return the predicted time of a layer whose experts are loaded evenly.

    Raises:
      UserError: the cluster lacks a fit.
    """
    roles, sizes = case.sizes(devices)
    shape = layer_shape(schedule, roles, sizes, 4 * case.model_dim)  # bytes of float32
    record = schedule_record(schedule).on_mesh(case.mp_size, case.esp_size)
    own = sizes if record.gates_group else sizes.split(case.mp_size)
    sources = shape.ep_size * shape.esp_size
    kept = min(own.capacity, case.top_k * own.tokens / devices)  # rows of an expert from one source
    sharing = case.mp_size if record.cuts_buckets else 1  # devices that have a part of each bucket
    kept /= sharing
    group = np.full(sizes.groups, round(kept * sources))
    buffer = shape.esp_size * shape.sent_rows // sharing
    flops, _, step_bytes = expert_work(group, max(buffer, 8), case.model_dim, case.hidden_dim // case.esp_size)
    return layer_seconds(schedule, shape, (3 * flops, step_bytes), cluster, gather=GATHER)


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


def build_layer(schedule: str, case: LayerCase, devices) -> Callable:
    """Compile the layer on one data-parallel group, forward and backward, and return a call of it."""
    roles, config = build_mesh(case.mesh(len(devices)), devices), case.config(schedule, len(devices))
    model_dim, hidden_dim = case.model_dim, case.hidden_dim
    tables = jax.tree.map(np.asarray, even_tables(1, config.num_experts, roles.size(roles.expert)))
    whole = schedule_record(config.schedule).gates_group

    def body(x, w_gate, bank, grad_sink, tables):
        tables = local(tables)
        grad_sink = {name: open_grad_sink(value, tables.home_row)[0] for name, value in grad_sink.items()}
        layer = jax.tree.map(lambda array: array[0], tables)
        # one copy of the gate's weight per device, so that its gradient stays there
        weight = varying_to_replicated(w_gate[0], roles.model) if whole else w_gate[0]
        ids = jnp.arange(x.shape[0], dtype=jnp.int32)
        return make_moe(config, roles, x, "gelu")(x, weight, RouterInputs(None, ids, layer), bank, grad_sink)[0]

    specs = expert_specs({"w_in": (1, 1, 1), "w_out": (1, 1, 1)}, roles, 0, None)[0]
    rows = P(roles.dense)
    in_specs = (rows, P(roles.all), specs, specs, P(roles.expert))
    sharded = jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=rows)

    def step(x, w_gate, experts, cotangent, tables):
        def forward(x, w_gate, experts):
            return sharded(x, w_gate, *with_grad_sink(experts), tables)

        y, pull = jax.vjp(forward, x, w_gate, experts)
        return y, pull(cotangent)

    experts, total = config.num_experts, case.tokens * roles.size(roles.dense)
    normal = functools.partial(spread, scale=model_dim**-0.5)
    bank = {
        "w_in": normal((experts, model_dim, hidden_dim), roles.sharding(*specs["w_in"]), 1),
        "w_out": normal((experts, hidden_dim, model_dim), roles.sharding(*specs["w_out"]), 2),
    }
    weight = np.random.default_rng(3).standard_normal((1, model_dim, experts), np.float32) * model_dim**-0.5
    weights = placed(np.broadcast_to(weight, (roles.num_devices, model_dim, experts)), roles.sharding(roles.all))
    x, cotangent = (spread((total, model_dim), roles.sharding(roles.dense), seed) for seed in (4, 5))
    tables = jax.tree.map(lambda array: placed(array, roles.sharding(roles.expert)), tables)
    arrays = (x, weights, bank, cotangent, tables)
    compiled = jax.jit(step).lower(*arrays).compile()
    return lambda: compiled(*arrays)
