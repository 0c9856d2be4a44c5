"""Grouped matmul for Hopper GPUs: `hopper`, the Pallas kernels that ship with JAX.

See `grouped.py` for inputs and outputs; 16-bit floats, K and N multiples of 64. No GPU has run them for this project:
JAX's tests hold them to plain matmuls, and so does scripts/gpu_day.py. Only a program that uses these loads Pallas.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp

from moe_jax.errors import UserError
from moe_jax.kernels.blocked import clear_unowned_rows, gather_weights, split_gradient
from moe_jax.kernels.grouped import MATMULS, GroupedMatmul, Operands
from moe_jax.parallel.varying import cast_varying, varying_axes

Array = jax.Array

TILE = 64  # the least tile: rows of a warpgroup's matmul, and one swizzled line of 16-bit floats
LINES = 8  # rows of a swizzled tile of Hopper's shared memory: a copy into one starts at a multiple of them
HOPPER_CORES = 132


@MATMULS.register("hopper")
class HopperMatmul(GroupedMatmul):
    """The shipped `ragged_dot` and `transposed_ragged_dot` kernels; gradients of weights are rounded to 16 bits."""

    gathers = True

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands, transposed: bool = False) -> Array:
        """Return rows times weights, [R, N], or with `transposed` rows [R, N] times transposed weights, [R, K].

        Raises:
          UserError: rows or weights that Hopper's tensor cores cannot multiply in whole tiles.
        """
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        dims = operands[0].bank.shape[1:]
        if any(dim % TILE for dim in dims):
            raise UserError(
                f"the hopper grouped matmul needs weights whose dims {tuple(dims)} are multiples of {TILE}; choose "
                "such sizes, or MoEConfig.grouped_matmul = 'fused'"
            )
        if lhs.dtype not in (jnp.bfloat16, jnp.float16):
            raise UserError(
                f"the hopper grouped matmul takes bfloat16 or float16, not {lhs.dtype}; compute in bfloat16, or choose "
                "MoEConfig.grouped_matmul = 'fused'"
            )
        if not transposed:  # else it is done; the gradients read rows so, and one array then serves both
            lhs = clear_unowned_rows(lhs, group_sizes)
        weights, filled = gather_weights(operands, lhs.dtype), fill_lines(lhs)
        out = ragged_dot(
            filled,
            weights,
            group_sizes=group_sizes,
            block_m=128 if filled.shape[0] >= 128 * weights.shape[0] else TILE,
            max_concurrent_steps=4,
            transpose_rhs=transposed,
            **_tiles(weights.shape[1] if transposed else weights.shape[2]),
        )
        out = cast_varying(out, varying_axes(lhs))  # the kernel's outputs are typed as equal on all devices
        return clear_unowned_rows(out[: lhs.shape[0]], group_sizes)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as kernel

        # The weight gradient masks its first and last block by multiplication, which keeps a NaN.
        lhs, dout = clear_unowned_rows(lhs, group_sizes), clear_unowned_rows(dout, group_sizes)
        dlhs = self.multiply(dout, group_sizes, operands, transposed=True)
        if all(operand.grad_sink is None for operand in operands):
            return dlhs, (None,) * len(operands)
        if not hasattr(jax.devices()[0], "core_count"):  # compiling for a GPU on a machine without one
            known = types.SimpleNamespace(core_count=HOPPER_CORES)
            setattr(kernel, "jax", types.SimpleNamespace(**{**vars(jax), "devices": lambda: [known]}))  # noqa: B010
        dweight = kernel.transposed_ragged_dot(
            fill_lines(lhs),
            fill_lines(dout),
            group_sizes=group_sizes,
            block_m=128 if lhs.shape[1] % 128 == 0 else TILE,
            max_concurrent_steps=4,
            **_tiles(dout.shape[1]),
        )
        dweight = cast_varying(dweight, varying_axes(lhs))  # the kernel's outputs are typed as equal on all devices
        return dlhs, split_gradient(dweight, operands)


def fill_lines(rows: Array) -> Array:
    """Return [R, ...] with rows of zeros up to a multiple of `LINES`; a capacity may make any number of rows."""
    return jnp.pad(rows, ((0, -rows.shape[0] % LINES), (0, 0))) if rows.shape[0] % LINES else rows


def _tiles(resulting: int) -> dict[str, int]:
    """Return the sizes of tiles, and how many along N are visited before the next rows, which neighbours then share."""
    width = 128 if resulting % 128 == 0 else TILE
    together = next(count for count in (8, 4, 2, 1) if resulting % (count * width) == 0)
    return {"block_n": width, "block_k": TILE, "grid_block_n": together}
