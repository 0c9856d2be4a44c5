"""Cross-entropy of a large vocabulary, a chunk of tokens at a time, so that the logits are never all in memory.

Inputs: final activations [t, M], the output table [V, M], targets and weights [t]. Outputs: the weighted sum of the
token losses, in at least float32. The caller divides by the global number of target tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.varying import cast_varying, match_varying, varying_axes
from moe_jax.models.param_dtype_gradients import Weight, in_dtype, project


def token_losses(x, table, targets):
    """Return -log p(target) [n] for x [n, M], targets int32 [n], and the table [V, M], an array or a `Weight`."""
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    table = table if isinstance(table, Weight) else in_dtype(table, x.dtype)
    logits = project("tm,vm->tv", x, table, out=acc_dtype)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jax.scipy.special.logsumexp(logits, axis=-1) - picked


def chunked_cross_entropy(x, table, targets, weights, chunk: int):
    """Return sum_i weights_i * loss_i, with at most `chunk` rows of logits in memory.

    Args:
      x: [t, M]; table: [V, M], read in the dtype of x; its gradient is summed over the chunks in the table's dtype.
      targets: int32 [t]; weights: float [t], 0 where a token is no target.
      chunk: tokens per chunk; the last chunk is padded with weight 0.
    """
    held = in_dtype(table, x.dtype)
    if held.grad_sink is not None:  # else the table's gradient would be summed over devices inside the loop
        x, held = match_varying(x, held)

    def piece(x, targets, weights):
        losses = token_losses(x, held, targets)
        return jnp.sum(losses * weights.astype(losses.dtype))

    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    zero = cast_varying(jnp.zeros((), acc_dtype), varying_axes(x, table, targets, weights))
    return sum_over_chunks(piece, zero, (x, targets, weights), chunk)


def sum_over_chunks(piece, zero, rows: tuple, chunk: int):
    """Return zero + piece(*rows of the first chunk) + piece(*rows of the second) + ...

    Args:
      piece: returns a pytree like `zero`; its backward computes it again, so that nothing of a chunk is kept.
      zero: pytree of arrays, typed as varying over all mesh axes over which the pieces vary.
      rows: arrays [t, ...]; the last chunk is padded with zeros, which must add nothing.
      chunk: tokens per chunk.
    """
    tokens = rows[0].shape[0]
    chunk = min(chunk, tokens)
    pieces = -(-tokens // chunk)
    pad = pieces * chunk - tokens
    if pad:
        rows = tuple(jnp.pad(a, ((0, pad), *((0, 0) for _ in a.shape[1:]))) for a in rows)
    piece = jax.checkpoint(piece)

    def body(total, inputs):
        return jax.tree.map(jnp.add, total, piece(*inputs)), None

    return lax.scan(body, zero, tuple(a.reshape(pieces, chunk, *a.shape[1:]) for a in rows))[0]
