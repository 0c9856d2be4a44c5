"""A grouped matmul of float8 operands over another implementation: `MoEConfig.expert_dtype = 'float8_e4m3'`.

See `grouped.py` for inputs and outputs. Rows and weights come in the compute dtype and are quantised here, by blocks
of 128 (`kernels/float8_blocks.py`), each time they are multiplied:

    forward      quantised rows x quantised weights                        sums in float32 or wider
    d-rows       quantised gradient x the same quantised weights           blocks of 128 x 128 serve both directions
    d-weights    rows x gradient as they came, by the implementation below

D-weights contracts over rows: there the blocks of 1 x 128 lie across, groups begin at any row, and what is summed goes
straight into the parameters. The gradient is straight through: rounding counts as the identity.

Over `mosaic` and `mosaic_sparing` tensor cores multiply the 8-bit numbers (`float8_kernels.py`). Over any other
implementation this is an emulation: quantised operands are brought back to the compute dtype, which holds them exactly
because scales are powers of two, and multiplied there. Both add the same numbers, so they differ in the order of
float32 additions alone; but tensor cores keep fewer bits of the sum over one block of 128, which is not emulated. NaN
rows of no group stay where they are; NaN in a row that counts makes its results NaN.

Source: DeepSeek-V3 Technical Report (2024), section 3.3.1, which has d-weights in float8 too, and 3.3.2.
Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from moe_jax.errors import UserError
from moe_jax.kernels import hopper
from moe_jax.kernels.blocked import gather_weights
from moe_jax.kernels.float8_blocks import (
    BLOCK,
    check_blocks,
    dequantise_rows,
    dequantise_weights,
    quantise_rows,
    quantise_weights,
)
from moe_jax.kernels.grouped import GroupedWeights, Operands, find_implementation, implementations, register
from moe_jax.kernels.hopper import MosaicKernels
from moe_jax.kernels.row_blocks import LINES
from moe_jax.parallel.varying import cast_varying, varying_axes

Array = jax.Array
PREFIX = "float8:"  # and the name of the implementation below
FIELD = "MoEConfig.expert_dtype"


def has_kernel(device, dtype, dims: tuple[int, ...]) -> bool:
    """Return whether a device, real or described, multiplies 8-bit numbers of weights with these dims here."""
    return hopper.fits(device, dtype, dims) and not any(dim % BLOCK for dim in dims)


@dataclasses.dataclass(frozen=True)
class Float8Matmul:
    """Attribute `below`: name of the implementation that computes d-weights, and the rest where it has no kernel."""

    below: str

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        values, scales = quantise_weights(self._weights(operands, lhs.dtype))
        if isinstance(self._below, MosaicKernels):
            return self._by_kernel(lhs, group_sizes, jnp.swapaxes(values, 1, 2), jnp.swapaxes(scales, 1, 2))
        return self._emulated(lhs, group_sizes, dequantise_weights(values, scales, lhs.dtype))

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        values, scales = quantise_weights(self._weights(operands, lhs.dtype))
        if isinstance(self._below, MosaicKernels):
            dlhs = self._by_kernel(dout, group_sizes, values, scales)
        else:
            weights = jnp.swapaxes(dequantise_weights(values, scales, lhs.dtype), 1, 2)
            dlhs = self._emulated(dout, group_sizes, weights)
        return dlhs, self._below.gradients(lhs, dout, group_sizes, operands)[1]  # its own d-rows is not computed

    @property
    def _below(self):
        return find_implementation(self.below)

    def _weights(self, operands: Operands, dtype) -> Array:
        """Return the weights [G, K, N] of all groups in the dtype of the rows: as one without float8 reads them."""
        contracted, resulting = operands[0].bank.shape[1:]
        for name, dim in (("the contracted dim", contracted), ("the resulting dim", resulting)):
            check_blocks(FIELD, name, dim)
        return gather_weights(operands, dtype)

    def _emulated(self, rows: Array, group_sizes: Array, weights: Array) -> Array:
        slots = jnp.arange(weights.shape[0], dtype=jnp.int32)
        operand = GroupedWeights(bank=weights, slots=slots)
        return self._below.multiply(dequantise_rows(*quantise_rows(rows), rows.dtype), group_sizes, (operand,))

    def _by_kernel(self, rows: Array, group_sizes: Array, weights: Array, weight_scales: Array) -> Array:
        """Multiply by weights e4m3 [G, N, K] with scales float32 [G, N / 128, K / 128]."""
        from moe_jax.kernels.float8_kernels import float8_rows_by_weights

        resulting, contracted = weights.shape[1:]
        if resulting % BLOCK or contracted % BLOCK or rows.dtype not in (jnp.bfloat16, jnp.float16):
            raise UserError(
                f"the mosaic grouped matmul of float8 needs weights whose dims ({contracted}, {resulting}) are "
                f"multiples of {BLOCK}, and a compute dtype of 16 bits, not {rows.dtype}; choose such sizes, or "
                "MoEConfig.grouped_matmul = 'fused'"
            )
        filled = jnp.pad(rows, ((0, -rows.shape[0] % LINES), (0, 0)))
        values, scales = quantise_rows(filled)
        out = float8_rows_by_weights(
            (values, scales.T),
            group_sizes,
            (weights, weight_scales),
            out_dtype=rows.dtype,
            cores=self._below.cores(),
            interpret=self._below.interpret,
        )
        return cast_varying(out[: rows.shape[0]], varying_axes(rows))  # a kernel's outputs are typed as equal


for _name in implementations():
    register(PREFIX + _name)(functools.partial(Float8Matmul, _name))
