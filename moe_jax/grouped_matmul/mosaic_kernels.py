"""Grouped matmuls for Hopper GPUs, written in Pallas for Mosaic GPU.

    rows_by_weights   rows [R, K], banks [Rb, K, N] read by slot      ->  [R, N]
                      rows [R, N], the same banks read transposed     ->  [R, K]
    rows_by_rows      lhs [R, K], dout [R, N]                         ->  [P, G, K, N], to be summed over P

Both are persistent kernels: `cores` blocks of three warpgroups walk over the tiles, so that a caller can leave cores to
transfers. One warpgroup copies operands into a ring of buffers in shared memory and runs ahead of the others, beyond
the end of a tile; two multiply, each one half of the tile's height, sum in float32 and store. Both read the same copy
of the other operand. A half without rows of its own multiplies nothing and only hands the buffers back; a tile of rows
that nobody owns copies nothing, and its output is zero. Which tile covers which rows: `tile_schedule.py`.

16-bit floats; K and N multiples of 64; R a multiple of 8. Importing this module loads Pallas.

Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.grouped_matmul.tile_schedule import FIRST, GROUP, LINES, START, STOP, row_ranges, row_tiles

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
    width, depth, groups = widest_tile(resulting), rows.shape[1] // HALF, group_sizes.shape[0]
    across, operands, dtype = resulting // width, len(banks), rows.dtype
    table = row_tiles(group_sizes, rows.shape[0], HEIGHT)

    def body(table, *refs, ring, aligned, ragged, copies):
        slot_refs, rows, bank_refs, out = refs[:operands], refs[operands], refs[operands + 1 : -1], refs[-1]
        ring = _Ring(*ring)

        def tile_at(place):
            tile = lax.div(place, jnp.int32(across))
            start = pl.multiple_of(table[START, tile], LINES)
            column = pl.multiple_of(lax.rem(place, jnp.int32(across)) * width, width)
            return table[GROUP, tile], start, table[FIRST, tile], table[STOP, tile], column

        def copy(place, step):
            group, start, first, stop, column = tile_at(place)

            def from_bank(slots, bank, low):
                slot = slots[group - low]

                def turn(k, _):
                    contracted, resulting = pl.ds(k * HALF, HALF), pl.ds(column, width)
                    window = (resulting, contracted) if transposed else (contracted, resulting)
                    halves = [rows.at[pl.ds(start + half * HALF, HALF), contracted] for half in range(MULTIPLIERS)]
                    ring.fill(step + k, halves, bank.at[(slot, *window)])

                lax.fori_loop(jnp.int32(0), jnp.int32(depth), turn, None)

            low = 0
            for slots, bank in zip(slot_refs, bank_refs, strict=True):
                high = low + slots.shape[0]
                serves = (stop > first) & (group >= low) & (group < high)
                pl.when(serves)(functools.partial(from_bank, slots, bank, low))
                low = high
            return step + jnp.where((stop > first) & (group < groups), jnp.int32(depth), 0)

        def multiply(half, place, step):
            group, start, first, stop, column = tile_at(place)
            turns = jnp.where((stop > first) & (group < groups), jnp.int32(depth), 0)
            start += half * HALF
            first, stop = jnp.clip(first - start, 0, HALF), jnp.clip(stop - start, 0, HALF)

            @pl.when(stop > first)
            def _():
                def products(acc):
                    def one(place, _):
                        weight = ring.shared.at[place]
                        weight = _transpose(weight, copies, half) if transposed else weight
                        plgpu.wgmma(acc, ring.halves.at[place, half], weight)

                    ring.take(step, turns, one)
                    return acc[...]

                values = pl.run_scoped(products, plgpu.ACC((HALF, width)))
                ring.give_back(step + turns - 1, turns > 0)
                complete = (first == 0) & (stop == HALF)
                pl.when(complete)(lambda: _store_aligned(values, aligned, half, out, start, column))
                pl.when(~complete)(lambda: _store_ragged(values, ragged, half, out, start, column, first, stop))

            pl.when(stop <= first)(lambda: ring.pass_on(step, turns))
            return step + turns

        _walk(table.shape[1] * across, ring, copy, multiply)

    swizzled = _swizzled(dtype)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], resulting), dtype),
        scratch_types=dict(
            ring=_ring_types(dtype, (width, HALF) if transposed else (HALF, width)),
            aligned=plgpu.SMEM((MULTIPLIERS, STORE_SLOTS, HALF, HALF), dtype, transforms=swizzled),
            ragged=plgpu.SMEM((MULTIPLIERS, HALF, HALF), dtype),
            copies=_copies_of_transposed(dtype, (HALF, width), interpret),
        ),
        **_launch(cores, interpret),
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
    width, down = widest_tile(resulting), -(-contracted // HEIGHT)
    across = resulting // width
    sizes = [stop - first for first, stop in wanted]
    ranges = jnp.stack(row_ranges(group_sizes, lhs.shape[0]))

    def body(ranges, lhs, dout, *outs, ring, slots, copies):
        ring = _Ring(*ring)

        def tile_at(place):
            """Return where a tile's output lies, where its rows begin, and how many steps it has."""
            column = pl.multiple_of(lax.rem(place, jnp.int32(across)) * width, width)
            place = lax.div(place, jnp.int32(across))
            row = pl.multiple_of(lax.rem(place, jnp.int32(down)) * HEIGHT, HEIGHT)
            place = lax.div(place, jnp.int32(down))
            part, number = lax.rem(place, jnp.int32(parts)), lax.div(place, jnp.int32(parts))
            group, low = number, 0
            for (first, _), size in zip(wanted, sizes, strict=True):
                group = jnp.where((number >= low) & (number < low + size), number - low + first, group)
                low += size
            first, stop = ranges[0, group], ranges[1, group]
            base = lax.div(first, jnp.int32(LINES)) * LINES
            steps = jnp.where(stop > first, lax.div(stop - base + HALF - 1, jnp.int32(HALF)), 0)
            skipped = lax.div(steps * part, jnp.int32(parts))
            turns = lax.div(steps * (part + 1), jnp.int32(parts)) - skipped
            return number, part, row, column, base + skipped * HALF, first, stop, turns

        def copy(place, step):
            _, _, row, column, base, _, _, turns = tile_at(place)

            def turn(k, _):
                depth = pl.ds(pl.multiple_of(base + k * HALF, LINES), HALF)
                halves = []
                for half in range(MULTIPLIERS):  # the last tile may have one half only: its place is taken by another
                    start = jnp.minimum(row + half * HALF, contracted - HALF)
                    halves.append(lhs.at[depth, pl.ds(pl.multiple_of(start, HALF), HALF)])
                ring.fill(step + k, halves, dout.at[depth, pl.ds(column, width)])

            lax.fori_loop(jnp.int32(0), turns, turn, None)
            return step + turns

        def multiply(half, place, step):
            number, part, row, column, base, first, stop, turns = tile_at(place)
            row += half * HALF

            @pl.when(row < contracted)
            def _():
                def products(acc):
                    def one(place, k):
                        start = base + k * HALF
                        mine, shared = ring.halves.at[place, half], ring.shared.at[place]

                        @pl.when((start < first) | (start + HALF > stop))
                        def _():
                            _clear_rows(mine, first - start, stop - start)
                            _clear_rows(shared, first - start, stop - start)  # by both, to the same values
                            plgpu.commit_smem()

                        plgpu.wgmma(acc, _transpose(mine, copies, half), shared)

                    ring.take(step, turns, one)
                    return acc[...]

                values = pl.run_scoped(products, plgpu.ACC((HALF, width)))
                ring.give_back(step + turns - 1, turns > 0)
                low = 0
                for out, size in zip(outs, sizes, strict=True):

                    def store(out=out, low=low):
                        _store_aligned(values, slots, half, out.at[part, number - low], row, column)

                    pl.when((number >= low) & (number < low + size))(store)
                    low += size

            pl.when(row >= contracted)(lambda: ring.pass_on(step, turns))
            return step + turns

        _walk(sum(sizes) * parts * down * across, ring, copy, multiply)

    line = LINE_BYTES // jnp.dtype(out_dtype).itemsize
    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((parts, size, contracted, resulting), out_dtype) for size in sizes],
        scratch_types=dict(
            ring=_ring_types(lhs.dtype, (HALF, width)),
            slots=plgpu.SMEM((MULTIPLIERS, STORE_SLOTS, HALF, line), out_dtype, transforms=_swizzled(out_dtype)),
            copies=_copies_of_transposed(lhs.dtype, (HALF, HALF), interpret),
        ),
        **_launch(cores, interpret),
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

    def take(self, step: Array, turns: Array, multiply: Callable[[Array, Array], None]) -> None:
        """Call `multiply(buffer, turn)` for each step of a tile; give back all buffers but the last.

        A multiplication is still running when the next one is started, and no longer.
        """

        def turn(k, _):
            place = lax.rem(step + k, jnp.int32(STAGES))
            plgpu.barrier_wait(self.full.at[place])
            multiply(place, k)
            plgpu.wgmma_wait(1)
            self.give_back(step + k - 1, k > 0)

        lax.fori_loop(jnp.int32(0), turns, turn, None)

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


def _ring_types(dtype, shared: tuple[int, int]) -> tuple:
    swizzled = _swizzled(dtype)
    return (
        plgpu.SMEM((STAGES, MULTIPLIERS, HALF, HALF), dtype, transforms=swizzled),
        plgpu.SMEM((STAGES, *shared), dtype, transforms=swizzled),
        plgpu.Barrier(num_arrivals=MULTIPLIERS + 1, num_barriers=STAGES),  # one per copy
        plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=STAGES),
    )


def _swizzled(dtype) -> tuple:
    return plgpu.TilingTransform((LINES, LINE_BYTES // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(LINE_BYTES)


def _transpose(ref: Ref, copies: Sequence[Ref], half: Array) -> Ref:
    """Return [b, a] of [a, b], read the other way round; the interpreter multiplies no such view, and takes a copy."""
    if not copies:
        return plgpu.transpose_ref(ref, (1, 0))
    copy = copies[0].at[half]
    copy[...] = ref[...].T
    return copy


def _copies_of_transposed(dtype, shape: tuple[int, int], interpret) -> tuple:
    return (plgpu.SMEM((MULTIPLIERS, *shape), dtype),) if interpret is not None else ()


def _launch(cores: int, interpret) -> dict:
    return dict(
        grid=(cores,),
        grid_names=("core",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )


def _walk(tiles: int, ring: _Ring, copy: Callable, multiply: Callable) -> None:
    """Give this block every `cores`-th tile.

    `copy(tile, step)` and `multiply(half, tile, step)` return the step after the tile's last.
    """
    core, cores, warpgroup = lax.axis_index("core"), lax.axis_size("core"), lax.axis_index("warpgroup")
    turns = lax.div(tiles - core + cores - 1, jnp.int32(cores))

    def over_tiles(work):
        return lax.fori_loop(jnp.int32(0), turns, lambda turn, step: work(core + turn * cores, step), jnp.int32(0))

    @pl.when(warpgroup == MULTIPLIERS)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        ring.drain(over_tiles(copy))

    @pl.when(warpgroup < MULTIPLIERS)
    def _():
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
        over_tiles(functools.partial(multiply, warpgroup))
        plgpu.wait_smem_to_gmem(0)


def _store_aligned(values: Array, slots: Ref, half: Array, out: Ref, start: Array, column: Array) -> None:
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


def _store_ragged(values: Array, slots: Ref, half: Array, out: Ref, start, column, first, stop) -> None:
    """Store rows first to stop of [64, width] at out[start + first:, column:], in pieces of 32, 16, 8, 4, 2 and 1 rows.

    Copies have static sizes, and shared memory is not swizzled here, so that a piece may begin at any row.
    """
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
