"""Sums over many rows, in an order that a GPU computes in one kernel, and masks of rows that need none.

Inputs: an array [n, ...], or sizes of groups. Outputs: its sum over the first dim [...], or a mask. XLA for GPUs cuts a
sum over more than a few thousand rows into two kernels, of which the second is as small as the result. Here the parts
are cut before, and what adds them is plain additions, which become part of whatever reads the sum.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.varying import match_varying

MOST_ROWS = 1024  # of a part; a GPU still has enough parts to keep its cores busy
MOST_PARTS = 16
MOST_ADDED = 16


def sum_rows(x, dtype=None):
    """Return the sum of x [n, ...] over its first dim, in `dtype` or that of x."""
    parts = -(-x.shape[0] // MOST_ROWS)
    if parts <= 1 or parts > MOST_PARTS or x.shape[0] % parts:
        return jnp.sum(x, axis=0, dtype=dtype)
    sums = jnp.sum(x.reshape(parts, -1, *x.shape[1:]), axis=1, dtype=dtype)
    return functools.reduce(jnp.add, [sums[part] for part in range(parts)])


def spread(vector, like):
    """Return `vector` [...] for every row of `like` [rows ..., ...]; the gradient is `sum_rows` over the rows."""
    return _spread(like.shape, *match_varying(vector, like)[:1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(shape, vector):
    return jnp.broadcast_to(vector, shape)


def _spread_bwd(shape, dims, d):
    return (sum_rows(d.reshape(-1, *shape[len(shape) - dims :])),)


_spread.defvjp(lambda shape, vector: (_spread(shape, vector), vector.ndim), _spread_bwd)


def rows_in_use(group_sizes, rows: int):
    """Return bool [rows, 1], which rows are before the end of the last group; group_sizes int32 [G].

    Sizes of a few groups are added one by one, for which a GPU needs no kernel of its own.
    """
    if group_sizes.shape[0] > MOST_ADDED:
        used = jnp.sum(group_sizes, dtype=jnp.int32)
    else:
        used = functools.reduce(jnp.add, [group_sizes[group] for group in range(group_sizes.shape[0])])
    return lax.broadcasted_iota(jnp.int32, (rows, 1), 0) < used.astype(jnp.int32)
