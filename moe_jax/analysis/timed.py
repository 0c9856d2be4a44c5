"""What calibration times, on all devices at once: collectives in all groups of a kind, what a layer computes, and whole
MoE layers, whose parts in one program do not cost what they cost alone.

Sizes of collectives count as in `cluster/layer_seconds.py`: what a device hands in, for an all-gather what it gets; a
permute is an exchange's mean round. A group is n devices a stride apart (`fits.fit_name`); on every mesh MP, ESP
and EP&ESP are neighbours and EP stands N_ESP apart. Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
import itertools
import time
import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.cluster import Cluster
from moe_jax.cluster.fits import fit_name
from moe_jax.cluster.layer_seconds import LayerSeconds, layer_seconds
from moe_jax.kernels.blocked import expert_work
from moe_jax.kernels.grouped import GroupedWeights, choose_implementation
from moe_jax.moe.bank import open_grad_sink, with_grad_sink
from moe_jax.moe.build import layer_sizes, make_moe
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import expert_ffn
from moe_jax.moe.permute import permute_rows, permute_tokens, unpermute_rows, unpermute_tokens
from moe_jax.moe.routers import RouterInputs, choose_experts
from moe_jax.moe.routing import even_tables, local, pack, regroup, route
from moe_jax.moe.schedule import CHOOSERS, LayerSizes, find_schedule, layer_shape, schedule_on
from moe_jax.moe.schedules.s2 import collect_parts, receive_part, rows_ahead
from moe_jax.parallel.exchange import ExpertGroup
from moe_jax.parallel.mesh import MeshConfig, Roles, build_mesh, to_devices
from moe_jax.parallel.sharding import expert_specs
from moe_jax.parallel.static_sizes import bucket_layout
from moe_jax.parallel.varying import varying_to_replicated


def interleaved_seconds(calls: Mapping[typing.Any, Callable], rounds: int) -> dict[typing.Any, list[float]]:
    """Call everything once to warm up, then `rounds` times in turn; return {name: seconds [rounds]}."""
    for call in calls.values():
        jax.block_until_ready(call())
    seconds = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - started)
    return seconds


def spread(shape: tuple[int, ...], sharding: NamedSharding, seed: int = 0, scale: float = 1.0):
    """Return a float32 array of normal numbers with this sharding; equal values where it is replicated."""

    def part(index):
        starts = [0 if piece.start is None else piece.start for piece in index]
        sizes = [len(range(*piece.indices(size))) for piece, size in zip(index, shape, strict=True)]
        rng = np.random.default_rng([seed, *starts])
        return scale * rng.standard_normal(sizes, dtype=np.float32)

    return jax.make_array_from_callback(shape, sharding, part)


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
        return fit_name(self.collective, self.size, stride=self.stride)


def mesh_groups(ep_size: int, esp_size: int, mp_size: int, per_node: int = 0) -> list[Timed]:
    """Return what one mesh needs: N_EP, N_ESP, N_MP, and devices of a node (0: all are in one)."""
    both = ep_size * esp_size
    found = [Timed(kind, both) for kind in EXCHANGES]
    found += [Timed(kind, ep_size, esp_size) for kind in EXCHANGES]
    found += [Timed("all_gather", both), Timed("reduce_scatter", both)]
    inside = per_node if 0 < per_node < both and both % per_node == 0 and per_node % esp_size == 0 else esp_size
    found += [Timed("all_to_all", inside), Timed("permute", both // inside, inside)]  # of `pairwise`
    for size in (mp_size, esp_size):
        found += [Timed(kind, size) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    found.append(Timed("all_gather", mp_size // esp_size))  # of integers, where an MP group of s2 spans EP members
    if mp_size > 1 and both > 1:
        found.append(Timed("saa", both, 1, mp_size, esp_size))
    return sorted({timed for timed in found if timed.size > 1})


def machine_groups(devices: int, per_node: int) -> list[Timed]:
    """Return what every mesh of the machine needs whose N_MP and N_ESP are 1, 2 or 4.

    Groups within one data-parallel group are there for all numbers of such groups; SAA for a single one only.
    """
    powers = [size for size in (1, 2, 4) if devices % size == 0]
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


def collective_cases(timed: Timed, devices, size_bytes: int) -> list[Case]:
    """Return the calls to time for one collective near one size: one, or for SAA one with and one without gathers.

    A call has several independent collectives over the middle axis of [outer, size, stride] devices; that of 'none'
    does nothing, on every device: the cost of a call.
    """
    kind, size = timed.collective, timed.size
    if kind == "saa":
        return _saa_cases(timed, devices, size_bytes)
    unit = size * size
    elements = max(unit, size_bytes // _ITEM // unit * unit)
    handed_in = elements // size if kind == "all_gather" else elements
    count = {"permute": size - 1, "none": 1}.get(kind, _REPEATS)
    names = ("outer", "group", "inner")
    grid = np.asarray(devices, object).reshape(len(devices) // (size * timed.stride), size, timed.stride)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * 3)
    sharding = NamedSharding(mesh, P(names))
    arrays = [spread((len(devices) * handed_in,), sharding, seed) for seed in range(count)]

    def body(*parts):
        out = []
        for index, part in enumerate(parts):
            if out:  # one after the other, as in a layer
                part, out[-1] = lax.optimization_barrier((part, out[-1]))
            if kind == "all_to_all":
                done = lax.all_to_all(part.reshape(size, -1), "group", 0, 0, tiled=True).reshape(-1)
            elif kind == "all_gather":
                done = lax.all_gather(part, "group", tiled=True)
            elif kind == "reduce_scatter":
                done = lax.psum_scatter(part, "group", tiled=True)
            elif kind == "all_reduce":
                done = lax.psum(part, "group")
            elif kind == "permute":
                done = lax.ppermute(part, "group", [(i, (i + index + 1) % size) for i in range(size)])
            else:
                done = part + 1.0
            out.append(done)
        return tuple(out)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(names), out_specs=P(names))
    compiled = jax.jit(mapped).lower(*arrays).compile()
    return [Case(lambda: compiled(*arrays), count, elements * _ITEM)]


def _saa_cases(timed: Timed, devices, size_bytes: int) -> list[Case]:
    ep_size = timed.size // timed.esp_size
    sizes = {"expert": ep_size, "expert_shard": timed.esp_size, "model": timed.mp_size}
    roles = build_mesh(MeshConfig(data=len(devices) // timed.size, **sizes), devices)
    group = ExpertGroup(roles)
    rows = max(1, size_bytes // (_ITEM * _SAA_DIM * timed.size))
    total = roles.mesh.size * timed.size * rows
    array = spread((total, _SAA_DIM), roles.sharding(roles.all))
    collect = functools.partial(collect_parts, roles, group, "saa", bucket_layout(rows, ep_size))

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


def compute_cases(devices) -> dict[str, list[Case]]:
    """Return what is timed of computation, each at several sizes.

    dense: matmuls, x is FLOPs. gate: gate, route, fill buckets and combine their rows, with gradients; x is tokens, y
    bytes of rows moved. regroup: received rows into group order and back, with gradients; x is rows, y bytes of rows
    moved. expert_step: see `expert_case`.
    """
    cases: dict[str, list[Case]] = {name: [] for name in ("dense", "gate", "regroup", "expert_step")}
    for dim, rows in ((128, 256), (256, 256), (256, 1024)):
        call = _on_every_device(devices, jnp.matmul, [(rows, dim), (dim, dim)])
        cases["dense"].append(Case(call, 1, 2.0 * rows * dim * dim))
    experts = sources = 8
    for tokens, dim, top_k in ((64, 64, 2), (128, 256, 1), (256, 128, 2), (512, 256, 2), (1024, 64, 1), (1024, 256, 2)):
        config = MoEConfig(num_experts=experts, top_k=top_k, capacity_factor=1.0, min_capacity=1)
        capacity = config.capacity(tokens)

        def gate(x, w_gate, config=config, capacity=capacity):
            choice, _ = choose_experts(x, w_gate, config)
            routing = route(choice, choice.expert_ids, jnp.zeros_like(choice.expert_ids), experts, 1)
            parcel = pack(routing, 0, bucket_layout(capacity, config.num_experts), config.top_k, 1)
            return unpermute_tokens(jnp.tanh(permute_tokens(x, parcel)), choice.weights, parcel)

        moved = _ITEM * dim * (experts * capacity + top_k * tokens)
        call = _on_every_device(devices, gate, [(tokens, dim), (dim, experts)], gradients=True)
        cases["gate"].append(Case(call, 1, tokens, 2 * moved))
    shapes = ((128, 64, 1), (512, 64, 4), (512, 256, 1), (2048, 64, 2), (2048, 256, 1), (4096, 128, 4))
    for rows, dim, groups in shapes:
        each = rows // sources
        counts = np.full((sources, groups), each // groups // 2, np.int32)

        def reorder(x, counts=counts, each=each):
            grouping = regroup(jnp.asarray(counts), bucket_layout(each, len(counts)))
            return unpermute_rows(jnp.tanh(permute_rows(x, grouping)), grouping)

        call = _on_every_device(devices, reorder, [(each * sources, dim)], gradients=True)
        cases["regroup"].append(Case(call, 1, rows, 4 * _ITEM * dim * rows))
    few = ((128, 1, 64, 64), (512, 4, 64, 256), (512, 1, 256, 64), (1024, 2, 128, 128))
    many = ((2048, 4, 64, 64), (2048, 2, 256, 128), (4096, 1, 256, 256), (4096, 4, 128, 64))
    for rows, groups, dim, hidden in (*few, *many):
        cases["expert_step"].append(expert_case(devices, rows, groups, dim, hidden))
    return cases


def expert_case(devices, rows: int, groups: int, dim: int, hidden: int) -> Case:
    """Return an expert FFN forward and backward; x is FLOPs of the rows computed, y bytes touched."""
    implementation = choose_implementation("auto", devices[0], jnp.float32, (dim, hidden))
    sizes = np.full(groups, rows // groups // 2, np.int32)  # half of the buffer is padding, as it often is

    def forward(x, w_in, w_out, sinks):
        slots = jnp.arange(groups, dtype=jnp.int32)
        weights = {
            name: (GroupedWeights(bank=bank, slots=slots, grad_sink=sink),)
            for name, bank, sink in zip(("w_in", "w_out"), (w_in, w_out), sinks, strict=True)
        }
        return expert_ffn(x, jnp.asarray(sizes), weights, activation="gelu", implementation=implementation)

    def both(x, w_in, w_out):
        sinks = jnp.zeros_like(w_in), jnp.zeros_like(w_out)
        y, pull = jax.vjp(lambda x, sinks: forward(x, w_in, w_out, sinks), x, sinks)
        return pull(y)

    shapes = [(rows, dim), (groups, dim, hidden), (groups, hidden, dim)]
    return Case(_on_every_device(devices, both, shapes), 1, *expert_work(sizes, rows, dim, hidden, _ITEM))


def _on_every_device(devices, function, shapes, gradients: bool = False) -> Callable:
    """Compile `function` on arrays of these shapes, for each device its own.

    Args:
      gradients: of the result as well, with the first array as its cotangent.
    """
    mesh = Mesh(np.asarray(devices, object), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("device"))
    arrays = [
        spread((len(devices), *shape), sharding, seed, shape[-2] ** -0.5 if len(shape) > 1 else 1.0)
        for seed, shape in enumerate(shapes)
    ]

    def body(*parts):
        own = [part[0] for part in parts]
        if gradients:
            y, pull = jax.vjp(function, *own)
            out = y, pull(own[0])
        else:
            out = function(*own)
        return jax.tree.map(lambda array: array[None], out)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("device"), out_specs=P("device"))
    compiled = jax.jit(mapped).lower(*arrays).compile()
    return lambda: compiled(*arrays)


SCHEDULES = CHOOSERS["parm"].among  # whole layers are timed so that `parm` can compare them
GATHER = "saa"  # how s2 returns in timed layers: Parm's form
_SIZES = (  # (N, M, F, capacity factor, K): small and large, with few and with many rows
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
        return roles, layer_sizes(self.config("s1", devices), roles, self.tokens, None, self.model_dim, 4)


def schedules_of(case: LayerCase) -> tuple[str, ...]:
    """Return the schedules that are different programs: without MP s2 is s1, and without ESP too deepspeed is s1."""
    return tuple(name for name in SCHEDULES if schedule_on(name, case.mp_size, case.esp_size).name == name)


def predict(schedule: str, case: LayerCase, devices: int, cluster: Cluster) -> LayerSeconds:
    """Return the predicted time of a layer whose experts are loaded evenly."""
    roles, sizes = case.sizes(devices)
    shape = layer_shape(schedule, roles, sizes)
    own = sizes if shape.gates_group else sizes.split(case.mp_size)
    sources = shape.ep_size * shape.esp_size
    kept = min(own.capacity, case.top_k * own.tokens / devices)  # rows of an expert from one source
    kept /= shape.sharers
    group = np.full(sizes.groups, round(kept * sources))
    buffer = shape.esp_size * shape.sent_rows // shape.sharers
    load = expert_work(group, max(buffer, 8), case.model_dim, case.hidden_dim // case.esp_size)
    return layer_seconds(shape, load, cluster, gather=GATHER)


def layer_cases(devices: int, mesh: MeshConfig | None, count: int = 14) -> list[LayerCase]:
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
        found.append(LayerCase(*pair, max(unit, round(tokens / unit) * unit), *others))
    return found


def build_layer(schedule: str, case: LayerCase, devices) -> Callable:
    """Compile the layer on one data-parallel group, forward and backward, and return a call of it."""
    roles, config = build_mesh(case.mesh(len(devices)), devices), case.config(schedule, len(devices))
    model_dim, hidden_dim = case.model_dim, case.hidden_dim
    tables = jax.tree.map(np.asarray, even_tables(1, config.num_experts, roles.size(roles.expert)))
    whole = find_schedule(config.schedule).gates_group

    def body(x, w_gate, bank, grad_sink, tables):
        tables = local(tables)
        grad_sink, _ = open_grad_sink(grad_sink, tables.home_row[0])
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
    weights = to_devices(np.broadcast_to(weight, (roles.mesh.size, model_dim, experts)), roles.sharding(roles.all))
    x, cotangent = (spread((total, model_dim), roles.sharding(roles.dense), seed) for seed in (4, 5))
    tables = to_devices(tables, roles.sharding(roles.expert))
    arrays = (x, weights, bank, cotangent, tables)
    compiled = jax.jit(step).lower(*arrays).compile()
    return lambda: compiled(*arrays)
