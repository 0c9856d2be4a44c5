"""Rows that move, and their hand-written gradients against those of one-hot matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.moe.permute import permute_rows, permute_tokens, unpermute_rows, unpermute_tokens
from moe_jax.moe.routing import Parcel, pack, regroup, route

DIM = 3
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


def one_hot(index, size):
    """Return [n, size], row i one at index[i]; all zero where the index is out of range."""
    return (np.asarray(index).reshape(-1)[:, None] == np.arange(size)[None]).astype(np.float64)


def parcel_of(case, index):
    choice, destination, group = case.draw()

    @jax.jit
    def routed(choice, destination, group):
        routing = route(choice, destination, group, case.destinations, case.groups)
        return pack(routing, index, case.layout, case.top_k, case.groups)

    return jax.tree.map(np.asarray, routed(choice, destination, group)), choice.weights


def assert_equal_with_gradients(ours, naive, arguments):
    """Compare values and all gradients in float64, for one random cotangent."""
    shape = jax.eval_shape(ours, *arguments).shape
    cotangent = np.random.default_rng(9).normal(size=shape)

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, *arguments):
        out, pull_back = jax.vjp(function, *arguments)
        return out, *pull_back(cotangent)

    for mine, theirs in zip(both(ours, *arguments), both(naive, *arguments), strict=True):
        assert mine.dtype == jnp.float64
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-14 * max(1, np.max(np.abs(theirs))))  # K terms


def test_token_moves_equal_one_hot_matrices(case):
    """permute_tokens = P (x repeated K times); unpermute_tokens = sum over k of weight times P^T rows."""
    with jax.enable_x64(True):
        parcel, weights = parcel_of(case, int(case.rows < case.tokens))  # the second pass where there may be one
        rng = np.random.default_rng(2)
        x = rng.normal(size=(case.tokens, DIM))
        rows = rng.normal(size=(case.destinations * case.rows, DIM))
        to_rows = one_hot(parcel.choice_of_row, case.tokens * case.top_k)  # [R, A]
        to_choices = one_hot(parcel.row_of_choice, len(rows))  # [A, R]
        np.testing.assert_array_equal(to_choices, to_rows.T)
        assert_equal_with_gradients(
            lambda x: permute_tokens(x, parcel), lambda x: to_rows @ jnp.repeat(x, case.top_k, axis=0), (x,)
        )
        assert_equal_with_gradients(
            lambda rows, weights: unpermute_tokens(rows, weights, parcel),
            lambda rows, weights: jnp.einsum("tk,tkm->tm", weights, (to_choices @ rows).reshape(*weights.shape, -1)),
            (rows, weights),
        )


def test_group_moves_equal_one_hot_matrices(case):
    with jax.enable_x64(True):
        parcel, _ = parcel_of(case, 0)
        grouping = jax.tree.map(np.asarray, jax.jit(regroup, static_argnums=1)(parcel.counts, case.layout))
        rows = np.random.default_rng(2).normal(size=(case.destinations * case.rows, DIM))
        matrix = one_hot(grouping.row_of_place, len(rows))
        assert_equal_with_gradients(lambda r: permute_rows(r, grouping), lambda r: matrix @ r, (rows,))
        assert_equal_with_gradients(lambda r: unpermute_rows(r, grouping), lambda r: matrix.T @ r, (rows,))


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


def exchange(buckets):
    """What an all-to-all does: [source, destination, ...] -> [destination, source, ...]."""
    return jnp.swapaxes(buckets, 0, 1)


def test_dispatch_identity_combine(case):
    """With experts that change nothing and weights of one, each token comes back K times, to the bit.

    D sources, each of which is a destination too; tokens on a grid of 2^-10, so that sums in float32 are exact.
    """
    devices, passes = case.destinations, -(-case.tokens * case.top_k // case.rows)
    drawn = [case.draw(seed) for seed in range(devices)]
    choice, destination, group = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
    x = np.random.default_rng(3).integers(-(2**12), 2**12, (devices, case.tokens, DIM)).astype(np.float32) / 2**10
    ones = jnp.ones(choice.keep_mask.shape)

    @jax.jit
    def there_and_back(x):
        routing = jax.vmap(lambda c, d, g: route(c, d, g, devices, case.groups))(choice, destination, group)

        def one_pass(index):
            cut = functools.partial(pack, index=index, layout=case.layout, top_k=case.top_k, num_groups=case.groups)
            parcel = jax.vmap(lambda r: cut(r))(routing)
            sent = jax.vmap(permute_tokens)(x, parcel)
            arrived = exchange(sent.reshape(devices, devices, case.rows, DIM)).reshape(devices, -1, DIM)
            grouping = jax.vmap(lambda c: regroup(c, case.layout))(exchange(parcel.counts))
            done = jax.vmap(unpermute_rows)(jax.vmap(permute_rows)(arrived, grouping), grouping)
            returned = exchange(done.reshape(devices, devices, case.rows, DIM)).reshape(devices, -1, DIM)
            return jax.vmap(unpermute_tokens)(returned, ones, parcel)

        return jnp.sum(jax.lax.map(one_pass, jnp.arange(passes, dtype=jnp.int32)), axis=0)

    choices = np.sum(choice.keep_mask, axis=2, keepdims=True)  # K where nothing is dropped
    np.testing.assert_array_equal(there_and_back(x), choices * x)
