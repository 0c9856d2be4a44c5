"""Grouped matmul of e4m3 numbers for Hopper GPUs, written in Pallas for Mosaic GPU.

Rows [R, K] in 16 bits and weights [G, N, K] in e4m3 give rows [R, N]; K and N are multiples of 128. Importing this
module loads Pallas. Tests interpret the kernel on a CPU and compile it for Hopper; no GPU has run it. Letters:
docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.blocked import LINES, fill_lines
from moe_jax.kernels.float8 import BLOCK, VALUES, quantise

Array = jax.Array
Ref = Any  # a reference to memory inside a kernel
HALF = 64  # height of what one warpgroup multiplies
HEIGHT = 2 * HALF
GROUP, START, FIRST, STOP = range(4)  # rows of the table of `row_tiles`
LINE_BYTES = 128  # of a swizzled line in shared memory
STAGES = 5  # buffers of the ring, 33 kB each
MULTIPLIERS = 2  # warpgroups that multiply; the next one copies
COPY_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # of a thread: 128 x (40 + 2 x 232) fit in 65,536


# A persistent kernel: `cores` blocks of three warpgroups walk over the tiles, each of which is 128 rows by 128 columns.
# One warpgroup copies operands into a ring of buffers in shared memory and runs ahead of the others, beyond the end of
# a tile; two multiply, each one half of the tile's height, and store. Both read the same copy of the weights. A half
# without rows of its own multiplies nothing and only hands the buffers back; a tile of rows that nobody owns copies
# nothing, and its output is zero. Which tile covers which rows: `row_tiles`.
def rows_by_weights(
    rows: Array, group_sizes: Array, weights: Array, weight_scales: Array, *, cores: int, interpret=None
) -> Array:
    """Return [R, N], each row times its group's weight in the dtype of `rows`, zero past the last group.

    Args:
      rows: 16-bit float [R, K], quantised here.
      group_sizes: int32 [G].
      weights: e4m3 [G, N, K]: tensor cores multiply 8-bit numbers only where the contracted dim lies together.
      weight_scales: float32 [G, N / 128, K / 128].
      cores: blocks that work, each on a core of its own; interpret: parameters of Pallas' interpreter for GPUs.
    """
    # The product of each block of 128 leaves the tensor cores' accumulator, which keeps few bits of a long sum, and is
    # added, scaled, to a second sum of float32 in registers; so a tile is no wider than 128.
    groups, resulting, dtype = group_sizes.shape[0], weights.shape[1], rows.dtype
    across, steps = resulting // BLOCK, rows.shape[1] // BLOCK  # tiles side by side; steps of a tile
    rows, rows_given = fill_lines(rows), rows.shape[0]
    values, row_scales = quantise(rows)
    table = row_tiles(group_sizes, rows.shape[0], HEIGHT)

    def body(table, bank, rows, row_scales, weight_scales, out, *, ring, aligned, ragged, turned):
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
            columns = pl.ds(pl.multiple_of(number * BLOCK, BLOCK), BLOCK)

            def turn(k, _):
                buffer, contracted = ring.wait_free(step + k), pl.ds(k * BLOCK, BLOCK)
                full = ring.full.at[buffer]
                for half in range(MULTIPLIERS):
                    own = pl.ds(pl.multiple_of(start + half * HALF, LINES), HALF)
                    plgpu.copy_gmem_to_smem(rows.at[own, contracted], ring.halves.at[buffer, half], full)
                    plgpu.copy_gmem_to_smem(row_scales.at[k, own], ring.scales.at[buffer, half], full)
                plgpu.copy_gmem_to_smem(bank.at[(group, columns, contracted)], ring.shared.at[buffer], full)

            lax.fori_loop(jnp.int32(0), turns, turn, None)
            return step + turns

        def multiply(half, place, step):
            group, number, start, own, turns = tile_of(place)
            start, column = start + half * HALF, pl.multiple_of(number * BLOCK, BLOCK)
            first, stop = (jnp.clip(row - start, 0, HALF) for row in own)

            def add_scaled(k, total):
                weight_scale = weight_scales[group, number, k]  # on its way while the copies arrive
                buffer = ring.wait_full(step + k)

                def product(acc):
                    weight = _transpose(ring.shared.at[buffer], turned, half)
                    plgpu.wgmma(acc, ring.halves.at[buffer, half], weight)
                    plgpu.wgmma_wait(0)
                    return acc[...]

                found = pl.run_scoped(product, plgpu.ACC((HALF, BLOCK)))
                scale = ring.scales[buffer, half] * weight_scale
                ring.give_back(step + k)
                return total + found * lax.broadcast_in_dim(scale, (HALF, BLOCK), (0,))

            @pl.when(stop > first)
            def _():
                total = lax.fori_loop(jnp.int32(0), turns, add_scaled, jnp.zeros((HALF, BLOCK), jnp.float32))
                complete = (first == 0) & (stop == HALF)
                pl.when(complete)(functools.partial(_store_aligned, total, aligned, half, out, start, column))
                ragged_rows = functools.partial(_store_ragged, total, ragged, half, out, start, column)
                pl.when(~complete)(functools.partial(ragged_rows, (first, stop)))

            pl.when(stop <= first)(functools.partial(ring.pass_on, step, turns))
            return step + turns

        _walk(ring, copy, multiply, table.shape[1] * across)

    swizzled = functools.partial(plgpu.SMEM, dtype=VALUES, transforms=_swizzled(VALUES))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], resulting), dtype),
        scratch_types=dict(
            ring=(
                swizzled((STAGES, MULTIPLIERS, HALF, BLOCK)),
                swizzled((STAGES, BLOCK, BLOCK)),
                plgpu.SMEM((STAGES, MULTIPLIERS, HALF), jnp.float32),
                plgpu.Barrier(num_arrivals=2 * MULTIPLIERS + 1, num_barriers=STAGES),
                plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=STAGES),
            ),
            aligned=plgpu.SMEM((MULTIPLIERS, BLOCK // HALF, HALF, HALF), dtype, transforms=_swizzled(dtype)),
            ragged=plgpu.SMEM((MULTIPLIERS, HALF, HALF), dtype),
            turned=() if interpret is None else (plgpu.SMEM((MULTIPLIERS, BLOCK, BLOCK), VALUES),),
        ),
        grid=(cores,),
        grid_names=("core",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="moe_float8",
    )
    return kernel(table, weights, values, row_scales.T, weight_scales)[:rows_given]


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Operands on their way from the copying warpgroup to the multiplying ones: step s uses buffer s % STAGES."""

    halves: Ref  # [STAGES, 2, 64, 128], the rows that each multiplying warpgroup reads alone
    shared: Ref  # [STAGES, 128, 128], the weights that both read
    scales: Ref  # [STAGES, 2, 64], of the rows of `halves`
    full: Ref  # barriers, one per buffer: its copies have arrived
    free: Ref  # both warpgroups are done with it

    def wait_free(self, step: Array) -> Array:
        """Return the buffer of a step, once it is free."""
        buffer = lax.rem(step, jnp.int32(STAGES))
        pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, self.free.at[buffer]))
        return buffer

    def wait_full(self, step: Array) -> Array:
        """Return the buffer of a step, once its copies have arrived."""
        buffer = lax.rem(step, jnp.int32(STAGES))
        plgpu.barrier_wait(self.full.at[buffer])
        return buffer

    def give_back(self, step: Array) -> None:
        """Say that this warpgroup is done with the buffer of a step."""
        plgpu.barrier_arrive(self.free.at[lax.rem(step, jnp.int32(STAGES))])

    def pass_on(self, step: Array, turns: Array) -> None:
        """Give back each buffer of a tile as it comes."""

        def turn(k, _):
            self.wait_full(step + k)
            self.give_back(step + k)

        lax.fori_loop(jnp.int32(0), turns, turn, None)


def _swizzled(dtype) -> tuple:
    return plgpu.TilingTransform((LINES, LINE_BYTES // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(LINE_BYTES)


def _transpose(ref: Ref, turned: tuple[Ref, ...], half: Array) -> Ref:
    """Return [b, a] of [a, b], read the other way round; the interpreter multiplies no such view, and takes a copy."""
    if not turned:
        return ref.transpose((1, 0))
    copy = turned[0].at[half]
    copy[...] = ref[...].T
    return copy


def _walk(ring: _Ring, copy: Callable, multiply: Callable, tiles: int) -> None:
    """Give this block every `cores`-th tile.

    `copy(place, step)` and `multiply(half, place, step)` take a tile's first step and return the step after it.
    """
    core, cores, warpgroup = lax.axis_index("core"), lax.axis_size("core"), lax.axis_index("warpgroup")
    turns = lax.div(tiles - core + cores - 1, jnp.int32(cores))

    def over_tiles(do):
        return lax.fori_loop(jnp.int32(0), turns, lambda turn, step: do(core + turn * cores, step), jnp.int32(0))

    @pl.when(warpgroup == MULTIPLIERS)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        steps, free = over_tiles(copy), ring.free
        # Wait until every buffer is free: no barrier is left half observed.
        wait = lambda step, _: plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(STAGES))])  # noqa: E731
        lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, wait, None)

    @pl.when(warpgroup < MULTIPLIERS)
    def _():
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
        over_tiles(functools.partial(multiply, warpgroup))
        plgpu.wait_smem_to_gmem(0)


def _store_aligned(values: Array, slots: Ref, half: Array, out: Ref, start: Array, column: Array) -> None:
    """Store [64, 128] at out[start:, column:], `start` a multiple of 8, through swizzled shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for chunk in range(BLOCK // HALF):
        slots[half, chunk] = values[:, chunk * HALF : (chunk + 1) * HALF].astype(slots.dtype)
    plgpu.commit_smem()
    for chunk in range(BLOCK // HALF):
        window = pl.ds(start, HALF), pl.ds(column + chunk * HALF, HALF)
        plgpu.copy_smem_to_gmem(slots.at[half, chunk], out.at[window])


def _store_ragged(values: Array, slots: Ref, half: Array, out: Ref, start, column, owned) -> None:
    """Store the `owned` rows (first, stop) of [64, 128] at out[start + first:, column:], in pieces of 32 to 1 rows.

    Copies have static sizes, and shared memory is not swizzled here, so that a piece may begin at any row.
    """
    first, stop = owned
    for chunk in range(BLOCK // HALF):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slots[half] = values[:, chunk * HALF : (chunk + 1) * HALF].astype(slots.dtype)
        plgpu.commit_smem()
        row = first
        for size in (32, 16, 8, 4, 2, 1):
            window = pl.ds(start + row, size), pl.ds(column + chunk * HALF, HALF)
            piece = functools.partial(plgpu.copy_smem_to_gmem, slots.at[half, pl.ds(row, size)], out.at[window])
            pl.when((stop - first) & size != 0)(piece)
            row = row + ((stop - first) & size)


# Tiles start at multiples of `LINES` rows only, so a group's first tile may begin with up to LINES - 1 rows of the
# group before it, and its last one ends with rows of the group after it: FIRST and STOP say which rows are its own.
# Rows that no group owns come last, as those of a group numbered G; tiles that are left over own nothing (FIRST ==
# STOP).


def row_tiles(group_sizes: Array, rows: int, height: int) -> Array:
    """Return the table [4, T]: of each tile its group, where it starts, and its own rows `first <= row < stop`.

    Args: group_sizes: int32 [G], at most `rows` = R together; height: rows of a tile, a multiple of `LINES`.
    """
    # T: no choice of group sizes needs more tiles, those of rows without an owner included
    most = (rows + (group_sizes.shape[0] + 1) * (height + LINES - 2)) // height
    stops = jnp.concatenate([running_sum(group_sizes.astype(jnp.int32)), jnp.full((1,), rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), stops[:-1]])
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


def running_sum(values: Array) -> Array:
    """Return int32 [n], sums up to and with each of int32 [n]: one comparison of all pairs, so one kernel."""
    place = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(place[:, None] >= place[None], values[None], 0), axis=1, dtype=jnp.int32)
