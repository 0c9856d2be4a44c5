"""Cross-entropy of a large vocabulary, a chunk of tokens at a time, so that the logits are never all in memory.

Letters: docs/notation.md.
"""

# Parts are computed in their order and need no other: the first while the second is awaited, and the gradient of the
# first can leave next to the second. Where the loss is differentiated its gradients are formed in the same pass, while
# the logits of a chunk are there: no logits are kept, and none are computed twice. Their derivatives are rounded to the
# compute dtype, like every operand of a matmul; sums over tokens and vocabulary are in at least float32.

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.varying import cast_varying, match_varying, varying_axes


def chunked_cross_entropy(x: tuple, table, targets: tuple, weights: tuple, chunk: int):
    """Return sum_i weights_i * loss_i, in at least float32, with at most `chunk` rows of logits in memory.

    Args:
      x: parts [t_i, M].
      table: [V, M], read in the dtype of x; its gradient is summed over the chunks in at least float32.
      targets: parts int32 [t_i]; weights: parts float [t_i], 0 where a token is no target. Neither has a gradient.
      chunk: tokens per chunk; the last chunk of a part is padded with weight 0.
    """
    return _losses(chunk, 0.0, *match_varying(x, table, targets, weights), None)[0]


# A student that learns from a frozen teacher: both logits of a chunk are formed in the same pass, so neither is ever in
# memory as [t, V]. Temperature 1. Source: DeepSpeed-MoE (Rajbhandari et al. 2022), on its mixture of students: the
# divergence of the two predictions, times alpha, is added to the student's own loss.
def chunked_distillation(student: tuple, teacher: tuple, targets, weights, chunk: int, alpha: float):
    """Return (sum_i weights_i (CE_i + alpha KL_i), sum_i weights_i CE_i, sum_i weights_i KL_i).

    CE_i is -log q of the target, KL_i is KL(teacher || student) = sum_v p (log p - log q) in nats. The gradient is of
    the first sum alone, and goes to the student.

    Args:
      student: (x [t, M], table [V, M]), as `chunked_cross_entropy` takes them.
      teacher: (x [t, M'] of the same tokens, table [V, M']).
      targets: int32 [t]; weights: float [t], 0 where a token is no target.
      chunk: tokens per chunk, whose rows of each logits are in memory; the last chunk is padded with weight 0.
    """
    (x, table), (teacher_x, teacher_table) = student, teacher
    both = teacher_x, teacher_table.astype(teacher_x.dtype)
    x, table, targets, weights, both = match_varying(x, table, targets, weights, both)
    return _losses(chunk, alpha, (x,), table, (targets,), (weights,), both)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(chunk, alpha, x, table, targets, weights, teacher):
    return _losses_fwd(chunk, alpha, x, table, targets, weights, teacher)[0]


def _losses_fwd(chunk, alpha, x, table, targets, weights, teacher):
    """Return (the three sums of `chunked_distillation`, (the gradients of the first by the parts of x and the table)).

    Without a teacher the last sum is 0.
    """
    sum_dtype = jnp.promote_types(x[0].dtype, jnp.float32)
    held = table.astype(x[0].dtype)

    def piece(carry, rows):
        sums, dtable = carry
        x, targets, weights, *taught = rows
        logits = jnp.einsum("tm,vm->tv", x, held, preferred_element_type=sum_dtype)
        # without the care of `logsumexp` for a token whose logits are all infinite
        largest = jnp.max(logits, axis=-1)
        log_z = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1))
        counted = weights.astype(sum_dtype)
        cross_entropy = log_z - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        is_target = targets[:, None] == jnp.arange(held.shape[0], dtype=targets.dtype)[None]
        log_q = logits - log_z[:, None]
        derivatives, by_token = jnp.exp(log_q) - is_target, [cross_entropy]
        if taught:
            taught = jnp.einsum("tm,vm->tv", *taught, teacher[1], preferred_element_type=sum_dtype)
            log_p = jax.nn.log_softmax(taught, axis=-1)
            by_token.append(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))
            derivatives += alpha * (jnp.exp(log_q) - jnp.exp(log_p))
        dlogits = (derivatives * counted[:, None]).astype(x.dtype)
        dx = jnp.einsum("tv,vm->tm", dlogits, held, preferred_element_type=sum_dtype).astype(x.dtype)
        dtable += jnp.einsum("tv,tm->vm", dlogits, x, preferred_element_type=dtable.dtype)
        return ([total + own * counted for total, own in zip(sums, by_token, strict=True)], dtable), dx

    number = 1 if teacher is None else 2
    dtable = jnp.zeros(held.shape, jnp.promote_types(table.dtype, sum_dtype))
    dtable, sums, dx = *cast_varying((dtable, [jnp.zeros((), sum_dtype)] * number), varying_axes(x)), []
    for rows in zip(x, targets, weights, *(() if teacher is None else (teacher[:1],)), strict=True):
        chunks, tokens = in_chunks(chunk, rows), rows[0].shape[0]
        # summed over a chunk's tokens after the loop: in each of its turns that is two kernels more on a GPU
        by_place = cast_varying([jnp.zeros(chunks[0].shape[1], sum_dtype)] * number, varying_axes(x))
        (by_place, dtable), of_x = lax.scan(piece, (by_place, dtable), chunks)
        sums = [total + jnp.sum(own) for total, own in zip(sums, by_place, strict=True)]
        dx.append(of_x.reshape(-1, of_x.shape[-1])[:tokens])
    cross_entropy, kl = sums[0], sums[1] if number == 2 else jnp.zeros_like(sums[0])
    return (cross_entropy + alpha * kl, cross_entropy, kl), (tuple(dx), dtable, table)


def _losses_bwd(chunk, alpha, residuals, d):
    (dx, dtable, table), d = residuals, d[0]
    return tuple((part * d).astype(part.dtype) for part in dx), (dtable * d).astype(table.dtype), None, None, None


_losses.defvjp(_losses_fwd, _losses_bwd)


def in_chunks(chunk: int, rows: tuple) -> tuple:
    """Return arrays [t, ...] as [t / chunk, chunk, ...], padded with zeros where t is no multiple of min(chunk, t)."""
    tokens = rows[0].shape[0]
    chunk = min(chunk, tokens)
    pieces = -(-tokens // chunk)
    pad = pieces * chunk - tokens
    if pad:
        rows = tuple(jnp.pad(a, ((0, pad), *((0, 0) for _ in a.shape[1:]))) for a in rows)
    return tuple(a.reshape(pieces, chunk, *a.shape[1:]) for a in rows)
