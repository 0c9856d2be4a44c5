"""Grouped matmul for Hopper GPUs: `hopper`, Pallas kernels that ship with JAX; `mosaic`, this project's own.

See `grouped.py` for inputs and outputs, `mosaic_kernels.py` for the own kernels: they read weights by slot where they
lie, so no copy of the local bank is made; a tile of rows that nobody owns costs its zeros alone; gradients of weights
leave in the dtype of their grad_sink, unrounded. `mosaic` works on every core; `mosaic_sparing` leaves `SPARED` of them
free for transfers, which a kernel that holds all cores keeps waiting.

Limits: 16-bit floats, K and N multiples of 64. Tests interpret the own kernels on a CPU and compile them for Hopper, no
GPU has run them: 'auto' never takes them, and training compares either with plain matmuls before it starts. Only a
program that uses these loads Pallas. K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import math
import types

import jax
import jax.numpy as jnp

from moe_jax.errors import UserError
from moe_jax.kernels.blocked import clear_unowned_rows, gather_weights, split_gradient
from moe_jax.kernels.grouped import GroupedWeights, Operands, register
from moe_jax.kernels.row_blocks import LINES
from moe_jax.parallel.varying import cast_varying, varying_axes

Array = jax.Array

CAPABILITY = "9.0"  # the kernels use instructions of this generation alone
TILE = 64  # the least tile: rows of a warpgroup's matmul, and one swizzled line of 16-bit floats
HOPPER_CORES = 132


def fits(device, dtype, dims: tuple[int, ...]) -> bool:
    """Return whether a device, real or described, runs the kernels on rows of a dtype and weights of these dims."""
    return (
        str(getattr(device, "compute_capability", "")) == CAPABILITY
        and dtype in (jnp.bfloat16, jnp.float16)
        and not any(dim % TILE for dim in dims)
    )


@register("hopper")
class HopperMatmul:
    """The shipped `ragged_dot` and `transposed_ragged_dot` kernels; gradients of weights are rounded to 16 bits."""

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        return self._rows_by_weights(lhs, group_sizes, operands, transpose_rhs=False)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        # The weight gradient masks its first and last block by multiplication, which keeps a NaN.
        lhs, dout = clear_unowned_rows(lhs, group_sizes), clear_unowned_rows(dout, group_sizes)
        dlhs = self._rows_by_weights(dout, group_sizes, operands, transpose_rhs=True)
        if all(operand.grad_sink is None for operand in operands):
            return dlhs, (None,) * len(operands)
        return dlhs, split_gradient(_transposed_ragged_dot(_fill(lhs), _fill(dout), group_sizes), operands)

    def _rows_by_weights(self, lhs: Array, group_sizes: Array, operands: Operands, *, transpose_rhs: bool) -> Array:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        _check("hopper", lhs, operands)
        weights, filled = gather_weights(operands, lhs.dtype), _fill(lhs)
        resulting = weights.shape[1] if transpose_rhs else weights.shape[2]
        block_n = _largest_tile(resulting)
        out = ragged_dot(
            filled,
            weights,
            group_sizes=group_sizes,
            block_m=128 if filled.shape[0] >= 128 * weights.shape[0] else TILE,
            block_n=block_n,
            block_k=TILE,
            max_concurrent_steps=4,
            grid_block_n=_tiles_side_by_side(resulting, block_n),
            transpose_rhs=transpose_rhs,
        )
        out = cast_varying(out, varying_axes(lhs))  # the kernel's outputs are typed as equal on all devices
        return clear_unowned_rows(out[: lhs.shape[0]], group_sizes)


def _check(name: str, rows: Array, operands: Operands) -> None:
    contracted, resulting = operands[0].bank.shape[1:]
    if contracted % TILE or resulting % TILE:
        raise UserError(
            f"the {name} grouped matmul needs weights whose dims ({contracted}, {resulting}) are multiples of {TILE}; "
            "choose such sizes, or MoEConfig.grouped_matmul = 'fused'"
        )
    if rows.dtype not in (jnp.bfloat16, jnp.float16):
        raise UserError(
            f"the {name} grouped matmul takes bfloat16 or float16, not {rows.dtype}; compute in bfloat16, or choose "
            "MoEConfig.grouped_matmul = 'fused'"
        )


def _fill(rows: Array) -> Array:
    """Return [R, ...] with rows of zeros up to a multiple of `LINES`; a capacity may make any number of rows."""
    return jnp.pad(rows, ((0, -rows.shape[0] % LINES), (0, 0))) if rows.shape[0] % LINES else rows


def _largest_tile(size: int) -> int:
    return next(tile for tile in (128, TILE) if size % tile == 0)


def _tiles_side_by_side(size: int, tile: int) -> int:
    """Return how many tiles along N are visited before the next rows: neighbours then share rows in the cache."""
    return next(count for count in (8, 4, 2, 1) if size % (count * tile) == 0)


def _transposed_ragged_dot(lhs: Array, dout: Array, group_sizes: Array) -> Array:
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as kernel

    if not hasattr(jax.devices()[0], "core_count"):  # compiling for a GPU on a machine without one
        setattr(kernel, "jax", _JaxOnHopper())  # noqa: B010  (a plain assignment is a type error)
    block_n = _largest_tile(dout.shape[1])
    dweight = kernel.transposed_ragged_dot(
        lhs,
        dout,
        group_sizes=group_sizes,
        block_m=_largest_tile(lhs.shape[1]),
        block_n=block_n,
        block_k=TILE,
        max_concurrent_steps=4,
        grid_block_n=_tiles_side_by_side(dout.shape[1], block_n),
    )
    return cast_varying(dweight, varying_axes(lhs))  # the kernel's outputs are typed as equal on all devices


class _JaxOnHopper:
    """The `jax` module, for the shipped kernel: it reads how many cores the first device has; a CPU has none."""

    def __getattr__(self, name):
        return getattr(jax, name)

    def devices(self):
        return [types.SimpleNamespace(core_count=HOPPER_CORES)]


SPARED = 16  # cores for transfers: NCCL's channels take one each
MOST_PARTS = 8
# What decides into how many parts the rows of a group are cut: FLOP/s of one core in a matmul, bytes/s of all.
CORE_RATE, MEMORY_RATE = 5e12, 4e12


@register("mosaic")
class MosaicKernels:
    """This project's kernels, on all cores but `spared`."""

    spared = 0
    interpret = None  # tests set the parameters of Pallas' interpreter

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        return self._rows_by_weights(lhs, group_sizes, operands, transposed=False)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        dlhs = self._rows_by_weights(dout, group_sizes, operands, transposed=True)
        return dlhs, self._rows_by_rows(lhs, dout, group_sizes, operands)

    def _rows_by_weights(self, rows: Array, group_sizes: Array, operands: Operands, *, transposed: bool) -> Array:
        from moe_jax.kernels.mosaic_kernels import rows_by_weights

        _check("mosaic", rows, operands)
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
        from moe_jax.kernels.mosaic_kernels import rows_by_rows

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
    from moe_jax.kernels.mosaic_kernels import HEIGHT, widest_tile

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
