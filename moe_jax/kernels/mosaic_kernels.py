"""Grouped matmuls for Hopper GPUs, written in Pallas for Mosaic GPU.

    rows_by_weights   rows [R, K], banks [Rb, K, N] read by slot      ->  [R, N]
                      rows [R, N], the same banks read transposed     ->  [R, K]
    rows_by_rows      lhs [R, K], dout [R, N]                         ->  [G, K, N]

16-bit floats, K and N multiples of 64, or e4m3 and multiples of 128. Importing this module loads Pallas. Letters:
docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.blocked import LINES, fill_lines
from moe_jax.kernels.float8 import BLOCK, quantise

Array = jax.Array
Ref = Any  # a reference to memory inside a kernel
HALF = 64  # height of what one warpgroup multiplies; also the depth of one step of 16-bit numbers
HEIGHT = 2 * HALF
GROUP, START, FIRST, STOP = range(4)  # rows of the table of `row_tiles`
LINE_BYTES = 128  # of a swizzled line in shared memory: 64 elements of 16 bits, 32 of 32
STAGES, FLOAT8_STAGES = 3, 5  # buffers of the ring, up to 41 kB and 33 kB each
STORE_SLOTS = 4  # [64 rows, 128 bytes] each, per warpgroup: a 16-bit tile 256 wide leaves in one go
MULTIPLIERS = 2  # warpgroups that multiply; the next one copies
COPY_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # of a thread: 128 x (40 + 2 x 232) fit in 65,536


def rows_by_weights(
    rows: Array,
    group_sizes: Array,
    weights: Sequence[tuple[Array, Array]],
    weight_scales: Array | None = None,
    *,
    transposed: bool,
    cores: int,
    interpret=None,
) -> Array:
    """Return each row times its group's weight in the dtype of `rows`, zero past the last group.

    Args:
      rows: 16-bit float [R, contracted].
      group_sizes: int32 [G].
      weights: (bank [Rb, K, N] in the dtype of `rows`, or e4m3; int32, the row of it that serves each of its groups);
        the groups of the first come first.
      weight_scales: of one bank in e4m3, float32 [G, K / 128, N / 128]; rows are quantised then, and only `transposed`
        is possible: tensor cores multiply 8-bit numbers only where the contracted dim lies together in both operands.
      transposed: contract over N, not over K.
      cores: blocks that work, each on a core of its own; interpret: parameters of Pallas' interpreter for GPUs.
    """
    float8, count, dtype, groups = weight_scales is not None, len(weights), rows.dtype, group_sizes.shape[0]
    resulting = weights[0][0].shape[1 if transposed else 2]
    # In float8 the product of each block of 128 leaves the tensor cores' accumulator, which keeps few bits of a long
    # sum, and is added, scaled, to a second sum of float32 in registers; so such a tile is no wider than 128.
    depth, width = (BLOCK, BLOCK) if float8 else (HALF, widest_tile(resulting))
    across, steps = resulting // width, rows.shape[1] // depth  # tiles side by side; steps of a tile
    rows, rows_given = fill_lines(rows), rows.shape[0]
    values, scales = rows, ()
    if float8:
        values, row_scales = quantise(rows)
        scales = row_scales.T, weight_scales
    table = row_tiles(group_sizes, rows.shape[0], HEIGHT)

    def body(table, *refs, ring, aligned, ragged, turned):
        slots, banks, (rows, *scales, out) = refs[:count], refs[count : 2 * count], refs[2 * count :]
        ring = _Ring(*ring)

        def tile_of(place):
            """Return (group, number along N, start, (first, stop) of its own rows, steps); neighbours share rows."""
            tile, number = lax.div(place, jnp.int32(across)), lax.rem(place, jnp.int32(across))
            group, first, stop = table[GROUP, tile], table[FIRST, tile], table[STOP, tile]
            # no step where it has no rows, or nobody owns them
            turns = jnp.where((stop > first) & (group < groups), jnp.int32(steps), 0)
            return group, number, pl.multiple_of(table[START, tile], LINES), (first, stop), turns

        def copy(place, step):
            group, number, start, _, turns = tile_of(place)
            columns, low = pl.ds(pl.multiple_of(number * width, width), width), 0
            for bank, of_bank in zip(banks, slots, strict=True):
                high = low + of_bank.shape[0]

                @pl.when((turns > 0) & (group >= low) & (group < high))
                def _(bank=bank, of_bank=of_bank, low=low):
                    slot = of_bank[group - low]

                    def turn(k, _):
                        buffer, contracted = ring.wait_free(step + k), pl.ds(k * depth, depth)
                        full = ring.full.at[buffer]
                        for half in range(MULTIPLIERS):
                            own = pl.ds(pl.multiple_of(start + half * HALF, LINES), HALF)
                            plgpu.copy_gmem_to_smem(rows.at[own, contracted], ring.halves.at[buffer, half], full)
                            if scales:
                                plgpu.copy_gmem_to_smem(scales[0].at[k, own], ring.scales.at[buffer, half], full)
                        window = (columns, contracted) if transposed else (contracted, columns)
                        plgpu.copy_gmem_to_smem(bank.at[(slot, *window)], ring.shared.at[buffer], full)

                    lax.fori_loop(jnp.int32(0), jnp.int32(steps), turn, None)

                low = high
            return step + turns

        def multiply(half, place, step):
            group, number, start, own, turns = tile_of(place)
            start, column = start + half * HALF, pl.multiple_of(number * width, width)
            first, stop = (jnp.clip(row - start, 0, HALF) for row in own)

            def add(acc, buffer, _):
                weight = ring.shared.at[buffer]
                weight = _transpose(weight, turned, half) if transposed else weight
                plgpu.wgmma(acc, ring.halves.at[buffer, half], weight)

            def add_scaled(k, total):
                weight_scale = scales[1][group, number, k]  # on its way while the copies arrive
                buffer = ring.wait_full(step + k)

                def product(acc):
                    add(acc, buffer, k)
                    plgpu.wgmma_wait(0)
                    return acc[...]

                found = pl.run_scoped(product, plgpu.ACC((HALF, width)))
                scale = ring.scales[buffer, half] * weight_scale
                ring.give_back(step + k)
                return total + found * lax.broadcast_in_dim(scale, (HALF, width), (0,))

            @pl.when(stop > first)
            def _():
                if scales:
                    zeros = jnp.zeros((HALF, width), jnp.float32)
                    total = lax.fori_loop(jnp.int32(0), turns, add_scaled, zeros)
                else:
                    total = ring.sum(step, turns, width, add)
                complete = (first == 0) & (stop == HALF)
                pl.when(complete)(functools.partial(_store_aligned, total, aligned, half, out, start, column))
                ragged_rows = functools.partial(_store_ragged, total, ragged, half, out, start, column)
                pl.when(~complete)(functools.partial(ragged_rows, (first, stop)))

            pl.when(stop <= first)(functools.partial(ring.pass_on, step, turns))
            return step + turns

        _walk(ring, copy, multiply, table.shape[1] * across)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], resulting), dtype),
        scratch_types=dict(
            ring=_ring_types(values.dtype, depth, (width, depth) if transposed else (depth, width)),
            aligned=plgpu.SMEM((MULTIPLIERS, width // HALF, HALF, HALF), dtype, transforms=_swizzled(dtype)),
            ragged=plgpu.SMEM((MULTIPLIERS, HALF, HALF), dtype),
            turned=() if interpret is None else (plgpu.SMEM((MULTIPLIERS, depth, width), values.dtype),),
        ),
        **_launch(cores, interpret),
        kernel_name="moe_float8" if float8 else "moe_d_rows" if transposed else "moe_forward",
    )
    out = kernel(table, *(slots for _, slots in weights), *(bank for bank, _ in weights), values, *scales)
    return out[:rows_given]


def widest_tile(size: int) -> int:
    """Return the width of a tile: the largest of 256, 192, 128 and 64 that divides `size`."""
    return next(width for width in (256, 192, 128, 64) if size % width == 0)


def rows_by_rows(
    lhs: Array, dout: Array, group_sizes: Array, wanted: Sequence[tuple[int, int, Any]], parts: int, cores: int,
    interpret=None,
) -> list[Array]:  # fmt: skip
    """Return, of each wanted range of groups, the sums over a group's rows of the products of `lhs` and `dout`.

    Args:
      lhs: 16-bit float [R, K]; rows past the last group may hold anything.
      dout: [R, N], in the dtype of `lhs`; likewise.
      group_sizes: int32 [G].
      wanted: ranges (first, stop, dtype) of groups, ascending.
      parts: how many blocks share a group's rows; each writes a sum of its own in float32.
      cores, interpret: as for `rows_by_weights`.

    Returns:
      [stop - first, K, N] per range, in its dtype.
    """
    lhs, dout = fill_lines(lhs), fill_lines(dout)
    contracted, resulting = lhs.shape[1], dout.shape[1]
    width = widest_tile(resulting)
    across, down = resulting // width, -(-contracted // HEIGHT)  # tiles side by side, and below one another
    # each range: its first group, and the numbers [low, high) of its groups among all that are wanted
    lows = [sum(stop - first for first, stop, _ in wanted[:index]) for index in range(len(wanted))]
    numbers = [(first, low, low + stop - first) for (first, stop, _), low in zip(wanted, lows, strict=True)]
    alone = parts == 1 and all(dtype == lhs.dtype for *_, dtype in wanted)  # else rounded after the parts are summed
    out_dtype = jnp.dtype(lhs.dtype if alone else jnp.float32)

    def body(ranges, lhs, dout, *outs, ring, slots, turned):
        ring = _Ring(*ring)

        def tile_of(place):
            """Return where a tile is (number of the group, part, row, column), and (base, steps, rows of the group).

            All tiles of a part of a group follow one another. The first step begins with row `base` of `lhs`.
            """
            found = []
            for size in (across, down, parts):
                found.append(lax.rem(place, jnp.int32(size)))
                place = lax.div(place, jnp.int32(size))
            (column, row, part), number = found, place
            group = number
            for first, low, high in numbers:
                group = jnp.where((number >= low) & (number < high), number - low + first, group)
            first, stop = ranges[0, group], ranges[1, group]
            base = lax.div(first, jnp.int32(LINES)) * LINES
            steps = jnp.where(stop > first, lax.div(stop - base + HALF - 1, jnp.int32(HALF)), 0)
            before, after = (lax.div(steps * (part + n), jnp.int32(parts)) for n in (0, 1))
            row, column = pl.multiple_of(row * HEIGHT, HEIGHT), pl.multiple_of(column * width, width)
            return (number, part, row, column), (base + before * HALF, after - before, first, stop)

        def copy(place, step):
            (*_, row, column), (base, turns, _, _) = tile_of(place)
            last = lhs.shape[1] - HALF
            # the last tile may have one half only: in the place of the other, any half is copied
            starts = [pl.multiple_of(jnp.minimum(row + half * HALF, last), HALF) for half in range(MULTIPLIERS)]

            def turn(k, _):
                buffer, rows = ring.wait_free(step + k), pl.ds(pl.multiple_of(base + k * HALF, LINES), HALF)
                full = ring.full.at[buffer]
                for half, start in enumerate(starts):
                    plgpu.copy_gmem_to_smem(lhs.at[rows, pl.ds(start, HALF)], ring.halves.at[buffer, half], full)
                plgpu.copy_gmem_to_smem(dout.at[rows, pl.ds(column, width)], ring.shared.at[buffer], full)

            lax.fori_loop(jnp.int32(0), turns, turn, None)
            return step + turns

        def multiply(half, place, step):
            (number, part, row, column), (base, turns, first, stop) = tile_of(place)
            row = row + half * HALF
            inside = row < lhs.shape[1]

            def add(acc, buffer, k):
                mine, shared = ring.halves.at[buffer, half], ring.shared.at[buffer]
                start = base + k * HALF

                @pl.when((start < first) | (start + HALF > stop))
                def _():
                    # rows of other groups become zeros; both warpgroups clear the shared ones, to the same values
                    place = lax.broadcasted_iota(jnp.int32, (HALF, HALF), 0)
                    for ref in (mine, shared):
                        for chunk in range(ref.shape[1] // HALF):
                            piece, zero = ref.at[:, pl.ds(chunk * HALF, HALF)], jnp.zeros((), ref.dtype)
                            piece[...] = jnp.where((place >= first - start) & (place < stop - start), piece[...], zero)
                    plgpu.commit_smem()

                plgpu.wgmma(acc, _transpose(mine, turned, half), shared)

            @pl.when(inside)
            def _():
                values = ring.sum(step, turns, width, add)
                for out, (_, low, high) in zip(outs, numbers, strict=True):
                    store = functools.partial(_store_aligned, values, slots, half)
                    target = out.at[part, number - low]
                    pl.when((number >= low) & (number < high))(functools.partial(store, target, row, column))

            pl.when(~inside)(functools.partial(ring.pass_on, step, turns))
            return step + turns

        _walk(ring, copy, multiply, numbers[-1][2] * parts * down * across)

    line = LINE_BYTES // out_dtype.itemsize
    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((parts, hi - lo, contracted, resulting), out_dtype) for _, lo, hi in numbers],
        scratch_types=dict(
            ring=_ring_types(lhs.dtype, HALF, (HALF, width)),
            slots=plgpu.SMEM((MULTIPLIERS, STORE_SLOTS, HALF, line), out_dtype, transforms=_swizzled(out_dtype)),
            turned=() if interpret is None else (plgpu.SMEM((MULTIPLIERS, HALF, HALF), lhs.dtype),),
        ),
        **_launch(cores, interpret),
        kernel_name="moe_d_weights",
    )
    sums = kernel(jnp.stack(row_ranges(group_sizes, lhs.shape[0])), lhs, dout)
    totals = [of_parts[0] if parts == 1 else jnp.sum(of_parts, axis=0) for of_parts in sums]
    return [total.astype(dtype) for total, (*_, dtype) in zip(totals, wanted, strict=True)]


MOST_PARTS = 8
# What decides into how many parts the rows of a group are cut: FLOP/s of one core in a matmul, bytes/s of all.
CORE_RATE, MEMORY_RATE = 5e12, 4e12


def parts_of(rows: float, groups: int, contracted: int, resulting: int, cores: int) -> int:
    """Return into how many parts to cut the rows of a group, so that few large gradients fill all cores.

    A part is a sum of its own in float32, written, and read when the parts are added up.

    Args: rows: of a group, on average; groups: whose gradients are wanted.
    """
    width = widest_tile(resulting)
    tiles = groups * -(-contracted // HEIGHT) * (resulting // width)
    tile_seconds = 2 * rows * HEIGHT * width / CORE_RATE
    sum_seconds = 2 * 4 * groups * contracted * resulting / MEMORY_RATE
    seconds = [
        math.ceil(tiles * parts / cores) * tile_seconds / parts + (parts > 1) * parts * sum_seconds
        for parts in range(1, MOST_PARTS + 1)
    ]
    return 1 + seconds.index(min(seconds))


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Operands on their way from the copying warpgroup to the multiplying ones: step s uses buffer s % stages."""

    halves: Ref  # [stages, 2, 64, depth], what each multiplying warpgroup reads alone
    shared: Ref  # [stages, ...], what both read
    full: Ref  # barriers, one per buffer: its copies have arrived
    free: Ref  # both warpgroups are done with it
    scales: Ref | None = None  # [stages, 2, 64], of the rows of `halves`

    def wait_free(self, step: Array) -> Array:
        """Return the buffer of a step, once it is free."""
        stages = self.halves.shape[0]
        buffer = lax.rem(step, jnp.int32(stages))
        pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, self.free.at[buffer]))
        return buffer

    def wait_full(self, step: Array) -> Array:
        """Return the buffer of a step, once its copies have arrived."""
        buffer = lax.rem(step, jnp.int32(self.halves.shape[0]))
        plgpu.barrier_wait(self.full.at[buffer])
        return buffer

    def give_back(self, step: Array) -> None:
        """Say that this warpgroup is done with the buffer of a step."""
        plgpu.barrier_arrive(self.free.at[lax.rem(step, jnp.int32(self.halves.shape[0]))])

    def pass_on(self, step: Array, turns: Array) -> None:
        """Give back each buffer of a tile as it comes."""

        def turn(k, _):
            self.wait_full(step + k)
            self.give_back(step + k)

        lax.fori_loop(jnp.int32(0), turns, turn, None)

    def sum(self, step: Array, turns: Array, width: int, add: Callable[[Ref, Array, Array], None]) -> Array:
        """Return float32 [64, width], what `add(accumulator, buffer, turn)` adds up over the steps of a tile.

        A multiplication is still running when the next one is started, and no longer. Gives all buffers back.
        """

        def products(acc):
            def turn(k, _):
                add(acc, self.wait_full(step + k), k)
                plgpu.wgmma_wait(1)
                pl.when(k > 0)(functools.partial(self.give_back, step + k - 1))

            lax.fori_loop(jnp.int32(0), turns, turn, None)
            return acc[...]

        values = pl.run_scoped(products, plgpu.ACC((HALF, width)))
        pl.when(turns > 0)(functools.partial(self.give_back, step + turns - 1))
        return values


def _ring_types(dtype, depth: int, shared: tuple[int, int]) -> tuple:
    """Return the types of a `_Ring`, that of e4m3 with scales."""
    float8 = jnp.dtype(dtype).itemsize == 1
    stages, copies = (FLOAT8_STAGES, 2 * MULTIPLIERS + 1) if float8 else (STAGES, MULTIPLIERS + 1)
    return (
        plgpu.SMEM((stages, MULTIPLIERS, HALF, depth), dtype, transforms=_swizzled(dtype)),
        plgpu.SMEM((stages, *shared), dtype, transforms=_swizzled(dtype)),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=stages),
        *((plgpu.SMEM((stages, MULTIPLIERS, HALF), jnp.float32),) if float8 else ()),
    )


def _swizzled(dtype) -> tuple:
    return plgpu.TilingTransform((LINES, LINE_BYTES // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(LINE_BYTES)


def _transpose(ref: Ref, turned: Sequence[Ref], half: Array) -> Ref:
    """Return [b, a] of [a, b], read the other way round; the interpreter multiplies no such view, and takes a copy."""
    if not turned:
        return ref.transpose((1, 0))
    copy = turned[0].at[half]
    copy[...] = ref[...].T
    return copy


def _launch(cores: int, interpret) -> dict:
    return dict(
        grid=(cores,),
        grid_names=("core",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )


# Both are persistent kernels: `cores` blocks of three warpgroups walk over the tiles, so that a caller can leave cores
# to transfers. One warpgroup copies operands into a ring of buffers in shared memory and runs ahead of the others,
# beyond the end of a tile; two multiply, each one half of the tile's height, sum in float32 and store. Both read the
# same copy of the other operand. A half without rows of its own multiplies nothing and only hands the buffers back; a
# tile of rows that nobody owns copies nothing, and its output is zero. Which tile covers which rows: `row_tiles`.
def _walk(ring: _Ring, copy: Callable, multiply: Callable, tiles: int) -> None:
    """Give this block every `cores`-th tile.

    `copy(place, step)` and `multiply(half, place, step)` take a tile's first step and return the step after it.
    """
    core, cores, warpgroup = lax.axis_index("core"), lax.axis_size("core"), lax.axis_index("warpgroup")
    turns, stages = lax.div(tiles - core + cores - 1, jnp.int32(cores)), ring.halves.shape[0]

    def over_tiles(do):
        return lax.fori_loop(jnp.int32(0), turns, lambda turn, step: do(core + turn * cores, step), jnp.int32(0))

    @pl.when(warpgroup == MULTIPLIERS)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        steps, free = over_tiles(copy), ring.free
        # Wait until every buffer is free: no barrier is left half observed.
        wait = lambda step, _: plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(stages))])  # noqa: E731
        lax.fori_loop(jnp.maximum(steps - stages, 0), steps, wait, None)

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


def _store_ragged(values: Array, slots: Ref, half: Array, out: Ref, start, column, owned) -> None:
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
            window = pl.ds(start + row, size), pl.ds(column + chunk * HALF, HALF)
            piece = functools.partial(plgpu.copy_smem_to_gmem, slots.at[half, pl.ds(row, size)], out.at[window])
            pl.when((stop - first) & size != 0)(piece)
            row = row + ((stop - first) & size)


# Tiles of the Hopper kernels start at multiples of `LINES` rows only, so a group's first tile may begin with up to
# LINES - 1 rows of the group before it, and its last one ends with rows of the group after it: FIRST and STOP say which
# rows are its own. Rows that no group owns come last, as those of a group numbered G; tiles that are left over own
# nothing (FIRST == STOP).


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
