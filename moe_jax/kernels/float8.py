"""e4m3 with one power of two per block: rows and weights quantised and back, rows as bytes, and grouped matmuls of it.

    rows     float [R, K]      ->  e4m3 [R, K], scales float32 [R, K / 128]              blocks of 1 x 128
    weights  float [G, K, N]   ->  e4m3 [G, K, N], scales float32 [G, K / 128, N / 128]  blocks of 128 x 128

A dim below 128 is one block; a longer one must be a multiple of 128. value x scale is the number.

Source: DeepSeek-V3 Technical Report (2024), section 3.3.2: e4m3 for all operands, tiles of 1 x 128 for activations and
blocks of 128 x 128 for weights, scaled online by their largest magnitude; and section 3.3.3: powers of two for the
activations that are dispatched. That report has other scales elsewhere; here all are powers of two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.kernels.blocked import gather_weights
from moe_jax.kernels.grouped import GroupedWeights, Operands, find_implementation

COMPUTE, E4M3 = "compute", "float8_e4m3"
DTYPES = (COMPUTE, E4M3)  # what MoEConfig.expert_dtype and MoEConfig.dispatch_dtype may be

Array = jax.Array
BLOCK = 128
VALUES = jnp.float8_e4m3fn
_MANTISSA, _EXPONENT = 23, 0xFF  # of a float32: bits of the fraction; the exponent of infinity and NaN
_NAN = 0x7FC00000
_448 = 8, 0x600000  # 448 = 1.75 x 2^8, as an exponent and the bits of the fraction


def check_blocks(field: str, name: str, dim: int) -> None:
    """Raise a UserError unless a dim is cut into whole blocks.

    Args:
      field: of the config that asks for float8; name: of the dim.
    """
    if dim % min(dim, BLOCK):
        raise UserError(
            f"{field} ('float8_e4m3') needs {name} ({dim}) of at most {BLOCK} or a multiple of it: scales are kept for "
            f"blocks of {BLOCK}; choose such a size, or {field} = 'compute'"
        )


def quantise(array: Array) -> tuple[Array, Array]:
    """Return (e4m3, scales float32) of rows [R, K], scales [R, K / 128], or weights [G, K, N], [G, K / 128, N / 128].

    The scale is the least power of two that brings the largest magnitude of its block to 448, the largest e4m3, or
    below. Rounding is to nearest, ties to even. A block of zeros is zeros, with the least scale, 2^-126. NaN or
    infinity anywhere in a block makes all of it NaN, and its scale; blocks do not see each other.
    """
    # Powers of two make scaling exact, in bfloat16 too. So a row that was quantised, sent and brought back is quantised
    # to the same values again, and products of blocks may be scaled before or after they are summed.
    shape = [array.shape[0]]
    for dim in array.shape[1:]:
        shape += [dim // min(dim, BLOCK), min(dim, BLOCK)]
    axes = tuple(range(2, len(shape), 2))  # within a block
    # as integers, the bits of magnitudes compare as the numbers do, NaN above all
    bits = lax.bitcast_convert_type(array.astype(jnp.float32), jnp.int32).reshape(shape)
    largest = jnp.max(bits & 0x7FFFFFFF, axis=axes)
    exponent, fraction = largest >> _MANTISSA, largest & ((1 << _MANTISSA) - 1)
    above = (fraction > _448[1]).astype(jnp.int32)
    # biased exponents of the scales: 1 to 247, or 255 for NaN
    exponents = jnp.where(exponent == _EXPONENT, _EXPONENT, jnp.maximum(exponent - _448[0] + above, 1))
    own = jnp.expand_dims(exponents, axes)
    inverse = _powers(jnp.where(own == _EXPONENT, _EXPONENT, 254 - own))
    values = (lax.bitcast_convert_type(bits, jnp.float32) * inverse).astype(VALUES)
    return values.reshape(array.shape), _powers(exponents)


def dequantise(values: Array, scales: Array, dtype) -> Array:
    """Return the array of what `quantise` returned."""
    shape = [values.shape[0]]
    for dim, blocks in zip(values.shape[1:], scales.shape[1:], strict=True):
        shape += [blocks, dim // blocks]
    blocks = values.astype(jnp.float32).reshape(shape) * jnp.expand_dims(scales, tuple(range(2, len(shape), 2)))
    return blocks.reshape(values.shape).astype(dtype)


def _powers(exponents: Array) -> Array:
    """Return float32 2^(exponent - 127), NaN for 255."""
    bits = jnp.where(exponents == _EXPONENT, _NAN, exponents << _MANTISSA)
    return lax.bitcast_convert_type(bits, jnp.float32)


# A row on its way is its values in e4m3, an exponent for each block of 128 (255 for NaN), and zeros up to a multiple
# of 16 bytes, so that messages of whole rows are aligned. Bytes of zero are a row of zeros.
ALIGNED = 16


def bytes_of_row(dim: int) -> int:
    """Return B, the bytes of a row of `dim` values."""
    return -(-(dim + dim // min(dim, BLOCK)) // ALIGNED) * ALIGNED


def rows_to_bytes(rows: Array) -> Array:
    """Return uint8 [R, B] of rows [R, M]."""
    values, scales = quantise(rows)
    exponents = lax.bitcast_convert_type(scales, jnp.int32) >> _MANTISSA
    dim = rows.shape[1]
    parts = [lax.bitcast_convert_type(values, jnp.uint8), exponents.astype(jnp.uint8)]
    fill = bytes_of_row(dim) - dim - scales.shape[1]
    return jnp.pad(jnp.concatenate(parts, axis=1), ((0, 0), (0, fill)))


def bytes_to_rows(sent: Array, dim: int, dtype) -> Array:
    """Return rows [R, dim] of bytes [R, B]."""
    values = lax.bitcast_convert_type(sent[:, :dim], VALUES)
    exponents = sent[:, dim : dim + dim // min(dim, BLOCK)].astype(jnp.int32)
    return dequantise(values, _powers(exponents), dtype)


class Float8Matmul:
    """A grouped matmul of float8 operands over the implementation `below`: `MoEConfig.expert_dtype = 'float8_e4m3'`.

    Rows and weights come in the compute dtype and are quantised each time they are multiplied:

        forward      quantised rows x quantised weights                        sums in float32 or wider
        d-rows       quantised gradient x the same quantised weights           blocks of 128 x 128 serve both directions
        d-weights    rows x gradient as they came, by the implementation below

    The gradient is straight through: rounding counts as the identity. NaN in a row that counts makes its results NaN.
    Source: DeepSeek-V3 Technical Report (2024), section 3.3.1, which has d-weights in float8 too, and 3.3.2.
    """

    # Over `hopper` tensor cores multiply the 8-bit numbers. Over any other implementation, and where a dim is no
    # multiple of 128, this is an emulation: quantised operands are brought back to the compute dtype, which holds them
    # exactly because scales are powers of two, and multiplied there. Both add the same numbers, so they differ in the
    # order of float32 additions alone; but tensor cores keep fewer bits of the sum over one block of 128, which is not
    # emulated.

    def __init__(self, below: str):
        self._below = find_implementation(below)

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands, transposed: bool = False) -> Array:
        """Return rows times weights, [R, N], or with `transposed` rows [R, N] times transposed weights, [R, K]."""
        for name, dim in zip(("the contracted dim", "the resulting dim"), operands[0].bank.shape[1:], strict=True):
            check_blocks("MoEConfig.expert_dtype", name, dim)
        values, scales = quantise(gather_weights(operands, lhs.dtype))
        if hasattr(self._below, "multiply_float8") and not any(dim % BLOCK for dim in values.shape[1:]):
            if not transposed:  # tensor cores multiply 8-bit numbers only where the contracted dim lies together
                values, scales = jnp.swapaxes(values, 1, 2), jnp.swapaxes(scales, 1, 2)
            return self._below.multiply_float8(lhs, group_sizes, values, scales)
        weights = dequantise(values, scales, lhs.dtype)
        weights = jnp.swapaxes(weights, 1, 2) if transposed else weights
        rows, slots = dequantise(*quantise(lhs), lhs.dtype), jnp.arange(values.shape[0], dtype=jnp.int32)
        return self._below.multiply(rows, group_sizes, (GroupedWeights(bank=weights, slots=slots),))

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        dlhs = self.multiply(dout, group_sizes, operands, transposed=True)
        # D-weights contracts over rows: there the blocks of 1 x 128 lie across, groups begin at any row, and what is
        # summed goes straight into the parameters. The d-rows that comes with it is not computed.
        return dlhs, self._below.gradients(lhs, dout, group_sizes, operands)[1]
