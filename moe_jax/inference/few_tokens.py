"""The MoE layer for few tokens: each device applies the experts that it holds to all of them, and one sum joins these.

For one token of every sequence, sorting rows into buckets takes longer than reading the weights, and a grouped matmul
may read all weights of a layer, where a token needs K experts. Here the tokens of all devices that share the experts
are gathered (an MP group holds them already), each device computes the choices that are its own, in one of three ways,

    in turn      one expert after the other, the few rows that chose it: for CPUs, whose matmuls read one matrix
    by choice    all at once, each by the matrices of its expert, which are read in place: for GPUs, few choices
    by slot      all tokens by the matrices of each slot: for GPUs, choices that would read most weights several times

and parts are summed, in at least float32, over the devices of the experts and of their shards. Rows travel directly,
each device to each: one message long, where an all-reduce takes several turns, and for few rows turns are what counts.
T tokens of all devices that share the experts; G slots of a device in a layer.

Experts may be kept as int8 with a scale for each output channel, the largest magnitude over 127, so each weight is off
by at most half a scale. A block of weights is cast as its matmul reads it, so no float copy of a bank is ever made.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.kernels.matmul import grouped_matmul
from moe_jax.kernels.row_blocks import RowBlock, for_each_block
from moe_jax.models.model_group import ModelGroup
from moe_jax.moe.bank import ExpertWeights
from moe_jax.moe.experts import apply_activation, weight_names
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import RouterInputs
from moe_jax.moe.tables import Tables, destinations
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.replicated import varying_to_replicated
from moe_jax.parallel.varying import cast_varying, varying_axes

SCALE = "_scale"
IMPLEMENTATION = "blocked"  # casts a block of weights as it reads it


def quantized_specs(specs: dict) -> dict:
    """Return the PartitionSpecs of a bank in int8 from those of the bank [Rb, K, N]."""
    scales = {name + SCALE: PartitionSpec(*(tuple(spec) + (None,) * 3)[:3:2]) for name, spec in specs.items()}
    return {**specs, **scales}


def quantize_bank(bank: dict) -> dict:
    """Return a bank in int8 on the same devices; the arrays given are deleted one by one."""

    def one(leaf):
        sharding = leaf.sharding
        scale = NamedSharding(sharding.mesh, quantized_specs({"w": sharding.spec})["w" + SCALE])
        pair = jax.block_until_ready(jax.jit(quantize, out_shardings=(sharding, scale))(leaf))
        leaf.delete()  # not two banks at once
        return pair

    found = {}
    for name, leaf in bank.items():
        found[name], found[name + SCALE] = one(leaf)
    return found


def quantize(weight):
    """Return (int8 [Rb, K, N], scale float32 [Rb, N]) of weights [Rb, K, N]; a channel of zeros has scale 1."""
    weight = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weight), axis=1)
    scale = jnp.where(largest > 0, largest / 127, 1)
    return jnp.round(weight / scale[:, None]).astype(jnp.int8), scale


@dataclasses.dataclass(frozen=True)
class Int8MoE(MoE):
    """The layer on a bank of `quantize_bank`; everything but its experts is as ever."""

    def experts(self, rows, group_sizes, weights: ExpertWeights):
        """Apply the experts to rows [R, M] in group order."""
        with jax.named_scope("experts"):
            edges = jnp.cumsum(group_sizes)
            group = jnp.searchsorted(edges, jnp.arange(rows.shape[0], dtype=edges.dtype), side="right")
            group = jnp.minimum(group, group_sizes.shape[0] - 1)  # rows of no group are zero
            acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)

            def times(lhs, name):
                out = grouped_matmul(lhs, group_sizes, weights.operands(name), implementation=IMPLEMENTATION)
                scale = weights.bank[name + SCALE][weights.home_row][group]
                return out.astype(acc_dtype) * scale.astype(acc_dtype)

            *ins, last = weight_names(self.activation)
            hidden = apply_activation(self.activation, *(times(rows, name) for name in ins)).astype(rows.dtype)
            return times(hidden, last).astype(rows.dtype)


def with_int8(moe: MoE) -> Int8MoE:
    """Return the layer for a bank of `quantize_bank`."""
    return Int8MoE(**{field.name: getattr(moe, field.name) for field in dataclasses.fields(moe)})


HEIGHTS = (1, 4, 8)  # rows of an expert that a CPU multiplies at once; two take it longer than four
LEAST_RESULTS = 1 << 13  # of sums over rows of a matrix, that each core of a GPU has some
MOST_CHOICES = 64  # T K; above, matmuls of all tokens by all slots cost more than the exchange


def on_cpu(roles: Roles) -> bool:
    """Say whether a mesh is of CPU devices."""
    return roles.mesh.devices.flat[0].platform == "cpu"


def way_of(tokens: int, top_k: int, slots: int, roles: Roles) -> str | None:
    """Return how t = `tokens` tokens of each MP group meet their experts; None where they are too many."""
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

    def first(array):
        return lax.all_gather(cast_varying(array, roles.expert), roles.expert)[0]

    rules = {name: first(getattr(tables, name)) for name in ("dest_slot", "dest_num", "dest_den")}
    return dataclasses.replace(tables, **rules)


@dataclasses.dataclass(frozen=True)
class FewTokens:
    """The layer on one device.

    Attributes:
      moe: its router, activation and mesh; slots: G; way: of `way_of`.
    """

    moe: MoE
    slots: int
    way: str

    def __call__(self, x, index, gate: dict, bank: dict, tables: Tables):
        """Return (y [t, M], choices int32 [t, K]); index int32 [t], -1 for padding; tables as `alike` leaves them."""
        roles = self.moe.roles
        with jax.named_scope("gate"):
            choice, stats = self.moe.router.choose(x, gate, RouterInputs(token_ids=index, tables=tables))
        with jax.named_scope("route"):
            device, slot = destinations(tables, choice, self.slots)
            slot = jnp.where(choice.keep_mask, device * self.slots + slot, -1)
            rows, slot, weights = self._gather(x, slot, choice.weights)
            me = lax.axis_index(roles.expert) if roles.size(roles.expert) > 1 else 0
            place = slot - me * self.slots
            mine = (place >= 0) & (place < self.slots)
            weights, place = jnp.where(mine, weights, 0), jnp.where(mine, place, 0 if self.way != "in turn" else -1)
        with jax.named_scope("experts"):
            compute = {"in turn": self._in_turn, "by choice": self._by_choice, "by slot": self._by_slot}[self.way]
            part = compute(rows, place, weights, bank, tables.home_row)
        with jax.named_scope("combine"):
            return self._sum(part, x.shape[0]).astype(x.dtype), stats.choices

    def _gather(self, x, slot, weights):
        """Return the same of the T tokens."""
        others = _others(self.moe.roles)
        if self.moe.roles.size(others) == 1:
            return x, slot, weights
        top_k = slot.shape[1]
        joint = jnp.concatenate([x.astype(weights.dtype), weights, slot.astype(weights.dtype)], axis=1)
        every = lax.all_gather(cast_varying(joint, others), others, axis=0, tiled=True)
        rows, weights, slot = jnp.split(every, [x.shape[1], x.shape[1] + top_k], axis=1)
        return rows.astype(x.dtype), slot.astype(jnp.int32), weights

    def _in_turn(self, rows, place, weights, bank, home_row):
        """Return the sum [T, M] of the choices' weighted results; place int32 [T, K], -1 for those of other devices."""
        top_k, acc_dtype = place.shape[1], jnp.promote_types(rows.dtype, jnp.float32)
        slot = jnp.where(place < 0, self.slots, place).reshape(-1)
        order = jnp.argsort(slot)
        slots = jnp.arange(self.slots, dtype=slot.dtype)
        sizes = jnp.sum(slot[:, None] == slots[None], axis=0, dtype=jnp.int32)
        lines = rows[order // top_k]
        *ins, last = weight_names(self.moe.activation)

        def turn(out, block: RowBlock):
            def times(lhs, name):
                made = jnp.dot(lhs, block.pick(bank[name], home_row, lhs.dtype), preferred_element_type=acc_dtype)
                if name + SCALE not in bank:
                    return made
                return made * block.pick(bank[name + SCALE], home_row, acc_dtype)[None]

            return block.write(out, times(self._activate(block.read(lines), ins, times), last))

        number = slot.shape[0]
        heights = (*(height for height in HEIGHTS if height < number), number)
        out = cast_varying(jnp.zeros(lines.shape, acc_dtype), varying_axes(lines, sizes, bank, home_row))
        out = for_each_block(sizes, heights, number, 0, out, turn)
        back = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*place.shape, -1)
        return jnp.sum(_weighted(weights, back), axis=1)

    def _by_choice(self, rows, place, weights, bank, home_row):
        """Return the sum [T, M] of the choices' weighted results, each by its own expert's matrices."""
        tokens, top_k = place.shape
        own = home_row[place.reshape(-1)]
        acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)

        def times(lhs, name):  # no dot: its matrices would be written down before they are multiplied
            weight = jnp.take(bank[name], own, axis=0, mode="clip").astype(acc_dtype)
            out = jnp.sum(lhs.astype(acc_dtype)[:, :, None] * weight, axis=1)
            return out * bank[name + SCALE][own].astype(acc_dtype) if name + SCALE in bank else out

        *ins, last = weight_names(self.moe.activation)
        hidden = self._activate(jnp.repeat(rows, top_k, axis=0), ins, times)
        out = times(hidden, last).reshape(tokens, top_k, -1)
        return jnp.sum(_weighted(weights, out), axis=1)

    def _by_slot(self, rows, place, weights, bank, home_row):
        """Return the same; every slot's matrices, which stand one after the other, multiply all T tokens."""
        acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        weights = jnp.sum(jnp.where(place[None] == slot[:, None, None], weights[None], 0), axis=2)  # [G, T]

        def times(lhs, name):
            weight = lax.dynamic_slice_in_dim(bank[name], home_row[0], self.slots).astype(lhs.dtype)
            out = jnp.einsum("gtk,gkn->gtn", lhs, weight, preferred_element_type=acc_dtype)
            if name + SCALE not in bank:
                return out
            return out * lax.dynamic_slice_in_dim(bank[name + SCALE], home_row[0], self.slots)[:, None].astype(
                acc_dtype
            )

        *ins, last = weight_names(self.moe.activation)
        hidden = self._activate(jnp.broadcast_to(rows, (self.slots, *rows.shape)), ins, times)
        return jnp.sum(_weighted(weights, times(hidden, last)), axis=0)

    def _activate(self, rows, ins, times):
        """Return the hidden rows in the dtype of `rows`."""
        acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
        pre = (times(rows, name).astype(rows.dtype).astype(acc_dtype) for name in ins)
        return apply_activation(self.moe.activation, *pre).astype(rows.dtype)

    def _sum(self, part, tokens: int):
        """Return the sum [t, M] over the devices of experts and shards, of this device's own tokens; part [T, M]."""
        roles = self.moe.roles
        group, others = roles.expert + roles.expert_shard, _others(roles)
        sizes = [roles.mesh.shape[axis] for axis in group]
        kept = [size if axis in others else 1 for axis, size in zip(group, sizes, strict=True)]
        blocks = part.reshape(*kept, tokens, part.shape[1])
        blocks = jnp.broadcast_to(blocks, (*sizes, tokens, part.shape[1])).reshape(-1, tokens, part.shape[1])
        return varying_to_replicated(sum_of_blocks(blocks, group), roles.model)


def _weighted(weights, results):
    """Return weights [...] x results [..., M], 0 where a weight is, also if an expert overflows on what is not its."""
    weights = weights[..., None].astype(results.dtype)
    return jnp.where(weights != 0, weights * results, 0)


def sum_of_blocks(blocks, axes: tuple[str, ...]):
    """Return the sum [...] over a group's devices of the blocks meant for this one; blocks [n, ...], one for each."""
    if blocks.shape[0] == 1:
        return blocks[0]
    axes = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    return jnp.sum(lax.all_to_all(cast_varying(blocks, axes), axes, split_axis=0, concat_axis=0), axis=0)


@dataclasses.dataclass(frozen=True)
class FewTokensGroup(ModelGroup):
    """An MP group that sums few rows by sending them directly, and multiplies one row by matrices in place."""

    def times(self, spec, x, weight):
        if x.shape[0] * x.shape[1] > 1:
            return super().times(spec, x, weight)
        acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
        kept = weight.held.shape[x.ndim - 2 :]  # dims of x behind [b, Sq] are the first of the weight
        parts = _parts_of_sum(x.size, math.prod(kept))
        matrix = weight.held.reshape(parts, x.size // parts, -1).astype(acc_dtype)
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


def _parts_of_sum(summed: int, results: int) -> int:
    """Return into how many parts, a power of two, a sum is cut whose few results alone would keep few cores busy."""
    parts = 1
    while parts * results < LEAST_RESULTS and summed % (2 * parts) == 0:
        parts *= 2
    return parts
