"""What a layer computes on one device, timed on all devices at once: matmuls, expert FFNs, gating, moving rows.

Inputs: sizes. Outputs: compiled calls with the two sizes that each fit is over. All devices work at the same time, so
what they share (cores, memory) is in the numbers. Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.calibration.timing import spread
from moe_jax.dispatch import (
    pack,
    permute_rows,
    permute_tokens,
    regroup,
    route,
    unpermute_rows,
    unpermute_tokens,
)
from moe_jax.grouped_matmul import GroupedWeights, default_implementation
from moe_jax.grouped_matmul.ffn_cost import expert_work
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import expert_ffn
from moe_jax.routers import choose_experts

_ITEM = 4


class Timing(typing.NamedTuple):
    """A call and the sizes of its fit."""

    call: Callable
    x: float
    y: float = 0.0


def dense_timing(devices, dim: int, rows: int) -> Timing:
    """[rows, dim] x [dim, dim] on every device; x is FLOPs."""
    call = _on_every_device(devices, lambda a, b: a @ b, [(rows, dim), (dim, dim)])
    return Timing(call, 2.0 * rows * dim * dim)


def expert_timings(devices, rows: int, groups: int, dim: int, hidden: int) -> tuple[Timing, Timing]:
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
        Timing(_on_every_device(devices, forward, shapes), work.forward_flops, work.forward_bytes),
        Timing(_on_every_device(devices, both, shapes), 3 * work.forward_flops, work.step_bytes),
    )


def gate_timing(devices, tokens: int, dim: int, experts: int, top_k: int) -> Timing:
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
    return Timing(_on_every_device(devices, step, [(tokens, dim), (dim, experts)]), tokens, 2 * moved)


def regroup_timing(devices, rows: int, dim: int, sources: int, groups: int) -> Timing:
    """Bring received rows into group order and back, with gradients; x is rows, y bytes of rows moved."""
    each = rows // sources
    counts = np.full((sources, groups), each // groups // 2, np.int32)

    def layer(x):
        grouping = regroup(jnp.asarray(counts), each)
        return unpermute_rows(jnp.tanh(permute_rows(x, grouping)), grouping)

    def step(x):
        y, pull = jax.vjp(layer, x)
        return y, pull(x)

    return Timing(_on_every_device(devices, step, [(each * sources, dim)]), rows, 4 * _ITEM * dim * rows)


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
