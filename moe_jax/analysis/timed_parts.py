"""What calibration times on all devices at once: collectives in all groups of a kind, and what a layer computes.

Sizes of collectives count as in `cluster/layer_seconds.py`: what a device hands in, for an all-gather what it gets; a
permute is an exchange's mean round. A group is n devices a stride apart (`fits.strided_name`); on every mesh MP, ESP
and EP&ESP are neighbours and EP stands N_ESP apart. Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
import statistics
import time
import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.cluster.fits import fit_name, strided_name
from moe_jax.kernels.blocked import expert_work
from moe_jax.kernels.grouped import GroupedWeights
from moe_jax.kernels.matmul import default_implementation
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import expert_ffn
from moe_jax.moe.permute import permute_rows, permute_tokens, unpermute_rows, unpermute_tokens
from moe_jax.moe.routers import choose_experts
from moe_jax.moe.routing import pack, regroup, route
from moe_jax.moe.schedules.expert_group import build_expert_group
from moe_jax.moe.schedules.pause_after_gate import make_collect, receive_part, rows_ahead
from moe_jax.parallel.bucket_rows import bucket_layout
from moe_jax.parallel.mesh import MeshConfig, build_mesh


def interleaved_seconds(calls: Mapping[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Call everything once to warm up, then `rounds` times in turn; return {name: seconds [rounds]}."""
    for call in calls.values():
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - started)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return {name: median}."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def spread(shape: tuple[int, ...], sharding: NamedSharding, seed: int = 0, scale: float = 1.0):
    """Return a float32 array of normal numbers with this sharding; equal values where it is replicated."""

    def part(index):
        starts = [0 if piece.start is None else piece.start for piece in index]
        sizes = [len(range(*piece.indices(size))) for piece, size in zip(index, shape, strict=True)]
        rng = np.random.default_rng([seed, *starts])
        return scale * rng.standard_normal(sizes, dtype=np.float32)

    return jax.make_array_from_callback(shape, sharding, part)


def placed(array, sharding: NamedSharding):
    """Return a host array, the same on all processes, with this sharding."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


EXCHANGES = ("all_to_all", "permute")  # an exchange by one collective, and a round of one by messages


class Timed(typing.NamedTuple):
    """One collective in one kind of group: n devices, `stride` apart; SAA also has N_MP and N_ESP."""

    collective: str
    size: int
    stride: int = 1
    mp_size: int = 1
    esp_size: int = 1

    @property
    def name(self) -> str:
        """Name of its fit in a cluster file."""
        if self.collective == "saa":
            return fit_name("saa", self.size, self.mp_size, self.esp_size)
        return strided_name(self.collective, self.size, self.stride)


def mesh_groups(ep_size: int, esp_size: int, mp_size: int, per_node: int = 0) -> list[Timed]:
    """Return what one mesh needs: N_EP, N_ESP, N_MP, and devices of a node (0: all are in one)."""
    both = ep_size * esp_size
    found = [Timed(kind, both) for kind in EXCHANGES]
    found += [Timed(kind, ep_size, esp_size) for kind in EXCHANGES]
    found += [Timed("all_gather", both), Timed("reduce_scatter", both)]
    inside = per_node if 0 < per_node < both and both % per_node == 0 and per_node % esp_size == 0 else esp_size
    found += [
        Timed("all_to_all", inside),
        Timed("permute", both // inside, inside),
    ]  # `pairwise`: in and between groups
    for size in (mp_size, esp_size):
        found += [Timed(kind, size) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    found.append(Timed("all_gather", mp_size // esp_size))  # of integers, where an MP group of s2 spans EP members
    if mp_size > 1 and both > 1:
        found.append(Timed("saa", both, 1, mp_size, esp_size))
    return sorted({timed for timed in found if timed.size > 1})


def machine_groups(devices: int, per_node: int, largest: int = 4) -> list[Timed]:
    """Return what every mesh of the machine needs whose N_MP and N_ESP are powers of two up to `largest`.

    Groups within one data-parallel group are there for all numbers of such groups; SAA for a single one only.
    """
    powers = [2**p for p in range((devices).bit_length()) if devices % 2**p == 0 and 2**p <= largest]
    found: set[Timed] = set()
    for esp_size in powers:
        for mp_size in powers:
            ep_size = devices // esp_size
            found |= set(mesh_groups(ep_size, esp_size, mp_size, per_node))
            for data_parallel in powers[1:]:
                if ep_size % data_parallel == 0:
                    fewer = mesh_groups(ep_size // data_parallel, esp_size, mp_size, per_node)
                    found |= {timed for timed in fewer if timed.collective in EXCHANGES}
    if 1 < per_node < devices:
        found |= {Timed("permute", per_node), Timed("permute", devices // per_node, per_node)}
    return sorted(found)


_REPEATS = 4
_ITEM = 4  # bytes of a float32
_SAA_DIM = 64  # M of the rows that SAA moves


class Case(typing.NamedTuple):
    """A compiled call that does `count` times what is timed; `x` and `y` are the sizes that its fit is over.

    Bytes of collectives; of what is computed the sizes that its function names.
    """

    call: Callable
    count: int
    x: float
    y: float = 0.0


def empty_case(devices) -> Callable:
    """Return a call of a program that does nothing on every device: the cost of a call."""
    return _build_flat(lambda x, axis, size: x + 1.0, devices, Timed("none", len(devices)), 8, 1)


def collective_cases(timed: Timed, devices, size_bytes: int) -> list[Case]:
    """Return the calls to time for one collective near one size: one, or for SAA one with and one without gathers."""
    if timed.collective == "saa":
        return _saa_cases(timed, devices, size_bytes)
    unit = timed.size * timed.size
    elements = max(unit, size_bytes // _ITEM // unit * unit)
    handed_in = elements // timed.size if timed.collective == "all_gather" else elements
    count = timed.size - 1 if timed.collective == "permute" else _REPEATS
    call = _build_flat(_OPERATIONS[timed.collective], devices, timed, handed_in, count)
    return [Case(call, count, elements * _ITEM)]


def _build_flat(operation, devices, timed: Timed, elements: int, count: int) -> Callable:
    """Compile `count` independent collectives over the middle axis of [outer, size, stride] devices."""
    shape = (len(devices) // (timed.size * timed.stride), timed.size, timed.stride)
    names = ("outer", "group", "inner")
    mesh = Mesh(np.asarray(devices, object).reshape(shape), names, axis_types=(AxisType.Auto,) * 3)
    sharding = NamedSharding(mesh, P(names))
    arrays = [spread((len(devices) * elements,), sharding, seed) for seed in range(count)]

    def body(*parts):
        out = []
        for index, part in enumerate(parts):
            if out:  # one after the other, as in a layer
                part, out[-1] = lax.optimization_barrier((part, out[-1]))
            done = operation(part, "group", timed.size) if operation is not _permute else _permute(part, timed, index)
            out.append(done)
        return tuple(out)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(names), out_specs=P(names))
    compiled = jax.jit(mapped).lower(*arrays).compile()
    return lambda: compiled(*arrays)


def _permute(part, timed: Timed, index: int):
    step = index % (timed.size - 1) + 1
    return lax.ppermute(part, "group", [(i, (i + step) % timed.size) for i in range(timed.size)])


_OPERATIONS = {
    "all_to_all": lambda x, axis, size: lax.all_to_all(x.reshape(size, -1), axis, 0, 0, tiled=True).reshape(-1),
    "all_gather": lambda x, axis, size: lax.all_gather(x, axis, tiled=True),
    "reduce_scatter": lambda x, axis, size: lax.psum_scatter(x, axis, tiled=True),
    "all_reduce": lambda x, axis, size: lax.psum(x, axis),
    "permute": _permute,
}


def _saa_cases(timed: Timed, devices, size_bytes: int) -> list[Case]:
    ep_size = timed.size // timed.esp_size
    config = MeshConfig(
        data=len(devices) // timed.size, expert=ep_size, expert_shard=timed.esp_size, model=timed.mp_size
    )
    roles = build_mesh(config, devices)
    group = build_expert_group(roles)
    rows = max(1, size_bytes // (_ITEM * _SAA_DIM * timed.size))
    total = roles.num_devices * timed.size * rows
    array = spread((total, _SAA_DIM), roles.sharding(roles.all))
    collect = make_collect(roles, group, "saa", bucket_layout(rows, ep_size))

    def rounds_alone(x):
        blocks = x.reshape(ep_size, timed.esp_size, -1, _SAA_DIM)
        me = lax.axis_index(roles.expert), lax.axis_index(roles.expert_shard)
        parts = [receive_part(group, rows_ahead(group, blocks, 0, me), 0, me)]
        for j in range(1, ep_size):
            ahead, parts[-1] = lax.optimization_barrier((rows_ahead(group, blocks, j, me), parts[-1]))
            parts.append(receive_part(group, ahead, j, me))
        return jnp.concatenate(parts)

    x_bytes = timed.size * rows * _SAA_DIM * _ITEM
    y_bytes = x_bytes // timed.esp_size * timed.mp_size
    cases = []
    for body, y, out in ((collect, y_bytes, roles.dense), (rounds_alone, 0, roles.all)):
        mapped = jax.shard_map(body, mesh=roles.mesh, in_specs=P(roles.all), out_specs=P(out))
        compiled = jax.jit(mapped).lower(array).compile()
        cases.append(Case(lambda compiled=compiled: compiled(array), 1, x_bytes, y))
    return cases


def dense_timing(devices, dim: int, rows: int) -> Case:
    """[rows, dim] x [dim, dim] on every device; x is FLOPs."""
    call = _on_every_device(devices, lambda a, b: a @ b, [(rows, dim), (dim, dim)])
    return Case(call, 1, 2.0 * rows * dim * dim)


def expert_timings(devices, rows: int, groups: int, dim: int, hidden: int) -> tuple[Case, Case]:
    """Return an expert FFN forward, and forward with backward; x is FLOPs of the rows computed, y bytes touched."""
    implementation = default_implementation(devices[0], jnp.float32, (dim, hidden))
    sizes = np.full(groups, rows // groups // 2, np.int32)  # half of the buffer is padding, as it often is

    def forward(x, w_in, w_out):
        slots = jnp.arange(groups, dtype=jnp.int32)
        grad_sinks = jnp.zeros_like(w_in), jnp.zeros_like(w_out)
        return _ffn(x, w_in, w_out, *grad_sinks, slots)

    def _ffn(x, w_in, w_out, grad_sink_in, grad_sink_out, slots):
        weights = {
            "w_in": (GroupedWeights(bank=w_in, slots=slots, grad_sink=grad_sink_in),),
            "w_out": (GroupedWeights(bank=w_out, slots=slots, grad_sink=grad_sink_out),),
        }
        return expert_ffn(x, jnp.asarray(sizes), weights, activation="gelu", implementation=implementation)

    def both(x, w_in, w_out):
        slots = jnp.arange(groups, dtype=jnp.int32)
        run = functools.partial(_ffn, slots=slots)
        grad_sinks = jnp.zeros_like(w_in), jnp.zeros_like(w_out)
        y, pull = jax.vjp(lambda x, s, t: run(x, w_in, w_out, s, t), x, *grad_sinks)
        return pull(y)

    shapes = [(rows, dim), (groups, dim, hidden), (groups, hidden, dim)]
    work = expert_work(sizes, rows, dim, hidden, _ITEM)
    return (
        Case(_on_every_device(devices, forward, shapes), 1, work.forward_flops, work.forward_bytes),
        Case(_on_every_device(devices, both, shapes), 1, 3 * work.forward_flops, work.step_bytes),
    )


def gate_timing(devices, tokens: int, dim: int, experts: int, top_k: int) -> Case:
    """Gate, route, fill buckets and combine their rows, with gradients; x is tokens, y bytes of rows moved."""
    config = MoEConfig(num_experts=experts, top_k=top_k, capacity_factor=1.0, min_capacity=1)
    capacity = config.capacity(tokens)

    def layer(x, w_gate):
        choice, _ = choose_experts(x, w_gate, config)
        routing = route(choice, choice.expert_ids, jnp.zeros_like(choice.expert_ids), experts, 1)
        parcel = pack(routing, 0, capacity, top_k, 1)
        return unpermute_tokens(jnp.tanh(permute_tokens(x, parcel)), choice.weights, parcel)

    def step(x, w_gate):
        y, pull = jax.vjp(layer, x, w_gate)
        return y, pull(x)

    moved = _ITEM * dim * (experts * capacity + top_k * tokens)
    return Case(_on_every_device(devices, step, [(tokens, dim), (dim, experts)]), 1, tokens, 2 * moved)


def regroup_timing(devices, rows: int, dim: int, sources: int, groups: int) -> Case:
    """Bring received rows into group order and back, with gradients; x is rows, y bytes of rows moved."""
    each = rows // sources
    counts = np.full((sources, groups), each // groups // 2, np.int32)

    def layer(x):
        grouping = regroup(jnp.asarray(counts), each)
        return unpermute_rows(jnp.tanh(permute_rows(x, grouping)), grouping)

    def step(x):
        y, pull = jax.vjp(layer, x)
        return y, pull(x)

    return Case(_on_every_device(devices, step, [(each * sources, dim)]), 1, rows, 4 * _ITEM * dim * rows)


def _on_every_device(devices, function, shapes) -> Callable:
    """Compile `function` on arrays of these shapes, for each device its own."""
    mesh = Mesh(np.asarray(devices, object), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("device"))
    arrays = [
        spread((len(devices), *shape), sharding, seed, shape[-2] ** -0.5 if len(shape) > 1 else 1.0)
        for seed, shape in enumerate(shapes)
    ]

    def body(*parts):
        out = function(*(part[0] for part in parts))
        return jax.tree.map(lambda array: array[None], out)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("device"), out_specs=P("device"))
    compiled = jax.jit(mapped).lower(*arrays).compile()
    return lambda: compiled(*arrays)
