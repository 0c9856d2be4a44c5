"""e4m3 with one power of two per block of a row: rows [R, M] quantised and back, and as bytes that travel.

A row of at most 128 elements is one block; a longer one must be a multiple of 128. value x scale is the number.
Source: DeepSeek-V3 Technical Report (2024), section 3.3.2: tiles of 1 x 128 for activations, scaled online by their
largest magnitude; and section 3.3.3: powers of two for those that are dispatched.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

COMPUTE, E4M3 = "compute", "float8_e4m3"
DTYPES = (COMPUTE, E4M3)  # what MoEConfig.dispatch_dtype may be

Array = jax.Array
BLOCK = 128
VALUES = jnp.float8_e4m3fn
_MANTISSA, _EXPONENT = 23, 0xFF  # of a float32: bits of the fraction; the exponent of infinity and NaN
_NAN = 0x7FC00000
_448 = 8, 0x600000  # 448 = 1.75 x 2^8, as an exponent and the bits of the fraction


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
    """Return uint8 [R, B] of rows [R, M]: values in e4m3, and one scale for each block.

    The scale is the least power of two that brings the largest magnitude of its block to 448, the largest e4m3, or
    below. Rounding is to nearest, ties to even. A block of zeros is zeros, with the least scale, 2^-126. NaN or
    infinity anywhere in a block makes all of it NaN, and its scale; blocks do not see each other.
    """
    # Powers of two make scaling exact, in bfloat16 too. So a row that was quantised, sent and brought back is quantised
    # to the same values again.
    count, dim = rows.shape
    shape = (count, dim // min(dim, BLOCK), min(dim, BLOCK))
    # as integers, the bits of magnitudes compare as the numbers do, NaN above all
    bits = lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.int32).reshape(shape)
    largest = jnp.max(bits & 0x7FFFFFFF, axis=2)
    exponent, fraction = largest >> _MANTISSA, largest & ((1 << _MANTISSA) - 1)
    above = (fraction > _448[1]).astype(jnp.int32)
    # biased exponents of the scales: 1 to 247, or 255 for NaN
    exponents = jnp.where(exponent == _EXPONENT, _EXPONENT, jnp.maximum(exponent - _448[0] + above, 1))
    of_block = exponents[:, :, None]
    inverse = _powers(jnp.where(of_block == _EXPONENT, _EXPONENT, 254 - of_block))
    values = (lax.bitcast_convert_type(bits, jnp.float32) * inverse).astype(VALUES).reshape(rows.shape)
    parts = [lax.bitcast_convert_type(values, jnp.uint8), exponents.astype(jnp.uint8)]
    fill = bytes_of_row(dim) - dim - shape[1]
    return jnp.pad(jnp.concatenate(parts, axis=1), ((0, 0), (0, fill)))


def bytes_to_rows(sent: Array, dim: int, dtype) -> Array:
    """Return rows [R, dim] of bytes [R, B]: every value times the scale of its block."""
    values = lax.bitcast_convert_type(sent[:, :dim], VALUES)
    scales = _powers(sent[:, dim : dim + dim // min(dim, BLOCK)].astype(jnp.int32))
    blocks = values.astype(jnp.float32).reshape(*scales.shape, -1) * scales[:, :, None]
    return blocks.reshape(values.shape).astype(dtype)
