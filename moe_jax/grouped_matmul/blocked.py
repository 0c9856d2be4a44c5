"""Grouped matmul as loops over row blocks: about the FLOPs of the rows in use, with plain XLA matmuls.

Made for CPUs, where XLA expands `lax.ragged_dot` to G times the work. See `row_blocks.py` for the loops and
`contract.py` for inputs and outputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.grouped_matmul.contract import GroupedWeights, Operands, register
from moe_jax.grouped_matmul.row_blocks import block_heights, for_each_block

Array = jax.Array

ROWS_BY_WEIGHT = (((1,), (0,)), ((), ()))  # [R, K] x [K, N] -> [R, N]
ROWS_BY_TRANSPOSED = (((1,), (1,)), ((), ()))  # [R, N] x [K, N] -> [R, K]
ROWS_BY_ROWS = (((0,), (0,)), ((), ()))  # [R, K] x [R, N] -> [K, N]


def multiply(a: Array, b: Array, dims) -> Array:
    """Return a matmul that accumulates in at least float32."""
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


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
    return zeros_varying_like(operand.grad_sink.shape, jnp.promote_types(operand.grad_sink.dtype, jnp.float32), like)


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
