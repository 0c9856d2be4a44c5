"""Float8: the quantiser against a table of all e4m3 numbers, the emulation against loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.float8_oracle import MAGNITUDES, rounded
from support.grouped_cases import as_operands, loop_oracle, make_case

from moe_jax.kernels.float8 import bytes_of_row, bytes_to_rows, dequantise, quantise, rows_to_bytes
from moe_jax.kernels.grouped import grouped_matmul
from moe_jax.models.config import ModelConfig
from moe_jax.training.expert_check import compare_expert

# R is no multiple of 8; groups of one row, of none, across tiles, that end where a tile ends; unowned rows are NaN
ROWS, SIZES, CONTRACTED, RESULTING = 221, (70, 0, 1, 58, 64), 256, 128


def by_loops(lhs, group_sizes, dout, weights):
    """Return (out, dlhs, dweights) in float64: rows and weights are quantised, but for the gradient of weights."""
    as_read = lambda array: np.asarray(dequantise(*quantise(jnp.asarray(array)), jnp.float32), np.float64)  # noqa: E731
    weights = [(as_read(bank), slots) for bank, slots in weights]
    out, dlhs, _ = loop_oracle(as_read(lhs), group_sizes, as_read(dout), weights)
    return out, dlhs, loop_oracle(lhs.astype(np.float64), group_sizes, dout.astype(np.float64), weights)[2]


def test_equals_loops():
    with jax.enable_x64(True):
        case = make_case(ROWS, SIZES, contracted=CONTRACTED, resulting=RESULTING, counts=(4, 1))
        lhs, sizes, dout, weights = case
        operands = as_operands(weights, [jnp.zeros((len(slots), CONTRACTED, RESULTING)) for _, slots in weights])

        @jax.jit
        def run(lhs, dout, operands):
            matmul = functools.partial(grouped_matmul, implementation="float8:fused")
            out, pull = jax.vjp(lambda lhs, operands: matmul(lhs, jnp.asarray(sizes), operands), lhs, operands)
            return out, *pull(dout)

        out, dlhs, dops = run(jnp.asarray(lhs), jnp.asarray(dout), operands)
        got = out, dlhs, jnp.concatenate([operand.grad_sink for operand in dops])
        assert out.dtype == dlhs.dtype == jnp.float64
        for array, want in zip(got, by_loops(*case), strict=True):
            np.testing.assert_allclose(array, want, atol=1e-12 * np.abs(want).max())


def test_first_step_check_takes_rounding_to_float8_for_right():
    config = ModelConfig(model_dim=64, hidden_dim=128, dtype="bfloat16", activation="swiglu")
    size, limit, _ = compare_expert("float8:ragged", config, jax.devices()[0])
    assert size <= limit


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


def test_rows_and_weights_equal_loops():
    x = edge_rows()
    values, scales = jax.jit(quantise)(x)
    assert values.dtype == jnp.float8_e4m3fn and values.shape == x.shape and scales.shape == (12, 2)
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)  # denormal numbers count as zero
    want, want_scales = rounded(x, (1, 128))
    np.testing.assert_array_equal(scales, want_scales)
    got = np.asarray(jax.jit(dequantise, static_argnums=2)(values, scales, jnp.float32))
    np.testing.assert_array_equal(np.where(np.abs(got) < 1e-37, 0, got), np.where(np.abs(want) < 1e-37, 0, want))
    nan = np.isnan(got).reshape(12, 2, 128)
    assert nan.any(axis=2).tolist() == nan.all(axis=2).tolist() and nan.all(axis=2).sum() == 3
    assert np.nanmax(np.abs(np.asarray(values, np.float32))) == 448
    w = draw(2, 256, 32)  # weights have a scale for 128 rows of all columns
    w[1, 130, 3] = np.nan
    values, scales = jax.jit(quantise)(w)
    want, want_scales = rounded(w, (1, 128, 32))
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(dequantise(values, scales, jnp.float32), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_bytes_hold_all_and_a_second_rounding_changes_nothing(dtype):
    """What comes back is exact in the compute dtype, and quantised again it is the same."""
    x = jnp.asarray(edge_rows(), dtype)
    back = lambda x, to=dtype: dequantise(*quantise(x), to)  # noqa: E731
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a, "f4"), np.asarray(b, "f4"))  # noqa: E731
    sent = rows_to_bytes(x)
    assert sent.dtype == jnp.uint8 and sent.shape == (12, bytes_of_row(256)) == (12, 272)
    same(bytes_to_rows(sent, 256, dtype), back(x))
    same(back(back(x)), back(x))
    same(back(x), back(x, jnp.float32))
    assert not bytes_to_rows(jnp.zeros((1, 272), jnp.uint8), 256, dtype).any()
    assert [bytes_of_row(dim) for dim in (4, 15, 64, 128, 768, 2048)] == [16, 16, 80, 144, 784, 2064]
