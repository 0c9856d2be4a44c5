"""Few tokens on GPUs, and experts as int8.

For one token of every sequence, sorting rows into buckets takes longer than reading the weights. Where a model-parallel
(MP) group has all experts, or one device does, the layer of this file instead multiplies each choice of a token by the
matrices of its expert where they lie; each device does so for the experts that it holds, and one sum joins the results.
T tokens of an MP group; G slots of a device in a layer.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.kernels.grouped import grouped_matmul
from moe_jax.models.model_group import ModelGroup
from moe_jax.moe.bank import ExpertWeights
from moe_jax.moe.experts import apply_activation, weight_names
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import RouterInputs
from moe_jax.moe.routing import Tables, destinations
from moe_jax.parallel.mesh import Roles, replace_leaf
from moe_jax.parallel.varying import cast_varying, varying_to_replicated
from moe_jax.planning.plan_shape import PlanShape

# Experts as int8 have a scale for each output channel, the largest magnitude over 127, so each weight is off by at most
# half a scale. A block of weights is cast as its matmul reads it, so no float copy of a bank is ever made.
SCALE = "_scale"


def quantize_bank(bank: dict) -> dict:
    """Return a bank in int8 on the same devices; the arrays given are deleted one by one."""
    quantized = {}
    for name, leaf in bank.items():
        rows, _, results = (*leaf.sharding.spec, None, None, None)[:3]
        shardings = leaf.sharding, NamedSharding(leaf.sharding.mesh, PartitionSpec(rows, results))
        quantized[name], quantized[name + SCALE] = replace_leaf(quantize, leaf, shardings)
    return quantized


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

            def times(lhs, name):  # a block of weights is cast as it is read
                out = grouped_matmul(lhs, group_sizes, weights.operands(name), implementation="fused")
                scale = weights.bank[name + SCALE][weights.home_row][group]
                return out.astype(acc_dtype) * scale.astype(acc_dtype)

            *ins, last = weight_names(self.activation)
            hidden = apply_activation(self.activation, *(times(rows, name) for name in ins)).astype(rows.dtype)
            return times(hidden, last).astype(rows.dtype)


LEAST_RESULTS = 1 << 13  # of sums over rows of a matrix, that each core of a GPU has some
MOST_CHOICES = 64  # T K; above, reading a matrix for each choice is taken to cost more than sorting the rows


def on_cpu(roles: Roles) -> bool:
    """Say whether a mesh is of CPU devices."""
    return roles.mesh.devices.flat[0].platform == "cpu"


# Every choice reads its expert's matrices, in one kernel for each weight. All tokens times the matrices of each slot
# would read experts that nobody chose, 4 times the bytes for one token of Mixtral; and one expert after the other is a
# loop, whose turns a GPU starts one by one. Where choices are more than two for each slot, most matrices would be read
# repeatedly: the general layer reads each of them once. So it does for tokens that differ between the devices of the
# experts, of which a device would read its own experts for every choice of all; and it alone spreads tokens over
# replicas. On CPUs it reads the matrices in use anyway.
def serves(tokens: int, top_k: int, plan: PlanShape, roles: Roles) -> bool:
    """Say whether `run_layer` is the shorter way for T = `tokens` tokens."""
    choices, others = tokens * top_k, [axis for axis in roles.expert + roles.expert_shard if axis not in roles.model]
    if on_cpu(roles) or plan.candidates > 1 or roles.size(tuple(others)) > 1:
        return False
    return choices <= min(MOST_CHOICES, 2 * plan.slots)


def run_layer(moe: MoE, x, index, gate: dict, bank: dict, tables: Tables):
    """Run the layer on one device; return (y [T, M], choices int32 [T, K], -1 for padding).

    Args:
      x: [T, M]; index: int32 [T], `PADDING` for padding; bank: as `multiply_choices` takes it.
      tables: of a placement without replicas.
    """
    roles, slots = moe.roles, tables.home_row.shape[0]
    with jax.named_scope("gate"):
        inputs = RouterInputs(token_ids=index, tables=tables, padded=True)
        choice, _ = moe.router.choose(x, gate, inputs)
    with jax.named_scope("route"):
        device, slot = destinations(tables, choice, slots)
        here = lax.axis_index(roles.expert) if roles.size(roles.expert) > 1 else 0
        is_here = choice.keep_mask & (device == here)
        weights, row = jnp.where(is_here, choice.weights, 0), tables.home_row[jnp.where(is_here, slot, 0)]
    with jax.named_scope("experts"):
        part = multiply_choices(moe.activation, x, row, weights, bank)
    with jax.named_scope("combine"):
        y = FewTokensGroup(roles.expert + roles.expert_shard).reduce(part)
        return y.astype(x.dtype), jnp.where(inputs.real[:, None], choice.expert_ids, -1)


def multiply_choices(activation: str, tokens, row, weights, bank: dict):
    """Return the sum [T, M] of the weighted results of every token's choices, in at least float32.

    Args:
      tokens: [T, M]; row: int32 [T, K], of the bank; weights: [T, K], 0 for choices whose experts are elsewhere.
      bank: {name: [Rb, ...]}, in int8 with scales.
    """
    acc_dtype = jnp.promote_types(tokens.dtype, jnp.float32)

    def times(lhs, name):
        """Return lhs [T K, ...] times a weight of each choice, which is cast as it is read."""

        def of_choices(leaf):
            return jnp.take(leaf, row.reshape(-1), axis=0, mode="clip").astype(acc_dtype)

        # no dot: its matrices would be written down before they are multiplied
        out = jnp.sum(lhs.astype(acc_dtype)[:, :, None] * of_choices(bank[name]), axis=1)
        return out * of_choices(bank[name + SCALE]) if name + SCALE in bank else out

    *ins, last = weight_names(activation)
    lhs = jnp.repeat(tokens, row.shape[1], axis=0)
    pre = (times(lhs, name).astype(tokens.dtype).astype(acc_dtype) for name in ins)
    results = times(apply_activation(activation, *pre).astype(tokens.dtype), last).reshape(*row.shape, -1)
    weights = weights[..., None].astype(results.dtype)
    # 0 where a weight is, also if an expert overflows on what is not its
    return jnp.sum(jnp.where(weights != 0, weights * results, 0), axis=1)


class FewTokensGroup(ModelGroup):
    """An MP group that sums few rows by sending them directly, and multiplies one row by matrices in place."""

    def times(self, spec, x, weight):
        if x.shape[0] * x.shape[1] > 1:
            return super().times(spec, x, weight)
        acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
        results = weight[0].shape[x.ndim - 2 :]  # dims of x behind [b, Sq] are the first of the weight
        # a sum whose few results alone would keep few cores busy is cut into parts, a power of two of them
        parts = 1
        while parts * math.prod(results) < LEAST_RESULTS and x.size % (2 * parts) == 0:
            parts *= 2
        matrix = weight[0].reshape(parts, x.size // parts, -1).astype(acc_dtype)
        out = jnp.sum(x.reshape(parts, -1, 1).astype(acc_dtype) * matrix, axis=1)
        out = jnp.sum(lax.optimization_barrier(out) if parts > 1 else out, axis=0).astype(x.dtype).reshape(results)
        first = spec.partition("->")[2].index("b")  # dims of the result before [b, Sq]
        return jnp.expand_dims(out, (first, first + 1))

    # Rows travel directly, each device to each: one message long, where an all-reduce takes several turns, and for few
    # rows turns are what counts.
    def reduce(self, partial):
        axes = tuple(axis for axis in self.axes if lax.axis_size(axis) > 1)
        devices = math.prod(map(lax.axis_size, axes))
        total = cast_varying(partial.astype(jnp.promote_types(partial.dtype, jnp.float32)), axes)
        if devices == 2:  # one message as well, without writing down what goes to each
            total = jnp.sum(lax.all_gather(total, axes), axis=0)
        elif devices > 2:
            parts = jnp.broadcast_to(total, (devices, *total.shape))
            total = jnp.sum(lax.all_to_all(parts, axes, split_axis=0, concat_axis=0), axis=0)
        return varying_to_replicated(total.astype(partial.dtype), self.axes)
