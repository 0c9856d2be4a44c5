"""Grouped matmuls for Hopper GPUs, written in Pallas for Mosaic GPU.

    rows_by_weights   rows [R, K], banks [Rb, K, N] read by slot      ->  [R, N]
                      rows [R, N], the same banks read transposed     ->  [R, K]
    rows_by_rows      lhs [R, K], dout [R, N]                         ->  [P, G, K, N], to be summed over P

Both are persistent kernels: `cores` blocks of three warpgroups walk over the tiles, so that a caller can leave cores to
transfers. One warpgroup copies operands into a ring of buffers in shared memory and runs ahead of the others, beyond
the end of a tile; two multiply, each one half of the tile's height, sum in float32 and store. Both read the same copy
of the other operand. A half without rows of its own multiplies nothing and only hands the buffers back; a tile of rows
that nobody owns copies nothing, and its output is zero. Which tile covers which rows: `row_blocks.py`.

16-bit floats; K and N multiples of 64; R a multiple of 8. Importing this module loads Pallas.

Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.row_blocks import FIRST, GROUP, LINES, START, STOP, row_ranges, row_tiles

Array = jax.Array
Ref = Any  # a reference to memory inside a kernel
HALF = 64  # height of what one warpgroup multiplies; also the depth of one step
HEIGHT = 2 * HALF
LINE_BYTES = 128  # of a swizzled line in shared memory: 64 elements of 16 bits, 32 of 32
STAGES = 3  # buffers of the ring
STORE_SLOTS = 4  # [64 rows, 128 bytes] each, per warpgroup: a 16-bit tile 256 wide leaves in one go
MULTIPLIERS = 2  # warpgroups that multiply; the next one copies
COPY_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # of a thread: 128 x (40 + 2 x 232) fit in 65,536


def widest_tile(size: int) -> int:
    """Return the width of a tile: the largest of 256, 192, 128 and 64 that divides `size`."""
    return next(width for width in (256, 192, 128, 64) if size % width == 0)


def rows_by_weights(
    rows: Array,
    group_sizes: Array,
    banks: Sequence[Array],
    slots: Sequence[Array],
    *,
    transposed: bool,
    cores: int,
    interpret=None,
) -> Array:
    """Return each row times its group's weight, zero past the last group.

    Args:
      rows: 16-bit float [R, contracted], R a multiple of 8.
      group_sizes: int32 [G].
      banks: [Rb, K, N] each, in the dtype of `rows`; the groups of the first come first.
      slots: int32 per bank, the row of the bank that serves each of its groups.
      transposed: contract over N, not over K.
      cores: blocks that work, each on a core of its own.
      interpret: parameters of Pallas' interpreter for GPUs, for tests.

    Returns:
      [R, N], or [R, K] where `transposed`, in the dtype of `rows`.
    """
    resulting = banks[0].shape[1] if transposed else banks[0].shape[2]
    width, depth, dtype = widest_tile(resulting), rows.shape[1] // HALF, rows.dtype
    table = row_tiles(group_sizes, rows.shape[0], HEIGHT)

    def body(table, *refs, ring, **buffers):
        count = len(banks)
        work = _RowsByWeights(
            transposed=transposed, width=width, across=resulting // width, depth=depth, groups=group_sizes.shape[0],
            table=table, slots=refs[:count], rows=refs[count], banks=refs[count + 1 : -1], out=refs[-1],
            ring=_Ring(*ring), **buffers,
        )  # fmt: skip
        walk(work, table.shape[1] * work.across)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], resulting), dtype),
        scratch_types=dict(
            ring=_ring_types(dtype, (width, HALF) if transposed else (HALF, width)),
            aligned=plgpu.SMEM((MULTIPLIERS, STORE_SLOTS, HALF, HALF), dtype, transforms=swizzled(dtype)),
            ragged=plgpu.SMEM((MULTIPLIERS, HALF, HALF), dtype),
            turned=_copies_of_transposed(dtype, (HALF, width), interpret),
        ),
        **launch(cores, interpret),
        kernel_name="moe_d_rows" if transposed else "moe_forward",
    )
    return kernel(table, *slots, rows, *banks)


def rows_by_rows(
    lhs: Array,
    dout: Array,
    group_sizes: Array,
    wanted: Sequence[tuple[int, int]],
    *,
    out_dtype,
    parts: int,
    cores: int,
    interpret=None,
) -> tuple[Array, ...]:
    """Return, of each wanted range of groups, the sums over a group's rows of the products of `lhs` and `dout`.

    Args:
      lhs: 16-bit float [R, K], R a multiple of 8; rows past the last group may hold anything.
      dout: [R, N], in the dtype of `lhs`; likewise.
      group_sizes: int32 [G].
      wanted: ranges (first, stop) of groups, ascending.
      out_dtype: float32, or the dtype of `lhs`.
      parts: P, how many blocks share a group's rows; each writes a sum of its own.
      cores, interpret: as for `rows_by_weights`.

    Returns:
      [P, stop - first, K, N] per range; the sum over P is the gradient of the group's weight.
    """
    contracted, resulting = lhs.shape[1], dout.shape[1]
    width = widest_tile(resulting)
    sizes = [stop - first for first, stop in wanted]
    ranges = jnp.stack(row_ranges(group_sizes, lhs.shape[0]))

    def body(ranges, lhs, dout, *outs, ring, **buffers):
        work = _RowsByRows(
            wanted=tuple(wanted), parts=parts, width=width, across=resulting // width, down=-(-contracted // HEIGHT),
            ranges=ranges, lhs=lhs, dout=dout, outs=outs, ring=_Ring(*ring), **buffers,
        )  # fmt: skip
        walk(work, sum(sizes) * parts * work.down * work.across)

    line = LINE_BYTES // jnp.dtype(out_dtype).itemsize
    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((parts, size, contracted, resulting), out_dtype) for size in sizes],
        scratch_types=dict(
            ring=_ring_types(lhs.dtype, (HALF, width)),
            slots=plgpu.SMEM((MULTIPLIERS, STORE_SLOTS, HALF, line), out_dtype, transforms=swizzled(out_dtype)),
            turned=_copies_of_transposed(lhs.dtype, (HALF, HALF), interpret),
        ),
        **launch(cores, interpret),
        kernel_name="moe_d_weights",
    )
    return tuple(kernel(ranges, lhs, dout))


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Operands on their way from the copying warpgroup to the multiplying ones: step s uses buffer s % STAGES.

    Attributes:
      halves: [STAGES, 2, 64, 64], what each multiplying warpgroup reads alone.
      shared: [STAGES, ...], what both read.
      full, free: barriers, one per buffer: its copies have arrived; both warpgroups are done with it.
    """

    halves: Ref
    shared: Ref
    full: Ref
    free: Ref

    def fill(self, step: Array, halves: Sequence[Ref], shared: Ref) -> None:
        """Start the copies of one step, once its buffer is free."""
        place = lax.rem(step, jnp.int32(STAGES))

        @pl.when(step >= STAGES)
        def _():
            plgpu.barrier_wait(self.free.at[place])

        for number, half in enumerate(halves):
            plgpu.copy_gmem_to_smem(half, self.halves.at[place, number], self.full.at[place])
        plgpu.copy_gmem_to_smem(shared, self.shared.at[place], self.full.at[place])

    def drain(self, steps: Array) -> None:
        """Wait until every buffer is free, after as many steps as were filled: no barrier is left half observed."""

        def turn(step, _):
            plgpu.barrier_wait(self.free.at[lax.rem(step, jnp.int32(STAGES))])

        lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, turn, None)

    def sum(self, step: Array, turns: Array, width: int, add: Callable[[Ref, Array, Array], None]) -> Array:
        """Return float32 [64, width], what `add(accumulator, buffer, turn)` adds up over the steps of a tile.

        A multiplication is still running when the next one is started, and no longer. Gives all buffers back.
        """

        def products(acc):
            def turn(k, _):
                place = lax.rem(step + k, jnp.int32(STAGES))
                plgpu.barrier_wait(self.full.at[place])
                add(acc, place, k)
                plgpu.wgmma_wait(1)
                self.give_back(step + k - 1, k > 0)

            lax.fori_loop(jnp.int32(0), turns, turn, None)
            return acc[...]

        values = pl.run_scoped(products, plgpu.ACC((HALF, width)))
        self.give_back(step + turns - 1, turns > 0)
        return values

    def give_back(self, step: Array, wanted: Array) -> None:
        """Say that this warpgroup is done with the buffer of a step."""

        @pl.when(wanted)
        def _():
            plgpu.barrier_arrive(self.free.at[lax.rem(step, jnp.int32(STAGES))])

    def pass_on(self, step: Array, turns: Array) -> None:
        """Give back each buffer of a tile as it comes."""

        def turn(k, _):
            place = lax.rem(step + k, jnp.int32(STAGES))
            plgpu.barrier_wait(self.full.at[place])
            plgpu.barrier_arrive(self.free.at[place])

        lax.fori_loop(jnp.int32(0), turns, turn, None)


class RowTile(NamedTuple):
    """A tile of rows [first, stop) of one group, in a window that begins at `start`, and its first column."""

    group: Array
    start: Array
    first: Array
    stop: Array
    column: Array


@dataclasses.dataclass(frozen=True)
class _RowsByWeights:
    """What a block does with one tile of `rows_by_weights`; references are those of the kernel."""

    transposed: bool
    width: int
    across: int  # tiles side by side
    depth: int  # steps of a tile
    groups: int
    table: Ref
    slots: Sequence[Ref]
    rows: Ref
    banks: Sequence[Ref]
    out: Ref
    ring: _Ring
    aligned: Ref
    ragged: Ref
    turned: Sequence[Ref]

    def tile(self, place: Array) -> RowTile:
        """Return the tile at a place in the walk: neighbours share their rows."""
        tile = lax.div(place, jnp.int32(self.across))
        column = pl.multiple_of(lax.rem(place, jnp.int32(self.across)) * self.width, self.width)
        start = pl.multiple_of(self.table[START, tile], LINES)
        return RowTile(self.table[GROUP, tile], start, self.table[FIRST, tile], self.table[STOP, tile], column)

    def turns(self, tile: RowTile) -> Array:
        """Return how many steps a tile has: none where it has no rows, or nobody owns them."""
        return jnp.where((tile.stop > tile.first) & (tile.group < self.groups), jnp.int32(self.depth), 0)

    def copy(self, place: Array, step: Array) -> Array:
        tile = self.tile(place)
        turns, low = self.turns(tile), 0
        for slots, bank in zip(self.slots, self.banks, strict=True):
            high = low + slots.shape[0]
            serves = (turns > 0) & (tile.group >= low) & (tile.group < high)
            pl.when(serves)(functools.partial(self.copy_from, slots, bank, low, tile, step))
            low = high
        return step + turns

    def copy_from(self, slots: Ref, bank: Ref, low: int, tile: RowTile, step: Array) -> None:
        """Copy the steps of a tile whose group is served by this bank; its groups begin with number `low`."""
        slot, resulting = slots[tile.group - low], pl.ds(tile.column, self.width)

        def turn(k, _):
            contracted = pl.ds(k * HALF, HALF)
            window = (resulting, contracted) if self.transposed else (contracted, resulting)
            starts = [tile.start + half * HALF for half in range(MULTIPLIERS)]
            halves = [self.rows.at[pl.ds(start, HALF), contracted] for start in starts]
            self.ring.fill(step + k, halves, bank.at[(slot, *window)])

        lax.fori_loop(jnp.int32(0), jnp.int32(self.depth), turn, None)

    def multiply(self, half: Array, place: Array, step: Array) -> Array:
        tile = self.tile(place)
        turns, start = self.turns(tile), tile.start + half * HALF
        first, stop = (jnp.clip(row - start, 0, HALF) for row in (tile.first, tile.stop))

        @pl.when(stop > first)
        def _():
            values = self.ring.sum(step, turns, self.width, lambda acc, place, _: self.product(half, acc, place))
            complete = (first == 0) & (stop == HALF)
            target = (self.out, start, tile.column)
            pl.when(complete)(lambda: store_aligned(values, self.aligned, half, *target))
            pl.when(~complete)(lambda: store_ragged(values, self.ragged, half, *target, (first, stop)))

        pl.when(stop <= first)(lambda: self.ring.pass_on(step, turns))
        return step + turns

    def product(self, half: Array, acc: Ref, place: Array) -> None:
        weight = self.ring.shared.at[place]
        weight = _transpose(weight, self.turned, half) if self.transposed else weight
        plgpu.wgmma(acc, self.ring.halves.at[place, half], weight)


class _WeightTile(NamedTuple):
    """A tile of one part of one group's gradient.

    Attributes:
      number: of the group among those that are wanted; part: of its rows.
      row, column: where the tile begins in the gradient.
      base: row of `lhs` where its first step begins; turns: its steps.
      first, stop: the rows of the group.
    """

    number: Array
    part: Array
    row: Array
    column: Array
    base: Array
    turns: Array
    first: Array
    stop: Array


@dataclasses.dataclass(frozen=True)
class _RowsByRows:
    """What a block does with one tile of `rows_by_rows`; references are those of the kernel."""

    wanted: tuple[tuple[int, int], ...]
    parts: int
    width: int
    across: int  # tiles side by side
    down: int  # tiles below one another
    ranges: Ref
    lhs: Ref
    dout: Ref
    outs: Sequence[Ref]
    ring: _Ring
    slots: Ref
    turned: Sequence[Ref]

    def tile(self, place: Array) -> _WeightTile:
        """Return the tile at a place in the walk: all tiles of a part of a group follow one another."""
        place, column = _divide(place, self.across)
        place, row = _divide(place, self.down)
        number, part = _divide(place, self.parts)
        group = number
        for (first, _), low, high in self.numbers():
            group = jnp.where((number >= low) & (number < high), number - low + first, group)
        first, stop = self.ranges[0, group], self.ranges[1, group]
        base = lax.div(first, jnp.int32(LINES)) * LINES
        steps = jnp.where(stop > first, lax.div(stop - base + HALF - 1, jnp.int32(HALF)), 0)
        before, after = (lax.div(steps * (part + n), jnp.int32(self.parts)) for n in (0, 1))
        row, column = pl.multiple_of(row * HEIGHT, HEIGHT), pl.multiple_of(column * self.width, self.width)
        return _WeightTile(number, part, row, column, base + before * HALF, after - before, first, stop)

    def numbers(self) -> list[tuple[tuple[int, int], int, int]]:
        """Return each wanted range with the numbers [low, high) of its groups."""
        found, low = [], 0
        for first, stop in self.wanted:
            found.append(((first, stop), low, low + stop - first))
            low += stop - first
        return found

    def copy(self, place: Array, step: Array) -> Array:
        tile = self.tile(place)
        last = self.lhs.shape[1] - HALF
        # the last tile may have one half only: in the place of the other, any half is copied
        starts = [pl.multiple_of(jnp.minimum(tile.row + half * HALF, last), HALF) for half in range(MULTIPLIERS)]

        def turn(k, _):
            rows = pl.ds(pl.multiple_of(tile.base + k * HALF, LINES), HALF)
            halves = [self.lhs.at[rows, pl.ds(start, HALF)] for start in starts]
            self.ring.fill(step + k, halves, self.dout.at[rows, pl.ds(tile.column, self.width)])

        lax.fori_loop(jnp.int32(0), tile.turns, turn, None)
        return step + tile.turns

    def multiply(self, half: Array, place: Array, step: Array) -> Array:
        tile = self.tile(place)
        row = tile.row + half * HALF
        inside = row < self.lhs.shape[1]

        @pl.when(inside)
        def _():
            product = functools.partial(self.product, half, tile)
            values = self.ring.sum(step, tile.turns, self.width, product)
            for out, (_, low, high) in zip(self.outs, self.numbers(), strict=True):

                def store(out=out, low=low):
                    of_group = out.at[tile.part, tile.number - low]
                    store_aligned(values, self.slots, half, of_group, row, tile.column)

                pl.when((tile.number >= low) & (tile.number < high))(store)

        pl.when(~inside)(lambda: self.ring.pass_on(step, tile.turns))
        return step + tile.turns

    def product(self, half: Array, tile: _WeightTile, acc: Ref, place: Array, turn: Array) -> None:
        mine, shared = self.ring.halves.at[place, half], self.ring.shared.at[place]
        start = tile.base + turn * HALF

        @pl.when((start < tile.first) | (start + HALF > tile.stop))
        def _():
            for ref in (mine, shared):  # the shared one is cleared by both warpgroups, to the same values
                _clear_rows(ref, tile.first - start, tile.stop - start)
            plgpu.commit_smem()

        plgpu.wgmma(acc, _transpose(mine, self.turned, half), shared)


def _divide(number: Array, by: int) -> tuple[Array, Array]:
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


def _ring_types(dtype, shared: tuple[int, int]) -> tuple:
    transforms = swizzled(dtype)
    return (
        plgpu.SMEM((STAGES, MULTIPLIERS, HALF, HALF), dtype, transforms=transforms),
        plgpu.SMEM((STAGES, *shared), dtype, transforms=transforms),
        plgpu.Barrier(num_arrivals=MULTIPLIERS + 1, num_barriers=STAGES),  # one per copy
        plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=STAGES),
    )


def swizzled(dtype) -> tuple:
    return plgpu.TilingTransform((LINES, LINE_BYTES // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(LINE_BYTES)


def _transpose(ref: Ref, turned: Sequence[Ref], half: Array) -> Ref:
    """Return [b, a] of [a, b], read the other way round; the interpreter multiplies no such view, and takes a copy."""
    if not turned:
        return ref.transpose((1, 0))
    copy = turned[0].at[half]
    copy[...] = ref[...].T
    return copy


def _copies_of_transposed(dtype, shape: tuple[int, int], interpret) -> tuple:
    return (plgpu.SMEM((MULTIPLIERS, *shape), dtype),) if interpret is not None else ()


def launch(cores: int, interpret) -> dict:
    return dict(
        grid=(cores,),
        grid_names=("core",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )


def walk(work: _RowsByWeights | _RowsByRows, tiles: int) -> None:
    """Give this block every `cores`-th tile; `copy` and `multiply` take its first step and return the step after it."""
    core, cores, warpgroup = lax.axis_index("core"), lax.axis_size("core"), lax.axis_index("warpgroup")
    turns = lax.div(tiles - core + cores - 1, jnp.int32(cores))

    def over_tiles(do):
        return lax.fori_loop(jnp.int32(0), turns, lambda turn, step: do(core + turn * cores, step), jnp.int32(0))

    @pl.when(warpgroup == MULTIPLIERS)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        work.ring.drain(over_tiles(work.copy))

    @pl.when(warpgroup < MULTIPLIERS)
    def _():
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
        over_tiles(functools.partial(work.multiply, warpgroup))
        plgpu.wait_smem_to_gmem(0)


def store_aligned(values: Array, slots: Ref, half: Array, out: Ref, start: Array, column: Array) -> None:
    """Store [64, width] at out[start:, column:], `start` a multiple of 8, through swizzled shared memory."""
    size = slots.shape[3]
    slot_count, chunks = slots.shape[1], values.shape[1] // size
    for low in range(0, chunks, slot_count):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        now = range(low, min(low + slot_count, chunks))
        for chunk in now:
            slots[half, chunk - low] = values[:, chunk * size : (chunk + 1) * size].astype(slots.dtype)
        plgpu.commit_smem()
        for chunk in now:
            window = pl.ds(start, HALF), pl.ds(column + chunk * size, size)
            plgpu.copy_smem_to_gmem(slots.at[half, chunk - low], out.at[window])


def store_ragged(values: Array, slots: Ref, half: Array, out: Ref, start, column, owned) -> None:
    """Store the `owned` rows (first, stop) of [64, width] at out[start + first:, column:], in pieces of 32 to 1 rows.

    Copies have static sizes, and shared memory is not swizzled here, so that a piece may begin at any row.
    """
    first, stop = owned
    for chunk in range(values.shape[1] // HALF):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slots[half] = values[:, chunk * HALF : (chunk + 1) * HALF].astype(slots.dtype)
        plgpu.commit_smem()
        row = first
        for size in (32, 16, 8, 4, 2, 1):

            def piece(row=row, size=size):
                window = pl.ds(start + row, size), pl.ds(column + chunk * HALF, HALF)  # noqa: B023
                plgpu.copy_smem_to_gmem(slots.at[half, pl.ds(row, size)], out.at[window])

            pl.when((stop - first) & size != 0)(piece)
            row = row + ((stop - first) & size)


def _clear_rows(ref: Ref, first: Array, stop: Array) -> None:
    """Overwrite the rows of [64, width] before `first` and from `stop` on with zeros."""
    row = lax.broadcasted_iota(jnp.int32, (HALF, HALF), 0)
    for chunk in range(ref.shape[1] // HALF):
        piece = ref.at[:, pl.ds(chunk * HALF, HALF)]
        piece[...] = jnp.where((row >= first) & (row < stop), piece[...], jnp.zeros((), ref.dtype))
