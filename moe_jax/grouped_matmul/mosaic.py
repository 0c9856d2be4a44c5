"""Grouped matmul by this project's own kernels for Hopper GPUs: `mosaic`, and `mosaic_sparing` beside transfers.

See `contract.py` for inputs and outputs, `mosaic_kernels.py` for the kernels. What they do that the shipped ones of
`hopper.py` do not: they read weights by slot where they lie, so no copy of the local bank is made; a tile of rows that
nobody owns costs its zeros alone, and no pass clears rows before or after; gradients of weights leave in the dtype of
their grad_sink, unrounded, an array per operand. `mosaic` works on every core. `mosaic_sparing` leaves `SPARED` of them
free, on which transfers can run at the same time: a kernel that holds all cores keeps them waiting.

Limits as for `hopper`: 16-bit floats, K and N multiples of 64. No GPU has run these kernels yet: tests interpret them
on a CPU and compile them for Hopper. So 'auto' never takes them, and training compares them with plain matmuls before
it starts (`training/first_step_check.py`). Only a program that uses them loads Pallas.

Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.errors import UserError
from moe_jax.grouped_matmul.contract import GroupedWeights, Operands, register
from moe_jax.grouped_matmul.hopper import HOPPER_CORES
from moe_jax.grouped_matmul.portable import gather_weights
from moe_jax.grouped_matmul.tile_schedule import LINES

Array = jax.Array
TILE = 64  # the least tile: what a warpgroup multiplies
SPARED = 16  # cores for transfers: NCCL's channels take one each
MOST_PARTS = 8
# What decides into how many parts the rows of a group are cut: FLOP/s of one core in a matmul, bytes/s of all.
CORE_RATE, MEMORY_RATE = 5e12, 4e12


class MosaicKernels:
    """The kernels on all cores but `spared`."""

    spared = 0
    interpret = None  # tests set the parameters of Pallas' interpreter

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        return self._rows_by_weights(lhs, group_sizes, operands, transposed=False)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        dlhs = self._rows_by_weights(dout, group_sizes, operands, transposed=True)
        return dlhs, self._rows_by_rows(lhs, dout, group_sizes, operands)

    def _rows_by_weights(self, rows: Array, group_sizes: Array, operands: Operands, *, transposed: bool) -> Array:
        from moe_jax.grouped_matmul.mosaic_kernels import rows_by_weights

        _check(rows, operands)
        read = [_as_read(operand, rows.dtype) for operand in operands if operand.slots.shape[0]]
        out = rows_by_weights(
            _fill(rows),
            group_sizes,
            [bank for bank, _ in read],
            [slots for _, slots in read],
            transposed=transposed,
            cores=self.cores(),
            interpret=self.interpret,
        )
        return cast_varying(out[: rows.shape[0]], varying_axes(rows))  # a kernel's outputs are typed as equal

    def _rows_by_rows(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        from moe_jax.grouped_matmul.mosaic_kernels import rows_by_rows

        wanted, dtypes, low = [], [], 0
        for operand in operands:
            high = low + operand.slots.shape[0]
            if operand.grad_sink is not None and high > low:
                wanted.append((low, high))
                dtypes.append(operand.grad_sink.dtype)
            low = high
        sums: list[Array] = []
        if wanted:
            groups = sum(high - low for low, high in wanted)
            parts = parts_of(lhs.shape[0] / group_sizes.shape[0], groups, lhs.shape[1], dout.shape[1], self.cores())
            alone = parts == 1 and set(dtypes) == {lhs.dtype}
            sums += rows_by_rows(
                _fill(lhs),
                _fill(dout),
                group_sizes,
                wanted,
                out_dtype=lhs.dtype if alone else jnp.float32,
                parts=parts,
                cores=self.cores(),
                interpret=self.interpret,
            )
        found = iter(zip(sums, dtypes, strict=True))
        return tuple(_gradient(operand, found, varying_axes(lhs)) for operand in operands)

    def cores(self) -> int:
        """Return how many blocks work, each on a core of its own."""
        return getattr(jax.devices()[0], "core_count", HOPPER_CORES) - self.spared if self.interpret is None else 2


@register("mosaic")
class MosaicMatmul(MosaicKernels):
    """On every core."""


@register("mosaic_sparing")
class SparingMosaicMatmul(MosaicKernels):
    """On all cores but `SPARED`, which are left to transfers."""

    spared = SPARED


def parts_of(rows: float, groups: int, contracted: int, resulting: int, cores: int) -> int:
    """Return into how many parts to cut the rows of a group, so that few large gradients fill all cores.

    A part is a sum of its own in float32, written, and read when the parts are added up.

    Args:
      rows: of a group, on average.
      groups: whose gradients are wanted.
    """
    from moe_jax.grouped_matmul.mosaic_kernels import HEIGHT, widest_tile

    width = widest_tile(resulting)
    tiles = groups * -(-contracted // HEIGHT) * (resulting // width)
    tile_seconds = 2 * rows * HEIGHT * width / CORE_RATE
    sum_seconds = 2 * 4 * groups * contracted * resulting / MEMORY_RATE

    def seconds(parts: int) -> float:
        return math.ceil(tiles * parts / cores) * tile_seconds / parts + (parts > 1) * parts * sum_seconds

    return min(range(1, MOST_PARTS + 1), key=seconds)


def _gradient(operand: GroupedWeights, found, axes) -> Array | None:
    """Return the next sum over parts in the dtype of the operand's grad_sink; None where it has no grad_sink."""
    if operand.grad_sink is None:
        return None
    if not operand.slots.shape[0]:
        return cast_varying(jnp.zeros(operand.grad_sink.shape, operand.grad_sink.dtype), axes)
    parts, dtype = next(found)
    total = parts[0] if parts.shape[0] == 1 else jnp.sum(parts, axis=0)
    return cast_varying(total.astype(dtype), axes)


def _as_read(operand: GroupedWeights, dtype) -> tuple[Array, Array]:
    """Return (bank, slots) of an operand in `dtype`; of a bank in another one, only what is read is cast."""
    if operand.bank.dtype == dtype:
        return operand.bank, operand.slots.astype(jnp.int32)
    return gather_weights((operand,), dtype), jnp.arange(operand.slots.shape[0], dtype=jnp.int32)


def _check(rows: Array, operands: Operands) -> None:
    contracted, resulting = operands[0].bank.shape[1:]
    if contracted % TILE or resulting % TILE:
        raise UserError(
            f"the mosaic grouped matmul needs weights whose dims ({contracted}, {resulting}) are multiples of {TILE}; "
            "choose such sizes, or MoEConfig.grouped_matmul = 'fused'"
        )
    if rows.dtype not in (jnp.bfloat16, jnp.float16):
        raise UserError(
            f"the mosaic grouped matmul takes bfloat16 or float16, not {rows.dtype}; compute in bfloat16, or choose "
            "MoEConfig.grouped_matmul = 'fused'"
        )


def _fill(rows: Array) -> Array:
    """Return [R, ...] with rows of zeros up to a multiple of `LINES`."""
    return jnp.pad(rows, ((0, -rows.shape[0] % LINES), (0, 0))) if rows.shape[0] % LINES else rows
