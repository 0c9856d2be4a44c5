"""Quantised rows as bytes, so that values and scales travel in one exchange.

    rows float [R, M]  <->  uint8 [R, B]: M values in e4m3, an exponent for each block of 128, zeros to fill

A scale is a power of two, so its exponent of eight bits is all there is of it (255 for NaN). B is a multiple of 16, so
that messages of whole rows are aligned: 784 for 768 values, where bfloat16 has 1,536 bytes. Bytes of zero are a row
of zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.float8.blocks import VALUES, block_of, dequantise_rows, quantise_rows

Array = jax.Array
ALIGNED = 16


def bytes_of_row(dim: int) -> int:
    """Return B, the bytes of a row of `dim` values."""
    return -(-(dim + dim // block_of(dim)) // ALIGNED) * ALIGNED


def rows_to_bytes(rows: Array) -> Array:
    """Return uint8 [R, B] of rows [R, M]."""
    values, scales = quantise_rows(rows)
    exponents = lax.bitcast_convert_type(scales, jnp.int32) >> 23
    dim = rows.shape[1]
    parts = [lax.bitcast_convert_type(values, jnp.uint8), exponents.astype(jnp.uint8)]
    fill = bytes_of_row(dim) - dim - scales.shape[1]
    return jnp.pad(jnp.concatenate(parts, axis=1), ((0, 0), (0, fill)))


def bytes_to_rows(sent: Array, dim: int, dtype) -> Array:
    """Return rows [R, dim] of bytes [R, B]."""
    values = lax.bitcast_convert_type(sent[:, :dim], VALUES)
    exponents = sent[:, dim : dim + dim // block_of(dim)].astype(jnp.int32)
    bits = jnp.where(exponents == 255, 0x7FC00000, exponents << 23)
    return dequantise_rows(values, lax.bitcast_convert_type(bits, jnp.float32), dtype)
