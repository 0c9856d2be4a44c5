"""Two grouped matmuls without loops: `reference`, the oracle, and `ragged`, for TPU.

See `contract.py` for inputs and outputs. Both gather the groups' weights into one array [G, K, N] first.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.row_sums import rows_in_use
from moe_jax.grouped_matmul.contract import Operands, register

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
