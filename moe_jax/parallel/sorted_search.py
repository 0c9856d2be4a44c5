"""Where values stand in a sorted array, in kernels that follow each other without a loop.

Inputs: a sorted array and the values looked for. Outputs: int32 places. `jnp.searchsorted` by default is a loop of
as many turns as the array's length has binary digits; on a GPU each turn is several kernels and a comparison of its
own, 136 us for 65 values in 32,768 where these take 8 (modelled, docs/results.md has the model).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

MOST_COMPARED = 1 << 16  # pairs up to which comparing all costs a CPU less than a binary search of that many turns


def first_places(array, values, side: str = "left"):
    """Return int32 [..., q], how many entries are smaller than each value; with side 'right', or equal to it.

    Args:
      array: [..., n], sorted along its last dim.
      values: [q] of the same dtype.
      side: 'left' or 'right'.
    """
    pairs = array.size * values.shape[0]
    method = "compare_all" if pairs <= MOST_COMPARED else "scan_unrolled"

    def search(row):
        return jnp.searchsorted(row, values, side=side, method=method)

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
