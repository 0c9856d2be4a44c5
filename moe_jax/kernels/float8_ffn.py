"""A grouped matmul of float8 operands over another implementation: `MoEConfig.expert_dtype = 'float8_e4m3'`.

See `grouped.py` for inputs and outputs. Rows and weights come in the compute dtype and are quantised here, by blocks
of 128 (`float8_blocks.py`), each time they are multiplied:

    forward      quantised rows x quantised weights                        sums in float32 or wider
    d-rows       quantised gradient x the same quantised weights           blocks of 128 x 128 serve both directions
    d-weights    rows x gradient as they came, by the implementation below

The gradient is straight through: rounding counts as the identity. NaN in a row that counts makes its results NaN.

Source: DeepSeek-V3 Technical Report (2024), section 3.3.1, which has d-weights in float8 too, and 3.3.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax.errors import UserError
from moe_jax.kernels.blocked import gather_weights
from moe_jax.kernels.float8_blocks import (
    BLOCK,
    check_blocks,
    dequantise,
    quantise,
)
from moe_jax.kernels.grouped import GroupedWeights, Operands, find_implementation, implementations, register
from moe_jax.kernels.hopper import MosaicKernels

Array = jax.Array
PREFIX = "float8:"  # and the name of the implementation below


class Float8Matmul:
    """Float8 over the implementation `below`, which computes d-weights, and the rest where it has no kernel.

    Over `mosaic` and `mosaic_sparing` tensor cores multiply the 8-bit numbers. Over any other implementation this is an
    emulation: quantised operands are brought back to the compute dtype, which holds them exactly because scales are
    powers of two, and multiplied there. Both add the same numbers, so they differ in the order of float32 additions
    alone; but tensor cores keep fewer bits of the sum over one block of 128, which is not emulated.
    """

    def __init__(self, below: str):
        self._below = find_implementation(below)

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands, transposed: bool = False) -> Array:
        """Return rows times weights, [R, N], or with `transposed` rows [R, N] times transposed weights, [R, K]."""
        contracted, resulting = operands[0].bank.shape[1:]
        for name, dim in (("the contracted dim", contracted), ("the resulting dim", resulting)):
            check_blocks("MoEConfig.expert_dtype", name, dim)
        values, scales = quantise(gather_weights(operands, lhs.dtype))
        slots = jnp.arange(values.shape[0], dtype=jnp.int32)
        if not isinstance(self._below, MosaicKernels):
            weights = dequantise(values, scales, lhs.dtype)
            weights = jnp.swapaxes(weights, 1, 2) if transposed else weights
            rows = dequantise(*quantise(lhs), lhs.dtype)
            return self._below.multiply(rows, group_sizes, (GroupedWeights(bank=weights, slots=slots),))
        if resulting % BLOCK or contracted % BLOCK or lhs.dtype not in (jnp.bfloat16, jnp.float16):
            raise UserError(
                f"the mosaic grouped matmul of float8 needs weights whose dims ({contracted}, {resulting}) are "
                f"multiples of {BLOCK}, and a compute dtype of 16 bits, not {lhs.dtype}; choose such sizes, or "
                "MoEConfig.grouped_matmul = 'fused'"
            )
        if not transposed:  # tensor cores multiply 8-bit numbers only where the contracted dim lies together
            values, scales = jnp.swapaxes(values, 1, 2), jnp.swapaxes(scales, 1, 2)
        return self._below.run(lhs, group_sizes, [(values, slots)], scales, transposed=True)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        dlhs = self.multiply(dout, group_sizes, operands, transposed=True)
        # D-weights contracts over rows: there the blocks of 1 x 128 lie across, groups begin at any row, and what is
        # summed goes straight into the parameters. The d-rows that comes with it is not computed.
        return dlhs, self._below.gradients(lhs, dout, group_sizes, operands)[1]


for _name in implementations():
    register(PREFIX + _name, Float8Matmul(_name))
