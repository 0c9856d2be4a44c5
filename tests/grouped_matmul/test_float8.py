"""Float8: the quantiser against a table of all e4m3 numbers, and rows as bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.float8_oracle import MAGNITUDES, rounded

from moe_jax.kernels.float8 import bytes_of_row, bytes_to_rows, rows_to_bytes


def draw(*shape):
    """Return float32 of many sizes, ties, zeros, and blocks that are not finite."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-20, 20, size=shape))
    return x.astype(np.float32)


def edge_rows():
    x = draw(12, 256)
    x[0], x[1, :128] = 0, 0
    x[2] *= 2.0**-120  # scales meet their floor, and numbers are denormal
    x[3] = x[3] * np.float32(2.0**107)
    x[4, 7], x[5, 200], x[6, 0] = np.nan, np.inf, -np.inf
    x[7] = np.resize(MAGNITUDES, 256)  # nothing is rounded
    x[8, 1:] = np.resize((MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2, 255)  # every tie
    x[8, :2], x[8, 128] = 448, 448
    x[9, :128], x[9, 0] = 1.0, 448.00003  # just above the largest
    return x


def test_rows_equal_loops():
    x = edge_rows()
    sent = jax.jit(rows_to_bytes)(x)
    values = jax.lax.bitcast_convert_type(sent[:, :256], jnp.float8_e4m3fn)
    exponents = np.asarray(sent[:, 256:258], np.float64)
    scales = np.where(exponents == 255, np.nan, np.exp2(exponents - 127))
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)  # denormal numbers count as zero
    want, want_scales = rounded(x, (1, 128))
    np.testing.assert_array_equal(scales, want_scales)
    got = np.asarray(jax.jit(bytes_to_rows, static_argnums=(1, 2))(sent, 256, jnp.float32))
    np.testing.assert_array_equal(np.where(np.abs(got) < 1e-37, 0, got), np.where(np.abs(want) < 1e-37, 0, want))
    nan = np.isnan(got).reshape(12, 2, 128)
    assert nan.any(axis=2).tolist() == nan.all(axis=2).tolist() and nan.all(axis=2).sum() == 3
    assert np.nanmax(np.abs(np.asarray(values, np.float32))) == 448


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_bytes_hold_all_and_a_second_rounding_changes_nothing(dtype):
    """What comes back is exact in the compute dtype, and quantised again it is the same."""
    x = jnp.asarray(edge_rows(), dtype)
    back = lambda x, to=dtype: bytes_to_rows(rows_to_bytes(x), 256, to)  # noqa: E731
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a, "f4"), np.asarray(b, "f4"))  # noqa: E731
    sent = rows_to_bytes(x)
    assert sent.dtype == jnp.uint8 and sent.shape == (12, bytes_of_row(256)) == (12, 272)
    same(back(back(x)), back(x))
    same(back(x), back(x, jnp.float32))
    assert not bytes_to_rows(jnp.zeros((1, 272), jnp.uint8), 256, dtype).any()
    assert [bytes_of_row(dim) for dim in (4, 15, 64, 128, 768, 2048)] == [16, 16, 80, 144, 784, 2064]
