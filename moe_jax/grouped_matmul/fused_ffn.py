"""The expert FFN row block by row block, so that the hidden rows of a block stay in the cache between its matmuls.

Inputs: rows `[R, M]` sorted by group and the weights of each group's FFN; outputs: `[R, M]`. One loop computes the
whole forward and one the whole backward, where composing grouped matmuls takes a loop per weight and passes over [R, F]
in between. Only the pre-activations [R, F] are saved for the backward.

Letters: docs/notation.md.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moe_jax.grouped_matmul.blocked import (
    ROWS_BY_ROWS,
    ROWS_BY_TRANSPOSED,
    ROWS_BY_WEIGHT,
    BlockedMatmul,
    choose_heights,
    close_gradient,
    multiply,
    open_gradient,
    split_sizes,
    zeros_varying_like,
)
from moe_jax.grouped_matmul.contract import GroupedWeights, register
from moe_jax.grouped_matmul.row_blocks import for_each_block

Array = jax.Array


@register("fused")
class FusedBlocks(BlockedMatmul):
    """`blocked`, and the whole FFN in one loop: about a tenth faster on a CPU, in a third of the memory."""

    def ffn(self, activation: Callable, rows: Array, group_sizes: Array, ins: tuple, outs: tuple) -> Array:
        return _forward(activation, rows, group_sizes, ins, outs, save_residuals=False)[0]

    def ffn_forward(self, activation: Callable, rows: Array, group_sizes: Array, ins: tuple, outs: tuple):
        return _forward(activation, rows, group_sizes, ins, outs, save_residuals=True)

    def ffn_gradients(
        self,
        activation: Callable,
        rows: Array,
        residuals: tuple,
        dout: Array,
        group_sizes: Array,
        ins: tuple,
        outs: tuple,
    ):
        drows = zeros_varying_like(rows.shape, rows.dtype, rows)
        dins, douts = [], []
        for part, (sizes, first_row) in enumerate(split_sizes(group_sizes, outs)):
            part_ins, part_out = [operands[part] for operands in ins], outs[part]
            step = _backward_step(activation, rows, residuals, dout, part_ins, part_out)
            carry = (drows, [open_gradient(w, rows) for w in part_ins], open_gradient(part_out, rows))
            heights = choose_heights(rows.shape[0], sizes.shape[0], part_out.bank[0].size)
            drows, dw_ins, dw_out = for_each_block(sizes, heights, rows.shape[0], carry, step, first_row)
            dins.append(list(map(close_gradient, part_ins, dw_ins)))
            douts.append(close_gradient(part_out, dw_out))
        return drows, tuple(zip(*dins, strict=True)), tuple(douts)


def _forward(activation, rows, group_sizes, ins, outs, *, save_residuals: bool):
    """Return the output [R, M], and with `save_residuals` the pre-activations, one [R, F] per input weight."""
    out = zeros_varying_like(rows.shape, rows.dtype, rows)
    hidden = (rows.shape[0], outs[0].bank.shape[1])
    residuals = tuple(zeros_varying_like(hidden, rows.dtype, rows) for _ in ins) if save_residuals else ()
    for part, (sizes, first_row) in enumerate(split_sizes(group_sizes, outs)):
        step = _forward_step(activation, rows, [operands[part] for operands in ins], outs[part])
        heights = choose_heights(rows.shape[0], sizes.shape[0], outs[part].bank[0].size)
        out, residuals = for_each_block(sizes, heights, rows.shape[0], (out, residuals), step, first_row)
    return out, residuals


def _forward_step(activation: Callable, rows: Array, ins: list[GroupedWeights], out_weight: GroupedWeights):
    dtype = rows.dtype

    def step(carry, block):
        out, residuals = carry
        x = block.read(rows)
        pre = [multiply(x, block.pick(w.bank, w.slots, dtype), ROWS_BY_WEIGHT).astype(dtype) for w in ins]
        if residuals:
            residuals = tuple(block.write(array, new) for array, new in zip(residuals, pre, strict=True))
        hidden = activation(*map(_to_acc_dtype, pre)).astype(dtype)
        y = multiply(hidden, block.pick(out_weight.bank, out_weight.slots, dtype), ROWS_BY_WEIGHT)
        return block.write(out, y), residuals

    return step


def _backward_step(activation, rows, residuals, dout, ins: list[GroupedWeights], out_weight: GroupedWeights):
    dtype = rows.dtype

    def step(carry, block):
        drows, dw_ins, dw_out = carry
        x, dy = block.read(rows), block.read(dout)
        hidden, pull_back = jax.vjp(activation, *[_to_acc_dtype(block.read(array)) for array in residuals])
        dhidden = multiply(dy, block.pick(out_weight.bank, out_weight.slots, dtype), ROWS_BY_TRANSPOSED)
        dpre = [d.astype(dtype) for d in pull_back(_to_acc_dtype(dhidden.astype(dtype)))]
        dx = sum(
            multiply(d, block.pick(w.bank, w.slots, dtype), ROWS_BY_TRANSPOSED) for d, w in zip(dpre, ins, strict=True)
        )
        if dw_out is not None:
            dw_out = block.add_to_group(dw_out, multiply(hidden.astype(dtype), dy, ROWS_BY_ROWS))
        dw_ins = [
            dw if dw is None else block.add_to_group(dw, multiply(x, d, ROWS_BY_ROWS))
            for dw, d in zip(dw_ins, dpre, strict=True)
        ]
        return block.write(drows, dx), dw_ins, dw_out

    return step


def _to_acc_dtype(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
