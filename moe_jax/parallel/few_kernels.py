"""Sums over many rows, and places in sorted arrays, in forms that a GPU computes in few kernels.

XLA for GPUs cuts a sum over more than a few thousand rows into two kernels, of which the second is as small as the
result. Here the parts are cut before, and what adds them is plain additions, which become part of whatever reads the
sum. `jnp.searchsorted` by default is a loop of as many turns as the array's length has binary digits; on a GPU each
turn is several kernels and a comparison of its own, 136 us for 65 values in 32,768 where these take 8 (modelled,
docs/results.md has the model).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.varying import match_varying, with_gradient

MOST_ROWS = 1024  # of a part; a GPU still has enough parts to keep its cores busy
MOST_PARTS = 16
MOST_ADDED = 16
MOST_COMPARED = 1 << 16  # pairs up to which comparing all costs a CPU less than a binary search of that many turns


def sum_rows(x, dtype=None):
    """Return the sum of x [n, ...] over its first dim, in `dtype` or that of x."""
    parts = -(-x.shape[0] // MOST_ROWS)
    if parts <= 1 or parts > MOST_PARTS or x.shape[0] % parts:
        return jnp.sum(x, axis=0, dtype=dtype)
    sums = jnp.sum(x.reshape(parts, -1, *x.shape[1:]), axis=1, dtype=dtype)
    return functools.reduce(jnp.add, [sums[part] for part in range(parts)])


def spread(vector, like):
    """Return `vector` [...] for every row of `like` [rows ..., ...]; the gradient is `sum_rows` over the rows."""
    own, shape = vector.shape, like.shape

    @with_gradient(lambda d: sum_rows(d.reshape(-1, *own)))
    def repeat(vector):
        return jnp.broadcast_to(vector, shape)

    return repeat(match_varying(vector, like)[0])


def rows_in_use(group_sizes, rows: int):
    """Return bool [rows, 1], a mask of the rows before the end of the last group; group_sizes int32 [G].

    Sizes of a few groups are added one by one, for which a GPU needs no kernel of its own.
    """
    if group_sizes.shape[0] > MOST_ADDED:
        used = jnp.sum(group_sizes, dtype=jnp.int32)
    else:
        used = functools.reduce(jnp.add, [group_sizes[group] for group in range(group_sizes.shape[0])])
    return lax.broadcasted_iota(jnp.int32, (rows, 1), 0) < used.astype(jnp.int32)


def first_places(array, values, side: str = "left"):
    """Return int32 [..., q], how many entries are smaller than each value; with side 'right', or equal to it.

    Args:
      array: [..., n], sorted along its last dim.
      values: [q] of the same dtype.
      side: 'left' or 'right'.
    """
    pairs = array.size * values.shape[0]
    method = "compare_all" if pairs <= MOST_COMPARED else "scan_unrolled"
    search = functools.partial(jnp.searchsorted, v=values, side=side, method=method)
    for _ in array.shape[:-1]:
        search = jax.vmap(search)
    return search(array).astype(jnp.int32)


def places_of_keys(keys, ordered, count: int):
    """Return int32 [count], how many keys are smaller than each of 0 to count - 1: where each begins in their order.

    On a CPU the sorted keys are searched; elsewhere all pairs are compared, which is one kernel next to the sort.

    Args:
      keys: int32 [n]; ordered: the same, sorted.
    """
    values = lax.iota(jnp.int32, count)
    if keys.shape[0] * count <= MOST_COMPARED:
        return first_places(ordered, values)

    def compare(keys, ordered):
        del ordered
        return jnp.sum(keys[None] < values[:, None], axis=1, dtype=jnp.int32)

    return lax.platform_dependent(
        keys, ordered, cpu=lambda keys, ordered: first_places(ordered, values), default=compare
    )
