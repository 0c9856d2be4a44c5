"""Float8 by loops over blocks and a table of all e4m3 numbers; and rows that are rounded to it."""

import jax
import numpy as np

from moe_jax.kernels.float8 import bytes_to_rows, rows_to_bytes

# all magnitudes of e4m3: 7 subnormals, then 3 bits of fraction and 15 exponents, but for the last, which is NaN
MAGNITUDES = np.array([2.0**-9 * n for n in range(8)] + [(8 + n) * 2.0**e for e in range(-9, 6) for n in range(8)][:-1])


def round_one(number):
    """Return the nearest e4m3 number; of two equally near, the one with an even last bit."""
    distance = np.abs(MAGNITUDES - abs(number))
    near = np.flatnonzero(distance == distance.min())
    return np.copysign(MAGNITUDES[min(near, key=lambda place: place % 2)], number)


def scale_of(block):
    """Return the least power of two, 2^-126 or more, that no magnitude of the block exceeds 448 times."""
    scale = 2.0**-126
    while np.abs(block).max() > 448 * scale:
        scale *= 2
    return scale


def rounded(array, blocks):
    """Return what quantising and bringing back makes of float32 [...], and the scales; blocks: lengths, one per dim."""
    out, counts = np.empty_like(array), [n // b for n, b in zip(array.shape, blocks, strict=True)]
    scales = np.empty(counts)
    for place in np.ndindex(*counts):
        cut = tuple(slice(i * b, (i + 1) * b) for i, b in zip(place, blocks, strict=True))
        block = array[cut]
        scales[place] = scale_of(block) if np.isfinite(block).all() else np.nan
        for entry in np.ndindex(block.shape):
            out[cut][entry] = round_one(block[entry] / scales[place]) * scales[place] if scales[place] > 0 else np.nan
    return out, scales


def in_float8(rows):
    """Return rows [R, K] quantised and brought back."""
    return bytes_to_rows(rows_to_bytes(rows), rows.shape[1], rows.dtype)


def straight_through(rows):
    """Return the same; its gradient is the identity."""
    passed = jax.custom_vjp(in_float8)
    passed.defvjp(lambda rows: (in_float8(rows), None), lambda _, d: (d,))
    return passed(rows)
