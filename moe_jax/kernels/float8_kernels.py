"""A grouped matmul of e4m3 operands for Hopper GPUs, written in Pallas for Mosaic GPU.

    rows e4m3 [R, K], their scales float32 [K / 128, R],
    weights e4m3 [G, N, K], theirs float32 [G, N / 128, K / 128]   ->  float [R, N] of 16 bits

Tiles, the walk over them and the stores are those of `mosaic_kernels.py`. A step is a block of 128 along K. Tensor
cores multiply 8-bit numbers only where K lies together in both operands, so weights come transposed; and they keep few
bits of a long sum, so the product of each block leaves their accumulator, is scaled by the row's and the weight's
scale, and is added to a sum of float32 in registers. That second sum is why a tile is 128 columns and no more.

K and N multiples of 128; R a multiple of 8. Importing this module loads Pallas.

Source of the promotion after every 128 products: DeepSeek-V3 Technical Report (2024), section 3.3.2.
Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.mosaic_kernels import (
    HALF,
    HEIGHT,
    MULTIPLIERS,
    Ref,
    RowTile,
    launch,
    store_aligned,
    store_ragged,
    swizzled,
    walk,
)
from moe_jax.kernels.row_blocks import FIRST, GROUP, START, STOP, row_tiles

Array = jax.Array
DEPTH = WIDTH = 128  # a block of K; columns of a tile
STAGES = 5  # buffers of the ring, 33 kB each


def float8_rows_by_weights(
    quantised_rows: tuple[Array, Array],
    group_sizes: Array,
    quantised_weights: tuple[Array, Array],
    *,
    out_dtype,
    cores: int,
    interpret=None,
) -> Array:
    """Return each row times its group's weight [R, N] in `out_dtype`, zero past the last group.

    Args:
      quantised_rows: e4m3 [R, K], and their scales float32 [K / 128, R].
      group_sizes: int32 [G].
      quantised_weights: e4m3 [G, N, K], and theirs float32 [G, N / 128, K / 128].
      cores: blocks that work, each on a core of its own.
      interpret: parameters of Pallas' interpreter for GPUs, for tests.
    """
    (rows, row_scales), (weights, weight_scales) = quantised_rows, quantised_weights
    resulting = weights.shape[1]
    table = row_tiles(group_sizes, rows.shape[0], HEIGHT)

    def body(table, row_scales, weight_scales, rows, weights, out, *, ring, **buffers):
        work = _Float8Rows(
            across=resulting // WIDTH, depth=rows.shape[1] // DEPTH, groups=group_sizes.shape[0], table=table,
            rows=rows, row_scales=row_scales, weights=weights, weight_scales=weight_scales, out=out,
            ring=_ScaledRing(*ring), **buffers,
        )  # fmt: skip
        walk(work, table.shape[1] * work.across)

    line = swizzled(out_dtype)[0].tiling[1]
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], resulting), out_dtype),
        scratch_types=dict(
            ring=(
                plgpu.SMEM((STAGES, MULTIPLIERS, HALF, DEPTH), rows.dtype, transforms=swizzled(rows.dtype)),
                plgpu.SMEM((STAGES, WIDTH, DEPTH), rows.dtype, transforms=swizzled(rows.dtype)),
                plgpu.SMEM((STAGES, MULTIPLIERS, HALF), jnp.float32),
                plgpu.Barrier(num_arrivals=2 * MULTIPLIERS + 1, num_barriers=STAGES),  # one per copy
                plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=STAGES),
            ),
            aligned=plgpu.SMEM((MULTIPLIERS, WIDTH // line, HALF, line), out_dtype, transforms=swizzled(out_dtype)),
            ragged=plgpu.SMEM((MULTIPLIERS, HALF, HALF), out_dtype),
            turned=() if interpret is None else (plgpu.SMEM((MULTIPLIERS, DEPTH, WIDTH), rows.dtype),),
        ),
        **launch(cores, interpret),
        kernel_name="moe_float8",
    )
    return kernel(table, row_scales, weight_scales, rows, weights)


@dataclasses.dataclass(frozen=True)
class _ScaledRing:
    """Operands on their way from the copying warpgroup to the multiplying ones: step s uses buffer s % STAGES.

    Attributes:
      halves: [STAGES, 2, 64, 128], what each multiplying warpgroup reads alone; scales: [STAGES, 2, 64], of its rows.
      shared: [STAGES, 128, 128], what both read.
      full, free: barriers, one per buffer: its copies have arrived; both warpgroups are done with it.
    """

    halves: Ref
    shared: Ref
    scales: Ref
    full: Ref
    free: Ref

    def wait_free(self, step: Array) -> Array:
        """Return the buffer of a step, once it is free."""
        place = lax.rem(step, jnp.int32(STAGES))

        @pl.when(step >= STAGES)
        def _():
            plgpu.barrier_wait(self.free.at[place])

        return place

    def wait_full(self, step: Array) -> Array:
        """Return the buffer of a step, once its copies have arrived."""
        place = lax.rem(step, jnp.int32(STAGES))
        plgpu.barrier_wait(self.full.at[place])
        return place

    def drain(self, steps: Array) -> None:
        """Wait until every buffer is free, after as many steps as were filled: no barrier is left half observed."""

        def turn(step, _):
            plgpu.barrier_wait(self.free.at[lax.rem(step, jnp.int32(STAGES))])

        lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, turn, None)


@dataclasses.dataclass(frozen=True)
class _Float8Rows:
    """What a block does with one tile; references are those of the kernel."""

    across: int  # tiles side by side
    depth: int  # steps of a tile
    groups: int
    table: Ref
    rows: Ref
    row_scales: Ref
    weights: Ref
    weight_scales: Ref
    out: Ref
    ring: _ScaledRing
    aligned: Ref
    ragged: Ref
    turned: tuple

    def tile(self, place: Array) -> tuple[RowTile, Array]:
        """Return the tile at a place in the walk, and its number along N: neighbours share their rows."""
        tile, number = lax.div(place, jnp.int32(self.across)), lax.rem(place, jnp.int32(self.across))
        start = pl.multiple_of(self.table[START, tile], 8)
        column = pl.multiple_of(number * WIDTH, WIDTH)
        return RowTile(self.table[GROUP, tile], start, self.table[FIRST, tile], self.table[STOP, tile], column), number

    def turns(self, tile: RowTile) -> Array:
        """Return how many steps a tile has: none where it has no rows, or nobody owns them."""
        return jnp.where((tile.stop > tile.first) & (tile.group < self.groups), jnp.int32(self.depth), 0)

    def copy(self, place: Array, step: Array) -> Array:
        tile, _ = self.tile(place)
        turns = self.turns(tile)

        def turn(k, _):
            buffer, block = self.ring.wait_free(step + k), pl.ds(k * DEPTH, DEPTH)
            full = self.ring.full.at[buffer]
            for half in range(MULTIPLIERS):
                own = pl.ds(pl.multiple_of(tile.start + half * HALF, 8), HALF)
                plgpu.copy_gmem_to_smem(self.rows.at[own, block], self.ring.halves.at[buffer, half], full)
                plgpu.copy_gmem_to_smem(self.row_scales.at[k, own], self.ring.scales.at[buffer, half], full)
            columns = pl.ds(tile.column, WIDTH)
            plgpu.copy_gmem_to_smem(self.weights.at[tile.group, columns, block], self.ring.shared.at[buffer], full)

        lax.fori_loop(jnp.int32(0), turns, turn, None)
        return step + turns

    def multiply(self, half: Array, place: Array, step: Array) -> Array:
        tile, number = self.tile(place)
        turns, start = self.turns(tile), tile.start + half * HALF
        first, stop = (jnp.clip(row - start, 0, HALF) for row in (tile.first, tile.stop))

        @pl.when(stop > first)
        def _():
            values = self.sum(half, tile, number, step, turns)
            complete = (first == 0) & (stop == HALF)
            target = (self.out, start, tile.column)
            pl.when(complete)(lambda: store_aligned(values, self.aligned, half, *target))
            pl.when(~complete)(lambda: store_ragged(values, self.ragged, half, *target, (first, stop)))

        @pl.when(stop <= first)
        def _():
            def turn(k, _):
                plgpu.barrier_arrive(self.ring.free.at[self.ring.wait_full(step + k)])

            lax.fori_loop(jnp.int32(0), turns, turn, None)

        return step + turns

    def sum(self, half: Array, tile: RowTile, number: Array, step: Array, turns: Array) -> Array:
        """Return float32 [64, 128], the scaled products of all blocks, added up. Gives all buffers back."""

        def turn(k, total):
            weight_scale = self.weight_scales[tile.group, number, k]  # on its way while the copies arrive
            buffer = self.ring.wait_full(step + k)
            product = pl.run_scoped(lambda acc: self.product(acc, half, buffer), plgpu.ACC((HALF, WIDTH)))
            scales = self.ring.scales[buffer, half] * weight_scale
            plgpu.barrier_arrive(self.ring.free.at[buffer])
            return total + product * lax.broadcast_in_dim(scales, (HALF, WIDTH), (0,))

        return lax.fori_loop(jnp.int32(0), turns, turn, jnp.zeros((HALF, WIDTH), jnp.float32))

    def product(self, acc: Ref, half: Array, buffer: Array) -> Array:
        weight = self.ring.shared.at[buffer]
        if self.turned:  # the interpreter multiplies no transposed view, and takes a copy
            copy = self.turned[0].at[half]
            copy[...] = weight[...].T
            weight = copy
        else:
            weight = weight.transpose((1, 0))
        plgpu.wgmma(acc, self.ring.halves.at[buffer, half], weight)
        plgpu.wgmma_wait(0)
        return acc[...]
