"""The expert FFN row block by row block, so that a block's hidden rows stay in the cache between its matmuls.

Enters: rows `[R, M]` sorted by group and the weights of each group's FFN; leaves: `[R, M]`. One loop computes the whole
forward and one the whole backward, where composing three grouped matmuls takes two and two, and passes over [R, F] in
between. Only the pre-activations [R, F] are kept for the backward.

Letters: R rows of this shard, M model dim, F hidden dim, G groups, S rows of a weight bank.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from moe_jax.moe.blocked_matmul import (
    ROWS_BY_ROWS,
    ROWS_BY_TRANSPOSED,
    ROWS_BY_WEIGHT,
    choose_heights,
    multiply,
    split_sizes,
    zeros_varying_like,
)
from moe_jax.moe.row_blocks import for_each_block

Array = jax.Array


def blocked_ffn(
    activation: Callable, rows: Array, group_sizes: Array, ins: tuple, outs: tuple
) -> tuple[Array, tuple[Array, ...]]:
    """Return the FFN's output [R, M] and its pre-activations, one [R, F] per input weight.

    Args:
        activation: function of one hidden array per input weight.
        rows: [R, M]. group_sizes: int32 [G].
        ins: per input weight a tuple of `GroupedWeights` [S, M, F].
        outs: tuple of `GroupedWeights` [S, F, M].
    """
    height, hidden = rows.shape[0], outs[0].bank.shape[1]
    out = zeros_varying_like(rows.shape, rows.dtype, rows)
    pres = tuple(zeros_varying_like((height, hidden), rows.dtype, rows) for _ in ins)
    for i, (sizes, first_row) in enumerate(split_sizes(group_sizes, outs)):

        def step(carry, block, i=i):
            out, pres = carry
            x = block.read(rows)
            pre = [multiply(x, block.pick(w[i].bank, w[i].slots, x.dtype), ROWS_BY_WEIGHT) for w in ins]
            pres = tuple(block.write(kept, new) for kept, new in zip(pres, pre, strict=True))
            h = activation(*pre).astype(x.dtype)
            y = multiply(h, block.pick(outs[i].bank, outs[i].slots, x.dtype), ROWS_BY_WEIGHT)
            return block.write(out, y), pres

        heights = choose_heights(height, sizes.shape[0], outs[i].bank[0].size)
        out, pres = for_each_block(sizes, heights, height, (out, pres), step, first_row)
    return out, pres


def blocked_ffn_gradients(
    activation: Callable, rows: Array, pres: tuple, dout: Array, group_sizes: Array, ins: tuple, outs: tuple
):
    """Return the gradient of `rows` and those of the weights, shaped like (ins, outs), None without a sink."""
    height = rows.shape[0]
    drows = zeros_varying_like(rows.shape, rows.dtype, rows)
    dins, douts = [[] for _ in ins], []
    for i, (sizes, first_row) in enumerate(split_sizes(group_sizes, outs)):

        def step(carry, block, i=i):
            drows, dws, dw_out = carry
            x, dy = block.read(rows), block.read(dout)
            pre = [block.read(kept) for kept in pres]
            h, pullback = jax.vjp(activation, *[p.astype(_accumulator(p)) for p in pre])
            dh = multiply(dy, block.pick(outs[i].bank, outs[i].slots, x.dtype), ROWS_BY_TRANSPOSED)
            dpre = [d.astype(x.dtype) for d in pullback(dh)]
            dx = sum(
                multiply(d, block.pick(w[i].bank, w[i].slots, x.dtype), ROWS_BY_TRANSPOSED)
                for d, w in zip(dpre, ins, strict=True)
            )
            if dw_out is not None:
                dw_out = block.add_to_group(dw_out, multiply(h.astype(x.dtype), dy, ROWS_BY_ROWS))
            dws = tuple(
                None if dw is None else block.add_to_group(dw, multiply(x, d, ROWS_BY_ROWS))
                for dw, d in zip(dws, dpre, strict=True)
            )
            return block.write(drows, dx), dws, dw_out

        heights = choose_heights(height, sizes.shape[0], outs[i].bank[0].size)
        start = (drows, tuple(_open(w[i], rows) for w in ins), _open(outs[i], rows))
        drows, dws, dw_out = for_each_block(sizes, heights, height, start, step, first_row)
        douts.append(dw_out)
        for part, dw in zip(dins, dws, strict=True):
            part.append(dw)
    return drows, (tuple(tuple(part) for part in dins), tuple(douts))


def _accumulator(x):
    return jax.numpy.promote_types(x.dtype, jax.numpy.float32)


def _open(operand, like):
    return None if operand.sink is None else zeros_varying_like(operand.sink.shape, operand.sink.dtype, like)
