"""Grouped matmul for Hopper GPUs: `hopper`, Pallas kernels that ship with JAX; `mosaic`, this project's own.

See `grouped.py` for inputs and outputs; 16-bit floats, K and N multiples of 64. Tests interpret the own kernels on a
CPU and compile them for Hopper, no GPU has run them: 'auto' never takes them, and training compares either with plain
matmuls before it starts. Only a program that uses these loads Pallas.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp

from moe_jax.kernels.blocked import check_tiles, clear_unowned_rows, fill_lines, gather_weights, split_gradient
from moe_jax.kernels.grouped import Operands, register
from moe_jax.parallel.varying import cast_varying, varying_axes

Array = jax.Array

TILE = 64  # the least tile: rows of a warpgroup's matmul, and one swizzled line of 16-bit floats
HOPPER_CORES = 132


@register("hopper")
class HopperMatmul:
    """The shipped `ragged_dot` and `transposed_ragged_dot` kernels; gradients of weights are rounded to 16 bits."""

    gathers = True

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands, transposed: bool = False) -> Array:
        """Return rows times weights, [R, N], or with `transposed` rows [R, N] times transposed weights, [R, K]."""
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        check_tiles("hopper", lhs, operands, TILE)
        if not transposed:  # else it is done; the gradients read rows so, and one array then serves both
            lhs = clear_unowned_rows(lhs, group_sizes)
        weights, filled = gather_weights(operands, lhs.dtype), fill_lines(lhs)
        out = ragged_dot(
            filled,
            weights,
            group_sizes=group_sizes,
            block_m=128 if filled.shape[0] >= 128 * weights.shape[0] else TILE,
            max_concurrent_steps=4,
            transpose_rhs=transposed,
            **_tiles(weights.shape[1] if transposed else weights.shape[2]),
        )
        out = cast_varying(out, varying_axes(lhs))  # the kernel's outputs are typed as equal on all devices
        return clear_unowned_rows(out[: lhs.shape[0]], group_sizes)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as kernel

        # The weight gradient masks its first and last block by multiplication, which keeps a NaN.
        lhs, dout = clear_unowned_rows(lhs, group_sizes), clear_unowned_rows(dout, group_sizes)
        dlhs = self.multiply(dout, group_sizes, operands, transposed=True)
        if all(operand.grad_sink is None for operand in operands):
            return dlhs, (None,) * len(operands)
        if not hasattr(jax.devices()[0], "core_count"):  # compiling for a GPU on a machine without one
            known = types.SimpleNamespace(core_count=HOPPER_CORES)
            setattr(kernel, "jax", types.SimpleNamespace(**{**vars(jax), "devices": lambda: [known]}))  # noqa: B010
        dweight = kernel.transposed_ragged_dot(
            fill_lines(lhs),
            fill_lines(dout),
            group_sizes=group_sizes,
            block_m=128 if lhs.shape[1] % 128 == 0 else TILE,
            max_concurrent_steps=4,
            **_tiles(dout.shape[1]),
        )
        dweight = cast_varying(dweight, varying_axes(lhs))  # the kernel's outputs are typed as equal on all devices
        return dlhs, split_gradient(dweight, operands)


def _tiles(resulting: int) -> dict[str, int]:
    """Return the sizes of tiles, and how many along N are visited before the next rows, which neighbours then share."""
    width = 128 if resulting % 128 == 0 else TILE
    together = next(count for count in (8, 4, 2, 1) if resulting % (count * width) == 0)
    return {"block_n": width, "block_k": TILE, "grid_block_n": together}


@register("mosaic")
class MosaicKernels:
    """This project's kernels, on all cores but `spared`.

    They read weights by slot where they lie, so no copy of the local bank is made; a tile of rows that nobody owns
    costs its zeros alone; gradients of weights leave in the dtype of their grad_sink, unrounded.
    """

    interpret = None  # tests set the parameters of Pallas' interpreter
    spared = 0  # cores left to transfers

    def cores(self) -> int:
        """Return how many blocks work, each on a core of its own."""
        if self.interpret is not None:
            return 2
        return getattr(jax.devices()[0], "core_count", HOPPER_CORES) - self.spared

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands, transposed: bool = False) -> Array:
        """Return rows times weights, [R, N], or with `transposed` rows [R, N] times transposed weights, [R, K]."""
        check_tiles("mosaic", lhs, operands, TILE)
        weights = []
        for operand in operands:
            if operand.bank.dtype == lhs.dtype:
                weights.append((operand.bank, operand.slots.astype(jnp.int32)))
            else:  # of a bank in another dtype only what is read is cast
                own = gather_weights((operand,), lhs.dtype)
                weights.append((own, jnp.arange(own.shape[0], dtype=jnp.int32)))
        weights = [(bank, slots) for bank, slots in weights if slots.shape[0]]
        return self.run(lhs, group_sizes, weights, None, transposed=transposed)

    def run(self, rows: Array, group_sizes: Array, weights, weight_scales, *, transposed: bool) -> Array:
        """Call the kernel `rows_by_weights`, whose arguments these are."""
        from moe_jax.kernels.mosaic_kernels import rows_by_weights

        out = rows_by_weights(
            rows,
            group_sizes,
            weights,
            weight_scales,
            transposed=transposed,
            cores=self.cores(),
            interpret=self.interpret,
        )
        return cast_varying(out, varying_axes(rows))  # a kernel's outputs are typed as equal

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        from moe_jax.kernels.mosaic_kernels import parts_of, rows_by_rows

        dlhs = self.multiply(dout, group_sizes, operands, transposed=True)
        wanted, low = [], 0  # ranges of groups that have a gradient
        for operand in operands:
            high = low + operand.slots.shape[0]
            if operand.grad_sink is not None and high > low:
                wanted.append((low, high, operand.grad_sink.dtype))
            low = high
        sums = []
        if wanted:
            groups = sum(high - low for low, high, _ in wanted)
            parts = parts_of(lhs.shape[0] / group_sizes.shape[0], groups, lhs.shape[1], dout.shape[1], self.cores())
            sums = rows_by_rows(lhs, dout, group_sizes, wanted, parts, self.cores(), self.interpret)
        left, dweights = iter(sums), []
        for operand in operands:
            dweight, sink = None, operand.grad_sink
            if sink is not None:
                dweight = next(left) if operand.slots.shape[0] else jnp.zeros(sink.shape, sink.dtype)
                dweight = cast_varying(dweight, varying_axes(lhs))
            dweights.append(dweight)
        return dlhs, tuple(dweights)


@register("mosaic_sparing")
class SparingMosaic(MosaicKernels):
    """`mosaic` on all cores but some for transfers, which a kernel on all cores keeps waiting."""

    spared = 16  # NCCL's channels take one each
