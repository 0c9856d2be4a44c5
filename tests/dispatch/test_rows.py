"""Rows that move: sums in float32, and gradients that do not read empty rows."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.moe.permute import permute_tokens, unpermute_tokens
from moe_jax.moe.routing import Parcel

# Two tokens, two choices; five rows. Choice 0 travels in row 3, choice 1 in row 0, choice 2 in no row of this pass,
# choice 3 in row 4; rows 1 and 2 are empty.
HAND = Parcel(
    choice_of_row=np.int32([1, 4, 4, 0, 3]), row_of_choice=np.int32([[3, 0], [5, 4]]), counts=np.int32([[1, 2]])
)


def test_unpermute_tokens_sums_in_float32():
    """1 and eight times 2^-9: one after the other in bfloat16 each would be lost, the sum is exact in float32."""
    rows = jnp.bfloat16([[1]] + [[2**-9]] * 8)
    parcel = Parcel(
        choice_of_row=np.arange(9, dtype=np.int32),
        row_of_choice=np.arange(9, dtype=np.int32)[None],
        counts=np.int32([[9]]),
    )
    y = unpermute_tokens(rows, jnp.ones((1, 9)), parcel)
    assert y.dtype == jnp.bfloat16 and y[0, 0] == 1 + 2**-6


def test_gradients_do_not_read_empty_rows():
    """A cotangent may hold anything in the rows that nobody fills, and weights of choices elsewhere get zero."""
    x = jnp.float32([[1, 2], [3, 4]])
    d_rows = jnp.float32([[1, 1], [np.nan, np.nan], [np.nan, np.nan], [2, 2], [4, 4]])
    np.testing.assert_array_equal(jax.vjp(lambda x: permute_tokens(x, HAND), x)[1](d_rows)[0], [[3, 3], [4, 4]])
    rows = jnp.where(jnp.isnan(d_rows), jnp.nan, 1.0)
    weights = jnp.float32([[10, 100], [7, 2]])
    _, pull_back = jax.vjp(lambda rows, weights: unpermute_tokens(rows, weights, HAND), rows, weights)
    got_rows, got_weights = pull_back(jnp.float32([[1, 2], [3, 4]]))
    np.testing.assert_array_equal(got_rows, [[100, 200], [0, 0], [0, 0], [10, 20], [6, 8]])
    np.testing.assert_array_equal(got_weights, [[3, 3], [0, 7]])
