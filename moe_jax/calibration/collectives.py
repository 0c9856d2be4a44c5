"""One collective, made ready to be timed in all groups of a kind at once.

Inputs: a `Timed` and a size in bytes. Outputs: a compiled call and how many collectives it holds. Sizes count as in
`cluster/volumes.py`: what a device hands in, for an all-gather what it gets; a permute is an exchange's mean round.
"""

from __future__ import annotations

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.calibration.timed_groups import Timed
from moe_jax.calibration.timing import spread
from moe_jax.collectives.bucket_rows import bucket_layout
from moe_jax.collectives.exchange import make_exchange
from moe_jax.mesh.roles import MeshConfig, build_mesh
from moe_jax.schedules.expert_group import build_expert_group
from moe_jax.schedules.pause_after_gate import make_collect, receive_part, rows_ahead

_REPEATS = 4
_ITEM = 4  # bytes of a float32
_SAA_DIM = 64  # M of the rows that SAA moves


class Case(typing.NamedTuple):
    """A compiled call of `count` collectives; `x` and `y` are the sizes in bytes that its fit is over."""

    call: Callable
    count: int
    x: int
    y: int = 0


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
    "ppermute": lambda x, axis, size: make_exchange((axis,), size, "ppermute", size)(x.reshape(size, -1)).reshape(-1),
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

    def whole(x):
        return collect(x, None, None)

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
    for body, y, out in ((whole, y_bytes, roles.dense), (rounds_alone, 0, roles.all)):
        mapped = jax.shard_map(body, mesh=roles.mesh, in_specs=P(roles.all), out_specs=P(out))
        compiled = jax.jit(mapped).lower(array).compile()
        cases.append(Case(lambda compiled=compiled: compiled(array), 1, x_bytes, y))
    return cases
