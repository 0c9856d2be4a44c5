"""Which rows a matmul of one group covers: blocks looped over by XLA, and tables of tiles for the Hopper kernels.

XLA needs static shapes, so a group's rows are covered by blocks whose heights come from a short ladder: blocks of the
highest rung as long as rows are left for more than one, then one *tail* block of the lowest rung that covers the rest.
An empty group costs nothing, and a group of 70 rows costs a matmul of 72 or 80 rows, not of 128.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
# Received buckets are mostly padding, so R / G may be far above what a group holds; a block as tall as that would
# compute the padding. Above about a thousand rows a taller block saves nothing anyway.
TALLEST_MEAN = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowBlock:
    """One block: `count` rows of `group`, in a window of `height` rows that starts at row `start`.

    The window may also hold `lead` rows before the block's own and rows after them: those belong to other groups or to
    none, so they are read as zeros and never written.
    """

    height: int
    group: Array
    start: Array
    lead: Array
    count: Array
    first: bool  # no earlier block of this group has been handled
    full: bool  # every row of the window is the block's own

    def _own(self) -> Array:
        row = lax.broadcasted_iota(jnp.int32, (self.height, 1), 0)
        return (row >= self.lead) & (row < self.lead + self.count)

    def read(self, array: Array) -> Array:
        """Return the window [height, ...] of `array` [R, ...], zero outside the block's own rows."""
        window = lax.dynamic_slice_in_dim(array, self.start, self.height, 0)
        return window if self.full else jnp.where(self._own(), window, jnp.zeros((), array.dtype))

    def write(self, array: Array, values: Array) -> Array:
        """Return `array` [R, ...] with the block's own rows replaced by those of `values` [height, ...]."""
        values = values.astype(array.dtype)
        if not self.full:
            window = lax.dynamic_slice_in_dim(array, self.start, self.height, 0)
            values = jnp.where(self._own(), values, window)
        return lax.dynamic_update_slice_in_dim(array, values, self.start, 0)

    def pick(self, bank: Array, slots: Array) -> Array:
        """Return the weights [K, N] of this block's group from `bank` [Rb, K, N]."""
        return lax.dynamic_index_in_dim(bank, slots[self.group], 0, keepdims=False)

    def add_to_group(self, totals: Array, values: Array) -> Array:
        """Return `totals` [G, K, N], zero for groups not met yet, with `values` [K, N] added to this block's group."""
        values = values.astype(totals.dtype)[None]
        if not self.first:
            values += lax.dynamic_slice_in_dim(totals, self.group, 1, 0)
        return lax.dynamic_update_slice_in_dim(totals, values, self.group, 0)


def choose_heights(rows: int, groups: int, weight_elements: int) -> tuple[int, ...]:
    """Return the ladder of block heights, ascending, for R = `rows` and weights of `weight_elements` elements each.

    It is dense around the mean number of rows of a group, where most groups of a balanced gate lie; it doubles above,
    and is sparse below, where groups cost little. The highest rung is at least 512 rows, because each further block of
    a group reads its weights and its weight gradient once more; or it is all rows. A mean above TALLEST_MEAN counts as
    TALLEST_MEAN.
    """
    # Rungs per doubling around the mean: each costs compile time and saves padding, which larger matmuls repay.
    steps = sum(2 * rows * weight_elements > flops for flops in (3e7, 3e8, 3e9))
    mean = max(8, min(TALLEST_MEAN, rows // max(groups, 1)))
    top = max(512, 2 * mean)
    if steps == 0:
        ladder = {2 * mean, top}
    else:
        halves = range(-2 * steps, 2 * steps + 1)  # halves of a step, from half the mean to twice the mean
        ladder = {mean * 2 ** (half / (2 * steps)) for half in halves if half % 2 == 0 or abs(half) == 1}
        ladder |= {mean / 8, mean / 32, top} | {mean * 2**e for e in range(2, 10) if mean * 2**e < top}
    return tuple(sorted({min(int(np.ceil(max(height, 16) / 8)) * 8, rows) for height in ladder}))


def rows_computed(group_sizes: np.ndarray, heights: tuple[int, ...]) -> int:
    """Return how many rows `for_each_block` hands to its steps, padding included.

    Args: group_sizes: int [G], NumPy; heights: the ladder.
    """
    top = heights[-1]
    sizes = np.asarray(group_sizes)
    full = np.where(sizes > 0, (sizes - 1) // top, 0)
    tails = sizes - full * top
    ladder = np.array(heights)
    tail_rows = np.where(tails > 0, ladder[np.minimum(np.searchsorted(ladder, tails), len(ladder) - 1)], 0)
    return int(np.sum(full * top + tail_rows))


def for_each_block(
    group_sizes: Array,
    heights: tuple[int, ...],
    rows: int,
    first_row: Array | int,
    carry: Any,
    step: Callable[[Any, RowBlock], Any],
) -> Any:
    """Return the carry after `step(carry, block)` for every block of every group; tails come before full blocks.

    Args:
      group_sizes: int32 [G].
      heights: ascending ladder of block heights, none above `rows`.
      rows: R, static; first_row: where the first group starts.
      carry: pytree of arrays, updated in place by XLA as long as `step` uses each of its arrays once.
      step: handles one block; traced once per rung.
    """
    if group_sizes.shape[0] == 1:
        # With one group XLA sees that a rung's block does not depend on the turn, moves its matmuls out of the loop,
        # and so computes all rungs. A second group, always empty, keeps them in.
        group_sizes = jnp.concatenate([group_sizes, jnp.zeros_like(group_sizes)])
    ends = first_row + jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    top = heights[-1]
    full_blocks = jnp.where(group_sizes > 0, (group_sizes - 1) // top, 0)
    tails = group_sizes - full_blocks * top
    rungs = jnp.sum(tails[:, None] > np.array(heights, np.int32)[None], axis=1, dtype=jnp.int32)
    rungs = jnp.where(tails == 0, len(heights), rungs)
    by_rung = jnp.argsort(rungs, stable=True).astype(jnp.int32)
    stops = jnp.sum(rungs[:, None] <= np.arange(len(heights), dtype=np.int32)[None], axis=0, dtype=jnp.int32)

    # One loop per rung: a `lax.switch` over heights inside one loop would read better, but XLA copies the whole carry,
    # weight gradients included, at every turn.
    for i, height in enumerate(heights):

        def tail_step(turn, carry, height=height):
            group = by_rung[turn]
            first = ends[group] - tails[group]
            start = jnp.minimum(first, rows - height)
            block = RowBlock(
                height=height,
                group=group,
                start=start,
                lead=first - start,
                count=tails[group],
                first=True,
                full=False,
            )
            return step(carry, block)

        carry = lax.fori_loop(stops[i - 1] if i else jnp.zeros_like(stops[0]), stops[i], tail_step, carry)

    if top >= rows:
        return carry
    last_turns = jnp.cumsum(full_blocks, dtype=jnp.int32)

    def full_step(turn, carry):
        group = jnp.sum(last_turns <= turn, dtype=jnp.int32)
        place = turn - (last_turns[group] - full_blocks[group])
        block = RowBlock(
            height=top,
            group=group,
            start=starts[group] + place * top,
            lead=jnp.zeros_like(place),
            count=jnp.full_like(place, top),
            first=False,
            full=True,
        )
        return step(carry, block)

    return lax.fori_loop(jnp.zeros_like(last_turns[-1]), last_turns[-1], full_step, carry)


# Tiles of the Hopper kernels start at multiples of `LINES` rows only, so a group's first tile may begin with up to
# LINES - 1 rows of the group before it, and its last one ends with rows of the group after it: FIRST and STOP say which
# rows are its own. Rows that no group owns come last, as those of a group numbered G; tiles that are left over own
# nothing (FIRST == STOP).
LINES = 8  # rows of a swizzled tile in shared memory: a copy into one starts at a multiple of them
GROUP, START, FIRST, STOP = range(4)  # rows of the table


def row_tiles(group_sizes: Array, rows: int, height: int) -> Array:
    """Return the table [4, T]: of each tile its group, where it starts, and its own rows `first <= row < stop`.

    Args: group_sizes: int32 [G], at most `rows` = R together; height: rows of a tile, a multiple of `LINES`.
    """
    # T: no choice of group sizes needs more tiles, those of rows without an owner included
    most = (rows + (group_sizes.shape[0] + 1) * (height + LINES - 2)) // height
    starts, stops = row_ranges(group_sizes, rows)
    bases = starts // LINES * LINES
    counts = jnp.where(stops > starts, -((bases - stops) // height), 0)
    tile_stops = running_sum(counts)
    tile = lax.broadcasted_iota(jnp.int32, (most, 1), 0)
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
