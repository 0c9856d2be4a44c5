"""Grouped matmuls of plain XLA: `reference`, the oracle; `ragged`, for TPU; `blocked` and `fused`, loops of row blocks.

See `grouped.py` for inputs and outputs. `blocked` and `fused` are made for CPUs, where XLA expands `lax.ragged_dot` to
G times the work: they take about the FLOPs of the rows in use. `fused` has the whole expert FFN in one loop forward and
one backward, so the hidden rows of a block stay in the cache; only pre-activations [R, F] are saved.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.kernels.grouped import GroupedWeights, Operands, register
from moe_jax.kernels.row_blocks import block_heights, for_each_block, rows_computed
from moe_jax.parallel.row_sums import rows_in_use
from moe_jax.parallel.varying import cast_varying, varying_axes

Array = jax.Array


def gather_weights(operands: Operands, dtype) -> Array:
    """Return the weights [G, K, N] of all groups, operand after operand."""
    parts = [jnp.take(operand.bank, operand.slots, axis=0, mode="clip").astype(dtype) for operand in operands]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def split_gradient(dweight: Array, operands: Operands) -> tuple[Array | None, ...]:
    """Cut the gradient [G, K, N] of all groups by operand, in its grad_sink's dtype; None where it has no grad_sink."""
    parts, offset = [], 0
    for operand in operands:
        stop = offset + operand.slots.shape[0]
        parts.append(None if operand.grad_sink is None else dweight[offset:stop].astype(operand.grad_sink.dtype))
        offset = stop
    return tuple(parts)


def clear_unowned_rows(array: Array, group_sizes: Array) -> Array:
    """Return `array` [R, ...] with zeros in the rows past the last group."""
    return jnp.where(rows_in_use(group_sizes, array.shape[0]), array, jnp.zeros((), array.dtype))


def _acc_dtype(dtype):
    return jnp.promote_types(dtype, jnp.float32)


@register("reference")
class ReferenceMatmul:
    """Every group multiplies every row, and a mask selects its own: G times the FLOPs, and simple."""

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        weights, lhs = gather_weights(operands, lhs.dtype), clear_unowned_rows(lhs, group_sizes)
        owner_GR = _owner_mask(group_sizes, lhs.shape[0], lhs.dtype)
        einsum = functools.partial(jnp.einsum, preferred_element_type=_acc_dtype(lhs.dtype))
        of_group = [einsum("r,rk,kn->rn", owner, lhs, weight) for owner, weight in zip(owner_GR, weights, strict=True)]
        return jnp.sum(jnp.stack(of_group), axis=0).astype(lhs.dtype)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        weights, lhs = gather_weights(operands, lhs.dtype), clear_unowned_rows(lhs, group_sizes)
        dout = clear_unowned_rows(dout, group_sizes)
        owner_GR = _owner_mask(group_sizes, lhs.shape[0], lhs.dtype)
        einsum = functools.partial(jnp.einsum, preferred_element_type=_acc_dtype(lhs.dtype))
        of_group = [einsum("r,rn,kn->rk", owner, dout, weight) for owner, weight in zip(owner_GR, weights, strict=True)]
        dweight = jnp.stack([einsum("r,rk,rn->kn", owner, lhs, dout) for owner in owner_GR])
        return jnp.sum(jnp.stack(of_group), axis=0).astype(lhs.dtype), split_gradient(dweight, operands)


def _owner_mask(group_sizes: Array, rows: int, dtype) -> Array:
    """Return [G, R], one where the group owns the row."""
    stops = jnp.cumsum(group_sizes)[:, None]
    row = jnp.arange(rows)[None]
    return ((row >= stops - group_sizes[:, None]) & (row < stops)).astype(dtype)


@register("ragged")
class RaggedMatmul:
    """`lax.ragged_dot`, lowered by XLA on each platform: on a CPU with G times the FLOPs."""

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        out = lax.ragged_dot(
            clear_unowned_rows(lhs, group_sizes),
            gather_weights(operands, lhs.dtype),
            group_sizes,
            preferred_element_type=_acc_dtype(lhs.dtype),
        )
        return clear_unowned_rows(out, group_sizes).astype(lhs.dtype)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        lhs, dout = clear_unowned_rows(lhs, group_sizes), clear_unowned_rows(dout, group_sizes)
        transposed = jnp.swapaxes(gather_weights(operands, lhs.dtype), 1, 2)
        acc_dtype = _acc_dtype(lhs.dtype)
        dlhs = lax.ragged_dot(dout, transposed, group_sizes, preferred_element_type=acc_dtype)
        dlhs = clear_unowned_rows(dlhs, group_sizes).astype(lhs.dtype)
        if all(operand.grad_sink is None for operand in operands):
            return dlhs, (None,) * len(operands)
        rows_by_rows = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        dweight = lax.ragged_dot_general(lhs, dout, group_sizes, rows_by_rows, preferred_element_type=acc_dtype)
        return dlhs, split_gradient(dweight, operands)


Array = jax.Array

ROWS_BY_WEIGHT = (((1,), (0,)), ((), ()))  # [R, K] x [K, N] -> [R, N]
ROWS_BY_TRANSPOSED = (((1,), (1,)), ((), ()))  # [R, N] x [K, N] -> [R, K]
ROWS_BY_ROWS = (((0,), (0,)), ((), ()))  # [R, K] x [R, N] -> [K, N]


def multiply(a: Array, b: Array, dims) -> Array:
    """Return a matmul that accumulates in at least float32."""
    return lax.dot_general(a, b, dims, preferred_element_type=_acc_dtype(a.dtype))


def choose_heights(rows: int, groups: int, weight_elements: int) -> tuple[int, ...]:
    """Return the ladder of block heights for a matmul of `rows` rows with weights of `weight_elements` elements each.

    Larger matmuls get more heights, because they repay more compile time.
    """
    flops = 2 * rows * weight_elements
    return block_heights(rows, groups, steps=sum(flops > limit for limit in (3e7, 3e8, 3e9)))


def split_sizes(group_sizes: Array, operands: Operands) -> list[tuple[Array, Array]]:
    """Return for each operand its groups' sizes and the first row of its first group."""
    parts, offset, first_row = [], 0, jnp.zeros((), jnp.int32)
    for operand in operands:
        sizes = group_sizes[offset : offset + operand.slots.shape[0]]
        parts.append((sizes, first_row))
        offset += operand.slots.shape[0]
        first_row = first_row + jnp.sum(sizes, dtype=jnp.int32)
    return parts


def zeros_varying_like(shape, dtype, *like) -> Array:
    """Return zeros that may be the carry of a loop whose body mixes them with `like`."""
    return cast_varying(jnp.zeros(shape, dtype), varying_axes(*like))


def open_gradient(operand: GroupedWeights, like: Array) -> Array | None:
    """Return zeros for the gradient of an operand's groups, at least float32; None where it has no grad_sink."""
    if operand.grad_sink is None:
        return None
    return zeros_varying_like(operand.grad_sink.shape, _acc_dtype(operand.grad_sink.dtype), like)


def close_gradient(operand: GroupedWeights, dweight: Array | None) -> Array | None:
    """Return the gradient of an operand's groups in the dtype of its grad_sink."""
    return None if dweight is None else dweight.astype(operand.grad_sink.dtype)


@register("blocked")
class BlockedMatmul:
    """One XLA matmul per row block; forward and backward are loops of a dynamic trip count."""

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        rows = lhs.shape[0]
        out = zeros_varying_like((rows, operands[0].bank.shape[2]), lhs.dtype, lhs)
        for operand, (sizes, first_row) in zip(operands, split_sizes(group_sizes, operands), strict=True):

            def step(out, block, operand=operand):
                weight = block.pick(operand.bank, operand.slots, lhs.dtype)
                return block.write(out, multiply(block.read(lhs), weight, ROWS_BY_WEIGHT))

            heights = choose_heights(rows, sizes.shape[0], operand.bank[0].size)
            out = for_each_block(sizes, heights, rows, out, step, first_row)
        return out

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        rows = lhs.shape[0]
        dlhs = zeros_varying_like(lhs.shape, lhs.dtype, lhs)
        dweights = []
        for operand, (sizes, first_row) in zip(operands, split_sizes(group_sizes, operands), strict=True):

            def step(carry, block, operand=operand):
                dlhs, dweight = carry
                d = block.read(dout)
                weight = block.pick(operand.bank, operand.slots, lhs.dtype)
                dlhs = block.write(dlhs, multiply(d, weight, ROWS_BY_TRANSPOSED))
                if dweight is not None:
                    dweight = block.add_to_group(dweight, multiply(block.read(lhs), d, ROWS_BY_ROWS))
                return dlhs, dweight

            heights = choose_heights(rows, sizes.shape[0], operand.bank[0].size)
            carry = (dlhs, open_gradient(operand, lhs))
            dlhs, dweight = for_each_block(sizes, heights, rows, carry, step, first_row)
            dweights.append(close_gradient(operand, dweight))
        return dlhs, tuple(dweights)


@register("fused")
class FusedBlocks(BlockedMatmul):
    """`blocked`, and the whole FFN in one loop: about a tenth faster on a CPU, in a third of the memory."""

    def ffn(self, activation: Callable, rows: Array, group_sizes: Array, ins: tuple, outs: tuple) -> Array:
        return self._forward(activation, rows, group_sizes, ins, outs, save_residuals=False)[0]

    def ffn_forward(self, activation: Callable, rows: Array, group_sizes: Array, ins: tuple, outs: tuple):
        return self._forward(activation, rows, group_sizes, ins, outs, save_residuals=True)

    def _forward(self, activation, rows, group_sizes, ins, outs, *, save_residuals: bool):
        """Return the output [R, M], and with `save_residuals` the pre-activations, one [R, F] per input weight."""
        dtype = rows.dtype
        out = zeros_varying_like(rows.shape, dtype, rows)
        hidden_shape = (rows.shape[0], outs[0].bank.shape[1])
        residuals = tuple(zeros_varying_like(hidden_shape, dtype, rows) for _ in ins) if save_residuals else ()
        for part, (sizes, first_row) in enumerate(split_sizes(group_sizes, outs)):
            part_ins = [operands[part] for operands in ins]

            def step(carry, block, part_ins=part_ins, part_out=outs[part]):
                out, residuals = carry
                x = block.read(rows)
                pre = [multiply(x, block.pick(w.bank, w.slots, dtype), ROWS_BY_WEIGHT).astype(dtype) for w in part_ins]
                if residuals:
                    residuals = tuple(block.write(array, new) for array, new in zip(residuals, pre, strict=True))
                hidden = activation(*map(_to_acc_dtype, pre)).astype(dtype)
                y = multiply(hidden, block.pick(part_out.bank, part_out.slots, dtype), ROWS_BY_WEIGHT)
                return block.write(out, y), residuals

            heights = choose_heights(rows.shape[0], sizes.shape[0], outs[part].bank[0].size)
            out, residuals = for_each_block(sizes, heights, rows.shape[0], (out, residuals), step, first_row)
        return out, residuals

    def ffn_gradients(
        self, activation: Callable, rows: Array, residuals: tuple, dout: Array, group_sizes: Array, ins: tuple,
        outs: tuple,
    ):  # fmt: skip
        dtype = rows.dtype
        drows = zeros_varying_like(rows.shape, dtype, rows)
        dins, douts = [], []
        for part, (sizes, first_row) in enumerate(split_sizes(group_sizes, outs)):
            part_ins, part_out = [operands[part] for operands in ins], outs[part]

            def step(carry, block, part_ins=part_ins, part_out=part_out):
                drows, dw_ins, dw_out = carry
                x, dy = block.read(rows), block.read(dout)
                hidden, pull_back = jax.vjp(activation, *[_to_acc_dtype(block.read(array)) for array in residuals])
                dhidden = multiply(dy, block.pick(part_out.bank, part_out.slots, dtype), ROWS_BY_TRANSPOSED)
                dpre = [d.astype(dtype) for d in pull_back(_to_acc_dtype(dhidden.astype(dtype)))]
                dx = sum(
                    multiply(d, block.pick(w.bank, w.slots, dtype), ROWS_BY_TRANSPOSED)
                    for d, w in zip(dpre, part_ins, strict=True)
                )
                if dw_out is not None:
                    dw_out = block.add_to_group(dw_out, multiply(hidden.astype(dtype), dy, ROWS_BY_ROWS))
                dw_ins = [
                    dw if dw is None else block.add_to_group(dw, multiply(x, d, ROWS_BY_ROWS))
                    for dw, d in zip(dw_ins, dpre, strict=True)
                ]
                return block.write(drows, dx), dw_ins, dw_out

            carry = (drows, [open_gradient(w, rows) for w in part_ins], open_gradient(part_out, rows))
            heights = choose_heights(rows.shape[0], sizes.shape[0], part_out.bank[0].size)
            drows, dw_ins, dw_out = for_each_block(sizes, heights, rows.shape[0], carry, step, first_row)
            dins.append(list(map(close_gradient, part_ins, dw_ins)))
            douts.append(close_gradient(part_out, dw_out))
        return drows, tuple(zip(*dins, strict=True)), tuple(douts)


def _to_acc_dtype(x: Array) -> Array:
    return x.astype(_acc_dtype(x.dtype))


class ExpertWork(typing.NamedTuple):
    """FLOPs and bytes of a forward, and bytes of forward and backward together (their FLOPs are three times)."""

    forward_flops: float
    forward_bytes: float
    step_bytes: float


def expert_work(group_sizes, rows: int, model_dim: int, hidden_dim: int, item: int = 4) -> ExpertWork:
    """Return the work of the blocked implementations.

    Args:
      group_sizes: int [G], rows in use, as far as known; rows: R; item: bytes of a number.

    A forward reads weights and rows once and writes rows and hidden rows; a backward does so twice and writes gradients
    of the weights. Buffers are cleared whole, padding included.
    """
    groups = len(group_sizes)
    computed = rows_computed(np.asarray(group_sizes), choose_heights(rows, groups, model_dim * hidden_dim))
    weights = 2 * groups * model_dim * hidden_dim
    moved = rows * (model_dim + hidden_dim)
    flops = 4.0 * computed * model_dim * hidden_dim
    return ExpertWork(flops, float(item * (weights + moved)), float(item * (4 * weights + 3 * moved)))
