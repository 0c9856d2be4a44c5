"""Sums over rows against plain ones, and the gradient of a vector that all rows read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel.row_sums import MOST_ROWS, spread, sum_rows


@pytest.mark.parametrize("rows", [1, 7, 2 * MOST_ROWS, 3 * MOST_ROWS + 6, 2 * MOST_ROWS + 1, 20 * MOST_ROWS])
def test_sums_are_plain_sums(rows):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, 2, 3)))
        np.testing.assert_allclose(sum_rows(x), jnp.sum(x, axis=0), rtol=0, atol=1e-10)
        small = x.astype(jnp.bfloat16)
        assert sum_rows(small, jnp.float64).dtype == jnp.float64
        np.testing.assert_allclose(sum_rows(small, jnp.float64), jnp.sum(small.astype(float), 0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_vector_that_all_rows_read(shape):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        vector, like = jnp.asarray(rng.normal(size=shape)), jnp.asarray(rng.normal(size=(4, 600, *shape)))

        def loss(read):
            return lambda vector: jnp.sum(jnp.sin(read(vector) * like))

        got = jax.jit(jax.value_and_grad(loss(lambda v: spread(v, like))))(vector)
        want = jax.value_and_grad(loss(lambda v: v[None, None]))(vector)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-10)
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-10)
