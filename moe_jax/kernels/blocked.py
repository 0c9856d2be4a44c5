"""Grouped matmuls of plain XLA: `reference`, the oracle; `ragged`, for TPU; `fused`, loops of row blocks.

See `grouped.py` for inputs and outputs. `fused` is made for CPUs, where XLA expands `lax.ragged_dot` to G times the
work: it takes about the FLOPs of the rows in use. It has the whole expert FFN in one loop forward and one backward, so
the hidden rows of a block stay in the cache; only pre-activations [R, F] are saved.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.kernels.grouped import MATMULS, GroupedMatmul, GroupedWeights, Operands
from moe_jax.parallel.few_kernels import rows_in_use
from moe_jax.parallel.varying import zeros_varying

Array = jax.Array
ROWS_BY_WEIGHT = (((1,), (0,)), ((), ()))  # [R, K] x [K, N] -> [R, N]
ROWS_BY_TRANSPOSED = (((1,), (1,)), ((), ()))  # [R, N] x [K, N] -> [R, K]

# XLA needs static shapes, so a group's rows are covered by blocks whose heights come from a short ladder: blocks of the
# highest rung as long as rows are left for more than one, then one *tail* block of the lowest rung that covers the
# rest. An empty group costs nothing, and a group of 70 rows costs a matmul of 72 or 80 rows, not of 128. Received
# buckets are mostly padding, so R / G may be far above what a group holds; a block as tall as that would compute the
# padding. Above about a thousand rows a taller block saves nothing anyway.
TALLEST_MEAN = 1024
TURNED = 256  # rows from which writing their transpose costs a CPU less than it gains


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowBlock:
    """One block: rows of `group`, in a window of `height` rows that starts at row `start`."""

    height: int
    group: Array
    start: Array
    # bool [height, 1], which rows of the window are the block's own: the others belong to other groups or to none, so
    # they are read as zeros and never written. None where all are, and the group has had its tail.
    own: Array | None

    def read(self, array: Array) -> Array:
        """Return the window [height, ...] of `array` [R, ...], zero outside the block's own rows."""
        window = lax.dynamic_slice_in_dim(array, self.start, self.height, 0)
        return window if self.own is None else jnp.where(self.own, window, jnp.zeros((), array.dtype))

    def write(self, array: Array, values: Array) -> Array:
        """Return `array` [R, ...] with the block's own rows replaced by those of `values` [height, ...]."""
        values = values.astype(array.dtype)
        if self.own is not None:
            window = lax.dynamic_slice_in_dim(array, self.start, self.height, 0)
            values = jnp.where(self.own, values, window)
        return lax.dynamic_update_slice_in_dim(array, values, self.start, 0)

    def multiply(self, rows: Array, operand: GroupedWeights, dims) -> Array:
        """Return rows [height, ...] times the weight of this block's group in their dtype, in at least float32."""
        weight = lax.dynamic_index_in_dim(operand.bank, operand.slots[self.group], 0, keepdims=False)
        acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
        return lax.dot_general(rows, weight.astype(rows.dtype), dims, preferred_element_type=acc_dtype)

    def turn(self, rows: Array) -> Array:
        """Return rows^T, for `add_product`; of tall blocks it is written on CPUs, whose matmuls then are faster."""
        if self.height < TURNED:
            return rows.T
        return lax.platform_dependent(rows, cpu=lambda rows: lax.optimization_barrier(rows.T), default=jnp.transpose)

    def add_product(self, totals: Array, turned: Array, dout: Array) -> Array:
        """Return `totals` [G, K, N], zero for groups not met yet, with lhs^T dout added to this block's group.

        turned: [K, height], lhs^T as `turn` returns it.
        """
        acc_dtype = jnp.promote_types(dout.dtype, jnp.float32)
        values = lax.dot_general(turned, dout, ROWS_BY_WEIGHT, preferred_element_type=acc_dtype)
        values = values.astype(totals.dtype)[None]
        if self.own is None:
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
    top, sizes = heights[-1], np.asarray(group_sizes)
    full = np.maximum(sizes - 1, 0) // top
    tails = sizes - full * top
    rungs = np.array(heights)[np.searchsorted(heights, tails)]
    return int(np.sum(full * top + np.where(tails > 0, rungs, 0)))


def for_each_block(
    group_sizes: Array, heights: tuple[int, ...], rows: int, groups: int, first_row: Array | int, carry: Any,
    step: Callable,
) -> Any:  # fmt: skip
    """Return the carry after `step(carry, block)` for every block of every group; tails come before full blocks.

    Args:
      group_sizes: int32 [G].
      heights: ascending ladder of block heights, none above `rows`.
      rows: R, static; groups: that share them, G or more; first_row: where the first group starts.
      carry: pytree of arrays, updated in place by XLA as long as `step` uses each of its arrays once.
      step: handles one block; traced once per rung.
    """
    # how often a loop turns is data: `cluster.timeline` reads this in the program
    name = f"blocks_{rows}_{groups}_{group_sizes.shape[0]}_{heights[-1]}"
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
            row = lax.broadcasted_iota(jnp.int32, (height, 1), 0)
            own = (row >= first - start) & (row < first - start + tails[group])
            return step(carry, RowBlock(height=height, group=group, start=start, own=own))

        above, start = (heights[i - 1], stops[i - 1]) if i else (0, jnp.zeros_like(stops[0]))
        carry = jax.named_scope(f"{name}_{above}_{height}")(lax.fori_loop)(start, stops[i], tail_step, carry)

    if top >= rows:
        return carry
    last_turns = jnp.cumsum(full_blocks, dtype=jnp.int32)

    def full_step(turn, carry):
        group = jnp.sum(last_turns <= turn, dtype=jnp.int32)
        place = turn - (last_turns[group] - full_blocks[group])
        return step(carry, RowBlock(height=top, group=group, start=starts[group] + place * top, own=None))

    loop = jax.named_scope(f"{name}_{top}_{top}")(lax.fori_loop)
    return loop(jnp.zeros_like(last_turns[-1]), last_turns[-1], full_step, carry)


def gather_weights(operands: Operands, dtype) -> Array:
    """Return the weights [G, K, N] of all groups, operand after operand."""
    parts = [jnp.take(operand.bank, operand.slots, axis=0, mode="clip").astype(dtype) for operand in operands]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def split_gradient(dweight: Array, operands: Operands) -> tuple[Array | None, ...]:
    """Cut the gradient [G, K, N] of all groups by operand, in its grad_sink's dtype; None where it has no grad_sink."""
    parts, offset = [], 0
    for operand in operands:
        stop = offset + operand.slots.shape[0]
        parts.append(None if operand.grad_sink is None else dweight[offset:stop].astype(operand.grad_sink.dtype))
        offset = stop
    return tuple(parts)


def clear_unowned_rows(array: Array, group_sizes: Array) -> Array:
    """Return `array` [R, ...] with zeros in the rows past the last group."""
    return jnp.where(rows_in_use(group_sizes, array.shape[0]), array, jnp.zeros((), array.dtype))


@MATMULS.register("reference")
class ReferenceMatmul(GroupedMatmul):
    """Every group multiplies every row, and a mask selects its own: G times the FLOPs, and simple."""

    gathers = True

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        owner, einsum = self._owner(lhs, group_sizes)
        lhs, weights = clear_unowned_rows(lhs, group_sizes), gather_weights(operands, lhs.dtype)
        return einsum("gr,rk,gkn->rn", owner, lhs, weights).astype(lhs.dtype)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        owner, einsum = self._owner(lhs, group_sizes)
        lhs, dout = clear_unowned_rows(lhs, group_sizes), clear_unowned_rows(dout, group_sizes)
        dlhs = einsum("gr,rn,gkn->rk", owner, dout, gather_weights(operands, lhs.dtype)).astype(lhs.dtype)
        return dlhs, split_gradient(einsum("gr,rk,rn->gkn", owner, lhs, dout), operands)

    def _owner(self, lhs: Array, group_sizes: Array):
        """Return ([G, R] that is one where the group owns the row, einsum in at least float32)."""
        stops, row = jnp.cumsum(group_sizes)[:, None], jnp.arange(lhs.shape[0])[None]
        owner = ((row >= stops - group_sizes[:, None]) & (row < stops)).astype(lhs.dtype)
        acc_dtype = jnp.promote_types(lhs.dtype, jnp.float32)
        return owner, functools.partial(jnp.einsum, preferred_element_type=acc_dtype)


@MATMULS.register("ragged")
class RaggedMatmul(GroupedMatmul):
    """`lax.ragged_dot`, lowered by XLA on each platform: on a CPU with G times the FLOPs."""

    gathers = True

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        cleared, weights = clear_unowned_rows(lhs, group_sizes), gather_weights(operands, lhs.dtype)
        acc_dtype = jnp.promote_types(lhs.dtype, jnp.float32)
        out = lax.ragged_dot(cleared, weights, group_sizes, preferred_element_type=acc_dtype)
        return clear_unowned_rows(out, group_sizes).astype(lhs.dtype)

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        lhs, dout = clear_unowned_rows(lhs, group_sizes), clear_unowned_rows(dout, group_sizes)
        transposed = jnp.swapaxes(gather_weights(operands, lhs.dtype), 1, 2)
        acc_dtype = jnp.promote_types(lhs.dtype, jnp.float32)
        dlhs = lax.ragged_dot(dout, transposed, group_sizes, preferred_element_type=acc_dtype)
        dlhs = clear_unowned_rows(dlhs, group_sizes).astype(lhs.dtype)
        if all(operand.grad_sink is None for operand in operands):
            return dlhs, (None,) * len(operands)
        rows_by_rows = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        dweight = lax.ragged_dot_general(lhs, dout, group_sizes, rows_by_rows, preferred_element_type=acc_dtype)
        return dlhs, split_gradient(dweight, operands)


def _loops(group_sizes: Array, operands: Operands, rows: int) -> list[tuple]:
    """Return the arguments of `for_each_block` for each operand, but for carry and step; they hold its first row."""
    parts, offset, first_row = [], 0, jnp.zeros((), jnp.int32)
    for operand in operands:
        sizes = group_sizes[offset : offset + operand.slots.shape[0]]
        heights = choose_heights(rows, sizes.shape[0], operand.bank[0].size)
        parts.append((sizes, heights, rows, group_sizes.shape[0], first_row))
        offset += operand.slots.shape[0]
        first_row = first_row + jnp.sum(sizes, dtype=jnp.int32)
    return parts


def _open_gradient(operand: GroupedWeights, like: Array) -> Array | None:
    """Return zeros for the gradient of an operand's groups, at least float32; None where it has no grad_sink."""
    sink = operand.grad_sink
    return None if sink is None else zeros_varying(sink.shape, jnp.promote_types(sink.dtype, jnp.float32), like)


@MATMULS.register("fused")
class FusedBlocks(GroupedMatmul):
    """One XLA matmul per row block; forward and backward are loops of a dynamic trip count.

    With the whole FFN in one loop it is about a tenth faster on a CPU than by its matmuls, in a third of the memory.
    """

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        out = zeros_varying((lhs.shape[0], operands[0].bank.shape[2]), lhs.dtype, lhs)
        for operand, loop in zip(operands, _loops(group_sizes, operands, lhs.shape[0]), strict=True):

            def step(out, block, operand=operand):
                return block.write(out, block.multiply(block.read(lhs), operand, ROWS_BY_WEIGHT))

            out = for_each_block(*loop, out, step)
        return out

    def gradients(self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands):
        dlhs, dweights = zeros_varying(lhs.shape, lhs.dtype, lhs), []
        for operand, loop in zip(operands, _loops(group_sizes, operands, lhs.shape[0]), strict=True):

            def step(carry, block, operand=operand):
                dlhs, dweight = carry
                d = block.read(dout)
                dlhs = block.write(dlhs, block.multiply(d, operand, ROWS_BY_TRANSPOSED))
                if dweight is not None:
                    dweight = block.add_product(dweight, block.turn(block.read(lhs)), d)
                return dlhs, dweight

            dlhs, dweight = for_each_block(*loop, (dlhs, _open_gradient(operand, lhs)), step)
            dweights.append(dweight if dweight is None else dweight.astype(operand.grad_sink.dtype))
        return dlhs, tuple(dweights)

    def ffn(self, activation: Callable, rows: Array, group_sizes: Array, ins: tuple, outs: tuple, *, saved: bool):
        """Return the output [R, M], and if `saved` the pre-activations, one [R, F] per input weight, else ()."""
        dtype, acc_dtype = rows.dtype, jnp.promote_types(rows.dtype, jnp.float32)
        out = zeros_varying(rows.shape, dtype, rows)
        hidden_shape = (rows.shape[0], outs[0].bank.shape[1])
        residuals = tuple(zeros_varying(hidden_shape, dtype, rows) for _ in ins) if saved else ()
        for part, loop in enumerate(_loops(group_sizes, outs, rows.shape[0])):
            part_ins = [operands[part] for operands in ins]

            def step(carry, block, part_ins=part_ins, part_out=outs[part]):
                out, residuals = carry
                x = block.read(rows)
                pre = []
                for operand in part_ins:
                    pre.append(block.multiply(x, operand, ROWS_BY_WEIGHT).astype(dtype))
                if residuals:
                    residuals = tuple(block.write(array, new) for array, new in zip(residuals, pre, strict=True))
                hidden = activation(*(array.astype(acc_dtype) for array in pre)).astype(dtype)
                return block.write(out, block.multiply(hidden, part_out, ROWS_BY_WEIGHT)), residuals

            out, residuals = for_each_block(*loop, (out, residuals), step)
        return out, residuals

    def ffn_gradients(
        self, activation: Callable, rows: Array, residuals: tuple, dout: Array, group_sizes: Array, ins, outs
    ):
        """Return the gradients of rows [R, M], of each operand of each input weight, and of the output weight's."""
        dtype, acc_dtype = rows.dtype, jnp.promote_types(rows.dtype, jnp.float32)
        drows, dins, douts = zeros_varying(rows.shape, dtype, rows), [], []
        for part, loop in enumerate(_loops(group_sizes, outs, rows.shape[0])):
            part_ins, part_out = [operands[part] for operands in ins], outs[part]

            def step(carry, block, part_ins=part_ins, part_out=part_out):
                drows, dw_ins, dw_out = carry
                x, dy = block.read(rows), block.read(dout)
                hidden, pull_back = jax.vjp(activation, *[block.read(array).astype(acc_dtype) for array in residuals])
                dhidden = block.multiply(dy, part_out, ROWS_BY_TRANSPOSED)
                dpre = [d.astype(dtype) for d in pull_back(dhidden.astype(dtype).astype(acc_dtype))]
                dx = sum(block.multiply(d, w, ROWS_BY_TRANSPOSED) for d, w in zip(dpre, part_ins, strict=True))
                if dw_out is not None:
                    dw_out = block.add_product(dw_out, block.turn(hidden.astype(dtype)), dy)
                turned, pairs = block.turn(x), zip(dw_ins, dpre, strict=True)
                dw_ins = [dw if dw is None else block.add_product(dw, turned, d) for dw, d in pairs]
                return block.write(drows, dx), dw_ins, dw_out

            carry = (drows, [_open_gradient(w, rows) for w in part_ins], _open_gradient(part_out, rows))
            drows, dw_ins, dw_out = for_each_block(*loop, carry, step)
            *of_ins, of_out = (
                dw if dw is None else dw.astype(w.grad_sink.dtype)
                for dw, w in zip([*dw_ins, dw_out], [*part_ins, part_out], strict=True)
            )
            dins.append(of_ins)
            douts.append(of_out)
        return drows, tuple(zip(*dins, strict=True)), tuple(douts)


def expert_work(group_sizes, rows: int, model_dim: int, hidden_dim: int, item: int = 4) -> tuple[float, float]:
    """Return the work of `fused`: FLOPs and bytes of a forward and backward.

    A forward reads weights and rows once and writes rows and hidden rows; a backward does so twice and writes gradients
    of the weights, with three times the FLOPs together. Buffers are cleared whole, padding included.

    Args:
      group_sizes: int [G], rows in use, as far as known; rows: R; item: bytes of a number.
    """
    groups = len(group_sizes)
    computed = rows_computed(np.asarray(group_sizes), choose_heights(rows, groups, model_dim * hidden_dim))
    weights = 2 * groups * model_dim * hidden_dim
    moved = rows * (model_dim + hidden_dim)
    return 12.0 * computed * model_dim * hidden_dim, float(item * (4 * weights + 3 * moved))
