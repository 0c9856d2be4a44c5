"""The MoE layer for few tokens: each device applies the experts that it holds to all of them, and one sum joins these.

For one token of every sequence, sorting rows into buckets takes longer than reading the weights, and a grouped matmul
may read all weights of a layer, where a token needs K experts. Here the tokens of all devices that share the experts
are gathered (an MP group holds them already), each device computes the choices that are its own, and parts are summed,
in at least float32, over the devices of the experts and of their shards. The experts may be kept as int8.
T tokens of all devices that share the experts; G slots of a device in a layer.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.kernels.blocked import RowBlock, for_each_block
from moe_jax.kernels.grouped import grouped_matmul
from moe_jax.models.model_group import ModelGroup
from moe_jax.moe.bank import ExpertWeights
from moe_jax.moe.experts import apply_activation, weight_names
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import RouterInputs
from moe_jax.moe.routing import Tables, destinations
from moe_jax.parallel.mesh import Roles, replace_leaf
from moe_jax.parallel.varying import cast_varying, varying_axes, varying_to_replicated

# Experts as int8 have a scale for each output channel, the largest magnitude over 127, so each weight is off by at most
# half a scale. A block of weights is cast as its matmul reads it, so no float copy of a bank is ever made.
SCALE = "_scale"


def quantize_bank(bank: dict) -> dict:
    """Return a bank in int8 on the same devices; the arrays given are deleted one by one."""
    found = {}
    for name, leaf in bank.items():
        rows, _, results = (*leaf.sharding.spec, None, None, None)[:3]
        shardings = leaf.sharding, NamedSharding(leaf.sharding.mesh, PartitionSpec(rows, results))
        found[name], found[name + SCALE] = replace_leaf(quantize, leaf, shardings)
    return found


def quantize(weight):
    """Return (int8 [Rb, K, N], scale float32 [Rb, N]) of weights [Rb, K, N]; a channel of zeros has scale 1."""
    weight = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weight), axis=1)
    scale = jnp.where(largest > 0, largest / 127, 1)
    return jnp.round(weight / scale[:, None]).astype(jnp.int8), scale


class Int8MoE(MoE):
    """The layer on a bank of `quantize_bank`; everything but its experts is as ever."""

    def experts(self, rows, group_sizes, weights: ExpertWeights):
        """Apply the experts to rows [R, M] in group order."""
        with jax.named_scope("experts"):
            edges = jnp.cumsum(group_sizes)
            group = jnp.searchsorted(edges, jnp.arange(rows.shape[0], dtype=edges.dtype), side="right")
            group = jnp.minimum(group, group_sizes.shape[0] - 1)  # rows of no group are zero
            acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)

            def times(lhs, name):  # 'blocked' casts a block of weights as it reads it
                out = grouped_matmul(lhs, group_sizes, weights.operands(name), implementation="blocked")
                scale = weights.bank[name + SCALE][weights.home_row][group]
                return out.astype(acc_dtype) * scale.astype(acc_dtype)

            *ins, last = weight_names(self.activation)
            hidden = apply_activation(self.activation, *(times(rows, name) for name in ins)).astype(rows.dtype)
            return times(hidden, last).astype(rows.dtype)


HEIGHTS = (1, 4, 8)  # rows of an expert that a CPU multiplies at once; two take it longer than four
LEAST_RESULTS = 1 << 13  # of sums over rows of a matrix, that each core of a GPU has some
MOST_CHOICES = 64  # T K; above, matmuls of all tokens by all slots cost more than the exchange


def on_cpu(roles: Roles) -> bool:
    """Say whether a mesh is of CPU devices."""
    return roles.mesh.devices.flat[0].platform == "cpu"


def way_of(tokens: int, top_k: int, slots: int, roles: Roles) -> str | None:
    """Return how t = `tokens` tokens of each MP group meet their experts; None where they are too many.

    in turn      one expert after the other, the few rows that chose it: for CPUs, whose matmuls read one matrix
    by choice    all at once, each by the matrices of its expert, which are read in place: for GPUs, few choices
    by slot      all tokens by the matrices of each slot: for GPUs, choices that would read most weights repeatedly
    """
    choices = tokens * roles.size(_others(roles)) * top_k
    if on_cpu(roles):
        return "in turn" if choices <= 2 * slots * roles.size(roles.expert) else None
    if choices > MOST_CHOICES:
        return None
    return "by choice" if choices <= 2 * slots else "by slot"  # matmuls by slot copy the matrices first


def _others(roles: Roles) -> tuple[str, ...]:
    """Return the axes over which devices share experts and hold different tokens."""
    return tuple(axis for axis in roles.expert + roles.expert_shard if axis not in roles.model)


def alike(tables: Tables, roles: Roles) -> Tables:
    """Return tables [L, ...] by which every device sends a token to the same slot: where there are replicas, the first.

    Without replicas all devices have the same ones. `home_row` stays each device's own.
    """
    if tables.dest_slot.shape[-1] == 1 or not roles.expert:
        return tables
    rules = {}
    for name in ("dest_slot", "dest_num", "dest_den"):
        rules[name] = lax.all_gather(cast_varying(getattr(tables, name), roles.expert), roles.expert)[0]
    return dataclasses.replace(tables, **rules)


def run_layer(moe: MoE, way: str, x, index, gate: dict, bank: dict, tables: Tables):
    """Run the layer on one device; return (y [t, M], choices int32 [t, K]).

    Args:
      way: of `way_of`; x: [t, M]; index: int32 [t], `PADDING` for padding; tables: as `alike` leaves them.
    """
    roles, slots, (tokens, dim) = moe.roles, tables.home_row.shape[0], x.shape
    others = _others(roles)
    with jax.named_scope("gate"):
        given = RouterInputs(token_ids=index, tables=tables, padded=True)
        choice, _ = moe.router.choose(x, gate, given)
    with jax.named_scope("route"):
        device, slot = destinations(tables, choice, slots)
        slot = jnp.where(choice.keep_mask, device * slots + slot, -1)
        rows, weights = x, choice.weights
        if roles.size(others) > 1:  # of t tokens here: all T
            top_k = slot.shape[1]
            joint = jnp.concatenate([x.astype(weights.dtype), weights, slot.astype(weights.dtype)], axis=1)
            every = lax.all_gather(cast_varying(joint, others), others, axis=0, tiled=True)
            rows, weights, slot = jnp.split(every, [dim, dim + top_k], axis=1)
            rows, slot = rows.astype(x.dtype), slot.astype(jnp.int32)
        place = slot - slots * (lax.axis_index(roles.expert) if roles.size(roles.expert) > 1 else 0)
        mine = (place >= 0) & (place < slots)
        weights, place = jnp.where(mine, weights, 0), jnp.where(mine, place, -1)
    with jax.named_scope("experts"):
        part = own_experts(moe.activation, way, rows, place, weights, bank, tables.home_row)
    with jax.named_scope("combine"):  # sum over the devices of experts and shards, each receiving its own tokens
        group = roles.expert + roles.expert_shard
        sizes = [roles.mesh.shape[axis] for axis in group]
        kept = [size if axis in others else 1 for axis, size in zip(group, sizes, strict=True)]
        blocks = jnp.broadcast_to(part.reshape(*kept, tokens, dim), (*sizes, tokens, dim)).reshape(-1, tokens, dim)
        y = varying_to_replicated(sum_of_blocks(blocks, group), roles.model)
        return y.astype(x.dtype), jnp.where(given.real[:, None], choice.expert_ids, -1)


def own_experts(activation: str, way: str, rows, place, weights, bank: dict, home_row):
    """Return the sum [T, M] of the weighted results of the choices whose experts are here, in at least float32.

    Args:
      way: of `way_of`; rows: [T, M]; place: int32 [T, K], slots, -1 for those of other devices; weights: 0 there.
      bank: {name: [Rb, ...]}, in int8 with scales; home_row: int32 [G], the row of each slot, one after the other.
    """
    slots, top_k, acc_dtype = home_row.shape[0], place.shape[1], jnp.promote_types(rows.dtype, jnp.float32)
    *ins, last = weight_names(activation)

    def times(lhs, name, pick):
        """Return lhs times the weights that `pick` takes out of the bank, which are cast as they are read."""
        if way == "by choice":  # no dot: its matrices would be written down before they are multiplied
            out = jnp.sum(lhs.astype(acc_dtype)[:, :, None] * pick(bank[name]).astype(acc_dtype), axis=1)
        else:
            out = jnp.matmul(lhs, pick(bank[name]).astype(lhs.dtype), preferred_element_type=acc_dtype)
        if name + SCALE not in bank:
            return out
        scale = pick(bank[name + SCALE]).astype(acc_dtype)
        return out * (scale if way == "by choice" else scale[..., None, :])

    def ffn(lhs, pick):
        pre = (times(lhs, name, pick).astype(rows.dtype).astype(acc_dtype) for name in ins)
        return times(apply_activation(activation, *pre).astype(rows.dtype), last, pick)

    if way == "in turn":
        slot = jnp.where(place < 0, slots, place).reshape(-1)
        order = jnp.argsort(slot)
        sizes = jnp.sum(slot[:, None] == jnp.arange(slots, dtype=slot.dtype)[None], axis=0, dtype=jnp.int32)
        lines, number = rows[order // top_k], slot.shape[0]

        def turn(out, block: RowBlock):
            row = home_row[block.group]
            pick = functools.partial(lax.dynamic_index_in_dim, index=row, axis=0, keepdims=False)
            return block.write(out, ffn(block.read(lines), pick))

        heights = (*(height for height in HEIGHTS if height < number), number)
        out = cast_varying(jnp.zeros(lines.shape, acc_dtype), varying_axes(lines, sizes, bank, home_row))
        out = for_each_block(sizes, heights, number, slots, 0, out, turn)
        results, axis = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*place.shape, -1), 1
    elif way == "by choice":
        own = home_row[jnp.maximum(place, 0).reshape(-1)]
        pick = functools.partial(jnp.take, indices=own, axis=0, mode="clip")
        results, axis = ffn(jnp.repeat(rows, top_k, axis=0), pick).reshape(*place.shape, -1), 1
    else:  # every slot's matrices, which stand one after the other, multiply all T tokens
        slot = jnp.arange(slots, dtype=jnp.int32)
        weights = jnp.sum(jnp.where(place[None] == slot[:, None, None], weights[None], 0), axis=2)  # [G, T]
        pick = functools.partial(lax.dynamic_slice_in_dim, start_index=home_row[0], slice_size=slots)
        results, axis = ffn(jnp.broadcast_to(rows, (slots, *rows.shape)), pick), 0
    weights = weights[..., None].astype(results.dtype)
    # 0 where a weight is, also if an expert overflows on what is not its
    return jnp.sum(jnp.where(weights != 0, weights * results, 0), axis=axis)


# Rows travel directly, each device to each: one message long, where an all-reduce takes several turns, and for few rows
# turns are what counts.
def sum_of_blocks(blocks, axes: tuple[str, ...]):
    """Return the sum [...] over a group's devices of the blocks meant for this one; blocks [n, ...], one for each."""
    if blocks.shape[0] == 1:
        return blocks[0]
    axes = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    return jnp.sum(lax.all_to_all(cast_varying(blocks, axes), axes, split_axis=0, concat_axis=0), axis=0)


class FewTokensGroup(ModelGroup):
    """An MP group that sums few rows by sending them directly, and multiplies one row by matrices in place."""

    def times(self, spec, x, weight):
        if x.shape[0] * x.shape[1] > 1:
            return super().times(spec, x, weight)
        acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
        held, _ = weight
        kept = held.shape[x.ndim - 2 :]  # dims of x behind [b, Sq] are the first of the weight
        # a sum whose few results alone would keep few cores busy is cut into parts, a power of two of them
        parts = 1
        while parts * math.prod(kept) < LEAST_RESULTS and x.size % (2 * parts) == 0:
            parts *= 2
        matrix = held.reshape(parts, x.size // parts, -1).astype(acc_dtype)
        out = jnp.sum(x.reshape(parts, -1, 1).astype(acc_dtype) * matrix, axis=1)
        out = jnp.sum(lax.optimization_barrier(out) if parts > 1 else out, axis=0).astype(x.dtype).reshape(kept)
        first = spec.partition("->")[2].index("b")  # dims of the result before [b, Sq]
        return jnp.expand_dims(out, (first, first + 1))

    def reduce(self, partial):
        devices = math.prod(lax.axis_size(axis) for axis in self.axes)
        if devices == 1:
            return super().reduce(partial)
        wider = partial.astype(jnp.promote_types(partial.dtype, jnp.float32))
        if devices == 2:  # one message as well, without writing down what goes to each
            total = jnp.sum(lax.all_gather(cast_varying(wider, self.axes), self.axes), axis=0)
        else:
            total = sum_of_blocks(jnp.broadcast_to(wider, (devices, *partial.shape)), self.axes)
        return varying_to_replicated(total.astype(partial.dtype), self.axes)
