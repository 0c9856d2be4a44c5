"""Which tile of a grouped matmul covers which rows: pure functions of the group sizes, without kernels.

Inputs: `group_sizes [G]`, the number of rows R, a tile's height. Outputs: a table int32 `[4, T]`, one column per tile.
A kernel's tiles start at multiples of `LINES` rows only, so a group's first tile may begin with up to `LINES - 1` rows
of the group before it, and its last one ends with rows of the group after it; `FIRST` and `STOP` say which rows are its
own. The rows that no group owns come last, as those of a group numbered G. T is a bound: tiles that are left over own
nothing (`FIRST == STOP`).

Letters: docs/notation.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
LINES = 8  # rows of a swizzled tile in shared memory: a copy into one starts at a multiple of them
GROUP, START, FIRST, STOP = range(4)  # rows of the table


def tile_bound(rows: int, groups: int, height: int) -> int:
    """Return T: no choice of group sizes needs more tiles, those of rows without an owner included."""
    return (rows + (groups + 1) * (height + LINES - 2)) // height


def row_tiles(group_sizes: Array, rows: int, height: int) -> Array:
    """Return the table [4, T]: of each tile its group, where it starts, and its own rows `first <= row < stop`.

    Args:
      group_sizes: int32 [G], at most `rows` together.
      rows: R.
      height: rows of a tile, a multiple of `LINES`.
    """
    starts, stops = row_ranges(group_sizes, rows)
    bases = starts // LINES * LINES
    counts = jnp.where(stops > starts, -((bases - stops) // height), 0)
    tile_stops = running_sum(counts)
    tile = lax.broadcasted_iota(jnp.int32, (tile_bound(rows, group_sizes.shape[0], height), 1), 0)
    before = tile_stops - counts
    owns = (tile >= before[None]) & (tile < tile_stops[None])  # [T, G + 1], one True at most in each line

    def of_owner(values: Array) -> Array:
        return jnp.sum(jnp.where(owns, values[None], 0), axis=1, dtype=jnp.int32)

    start = of_owner(bases - before * height) + jnp.where(owns.any(axis=1), tile[:, 0] * height, 0)
    first = jnp.maximum(start, of_owner(starts))
    stop = jnp.minimum(start + height, of_owner(stops))
    group = of_owner(jnp.arange(stops.shape[0], dtype=jnp.int32))
    return jnp.stack([group, start, first, jnp.maximum(stop, first)])


def row_ranges(group_sizes: Array, rows: int) -> tuple[Array, Array]:
    """Return int32 [G + 1] twice: the first row of each group and the row after its last; group G owns the rest."""
    stops = jnp.concatenate([running_sum(group_sizes.astype(jnp.int32)), jnp.full((1,), rows, jnp.int32)])
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), stops[:-1]]), stops


def running_sum(values: Array) -> Array:
    """Return int32 [n], sums up to and with each of int32 [n]: one comparison of all pairs, so one kernel."""
    place = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(place[:, None] >= place[None], values[None], 0), axis=1, dtype=jnp.int32)
