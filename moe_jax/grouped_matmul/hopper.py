"""Grouped matmul by the Pallas kernels for Hopper that ship with JAX, with a backward made of the same kernels.

See `contract.py` for inputs and outputs. Limits: 16-bit floats, K and N multiples of 64. The kernels lower on any
machine; this project has not run them on a GPU, so training compares them with plain matmuls before it starts
(`training/first_step_check.py`). Only a program that uses `hopper` loads Pallas.

Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp

from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.errors import UserError
from moe_jax.grouped_matmul.contract import Operands, register
from moe_jax.grouped_matmul.portable import clear_unowned_rows, gather_weights, split_gradient

Array = jax.Array

CAPABILITY = "9.0"  # the kernels use instructions of this generation alone
TILE = 64  # the least tile: rows of a warpgroup's matmul, and one swizzled line of 16-bit floats
LINES = 8  # rows come in a multiple of the lines of a swizzled tile
HOPPER_CORES = 132


def fits(device, dtype, dims: tuple[int, ...]) -> bool:
    """Return whether a device, real or described, runs the kernels on rows of a dtype and weights of these dims."""
    return (
        str(getattr(device, "compute_capability", "")) == CAPABILITY
        and dtype in (jnp.bfloat16, jnp.float16)
        and not any(dim % TILE for dim in dims)
    )


@register("hopper")
class HopperMatmul:
    """The shipped `ragged_dot` and `transposed_ragged_dot` kernels; gradients of weights are rounded to 16 bits."""

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        _check(lhs, operands)
        weights = gather_weights(operands, lhs.dtype)
        return _rows_times_weights(lhs, weights, group_sizes, transpose_rhs=False)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        _check(lhs, operands)
        # The weight gradient masks its first and last block by multiplication, which keeps a NaN.
        lhs, dout = clear_unowned_rows(lhs, group_sizes), clear_unowned_rows(dout, group_sizes)
        weights = gather_weights(operands, lhs.dtype)
        dlhs = _rows_times_weights(dout, weights, group_sizes, transpose_rhs=True)
        if all(operand.grad_sink is None for operand in operands):
            return dlhs, (None,) * len(operands)
        return dlhs, split_gradient(_transposed_ragged_dot(_fill(lhs), _fill(dout), group_sizes), operands)


def _check(lhs: Array, operands: Operands) -> None:
    contracted, resulting = operands[0].bank.shape[1:]
    if contracted % TILE or resulting % TILE:
        raise UserError(
            f"the hopper grouped matmul needs weights whose dims ({contracted}, {resulting}) are multiples of {TILE}; "
            "choose such sizes, or MoEConfig.grouped_matmul = 'fused'"
        )
    if lhs.dtype not in (jnp.bfloat16, jnp.float16):
        raise UserError(
            f"the hopper grouped matmul takes bfloat16 or float16, not {lhs.dtype}; compute in bfloat16, or choose "
            "MoEConfig.grouped_matmul = 'fused'"
        )


def _rows_times_weights(lhs: Array, weights: Array, group_sizes: Array, *, transpose_rhs: bool) -> Array:
    """Return [R, N], zero past the last group, for any R."""
    out = _ragged_dot(_fill(lhs), weights, group_sizes, transpose_rhs=transpose_rhs)
    return clear_unowned_rows(out[: lhs.shape[0]], group_sizes)


def _fill(rows: Array) -> Array:
    """Return [R, ...] with rows of zeros up to a multiple of `LINES`; a capacity may make any number of rows."""
    return jnp.pad(rows, ((0, -rows.shape[0] % LINES), (0, 0))) if rows.shape[0] % LINES else rows


def _largest_tile(size: int, most: int = 128) -> int:
    return next(tile for tile in (128, TILE) if tile <= most and size % tile == 0)


def _tiles_side_by_side(size: int, tile: int) -> int:
    """Return how many tiles along N are visited before the next rows: neighbours then share rows in the cache."""
    return next(count for count in (8, 4, 2, 1) if size % (count * tile) == 0)


def _ragged_dot(lhs: Array, weights: Array, group_sizes: Array, *, transpose_rhs: bool) -> Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    resulting = weights.shape[1] if transpose_rhs else weights.shape[2]
    block_n = _largest_tile(resulting)
    out = ragged_dot(
        lhs,
        weights,
        group_sizes=group_sizes,
        block_m=128 if lhs.shape[0] >= 128 * weights.shape[0] else TILE,
        block_n=block_n,
        block_k=TILE,
        max_concurrent_steps=4,
        grid_block_n=_tiles_side_by_side(resulting, block_n),
        transpose_rhs=transpose_rhs,
    )
    return cast_varying(out, varying_axes(lhs))  # the kernel's outputs are typed as equal on all devices


def _transposed_ragged_dot(lhs: Array, dout: Array, group_sizes: Array) -> Array:
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as kernel

    if not hasattr(jax.devices()[0], "core_count"):  # compiling for a GPU on a machine without one
        setattr(kernel, "jax", _JaxOnHopper())  # noqa: B010  (a plain assignment is a type error)
    block_n = _largest_tile(dout.shape[1])
    dweight = kernel.transposed_ragged_dot(
        lhs,
        dout,
        group_sizes=group_sizes,
        block_m=_largest_tile(lhs.shape[1]),
        block_n=block_n,
        block_k=TILE,
        max_concurrent_steps=4,
        grid_block_n=_tiles_side_by_side(dout.shape[1], block_n),
    )
    return cast_varying(dweight, varying_axes(lhs))  # the kernel's outputs are typed as equal on all devices


class _JaxOnHopper:
    """The `jax` module, for the shipped kernel: it reads how many cores the first device has; a CPU has none."""

    def __getattr__(self, name):
        return getattr(jax, name)

    def devices(self):
        return [types.SimpleNamespace(core_count=HOPPER_CORES)]
