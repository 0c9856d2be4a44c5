"""Cross-entropy of a large vocabulary, a chunk of tokens at a time, so that the logits are never all in memory.

Letters: docs/notation.md.
"""

# Parts are computed in their order and need no other: the first while the second is awaited, and the gradient of the
# first can leave next to the second. Where the loss is differentiated its gradients are formed in the same pass, while
# the logits of a chunk are there: no logits are kept, and none are computed twice. Their derivatives are rounded to the
# compute dtype, like every operand of a matmul; sums over tokens and vocabulary are in at least float32. The backward
# multiplies by the loss's cotangent, which in float16 comes too late for what has been rounded to zero: there the
# derivatives, 1 at most, are formed RAISED times as large (a table's entries may then be up to 32).

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.models.model_group import in_dtype, project
from moe_jax.parallel.varying import cast_varying, match_varying, varying_axes

RAISED = {"float16": 2.0**10}  # by compute dtype


def token_losses(logits, targets):
    """Return -log p(target) [n] and log sum_v exp(logits) [n], in the dtype of logits [n, V]; targets: int32 [n]."""
    log_z = jax.scipy.special.logsumexp(logits, axis=-1)
    return log_z - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0], log_z


def in_chunks(chunk: int, *rows):
    """Return arrays [t, ...] as [t / chunk, chunk, ...], padded with zeros where t is no multiple of min(chunk, t)."""
    tokens = rows[0].shape[0]
    chunk = min(chunk, tokens)
    pieces = -(-tokens // chunk)
    pad = pieces * chunk - tokens
    if pad:
        rows = tuple(jnp.pad(a, ((0, pad), *((0, 0) for _ in a.shape[1:]))) for a in rows)
    return tuple(a.reshape(pieces, chunk, *a.shape[1:]) for a in rows)


def chunked_cross_entropy(x: tuple, table, targets: tuple, weights: tuple, chunk: int):
    """Return sum_i weights_i * loss_i, in at least float32, with at most `chunk` rows of logits in memory.

    Args:
      x: parts [t_i, M].
      table: [V, M], read in the dtype of x; its gradient is summed over the chunks in at least float32.
      targets: parts int32 [t_i]; weights: parts float [t_i], 0 where a token is no target.
      chunk: tokens per chunk; the last chunk of a part is padded with weight 0.
    """
    held = lax.stop_gradient(table).astype(x[0].dtype)
    return _loss(chunk, table.dtype, *match_varying(x, held, table, targets, weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(chunk, table_dtype, x, held, table, targets, weights):
    del table_dtype, table

    def piece(total, rows):
        x, targets, weights = rows
        logits = jnp.einsum("tm,vm->tv", x, held, preferred_element_type=_sum_dtype(x))
        losses, _ = token_losses(logits, targets)
        return total + jnp.sum(losses * weights.astype(losses.dtype)), None

    total = cast_varying(jnp.zeros((), _sum_dtype(x[0])), varying_axes(x))
    for rows in zip(x, targets, weights, strict=True):
        total, _ = lax.scan(piece, total, in_chunks(chunk, *rows))
    return total


def _loss_fwd(chunk, table_dtype, x, held, table, targets, weights):
    """Return the loss and (its gradients by the parts of x and by the table, and the parts of the token losses)."""
    sum_dtype, raised = _sum_dtype(x[0]), RAISED.get(x[0].dtype.name)

    def piece(carry, rows):
        total, dtable = carry
        x, targets, weights = rows
        logits = jnp.einsum("tm,vm->tv", x, held, preferred_element_type=sum_dtype)
        # as `token_losses`, without its care for a token whose logits are all infinite
        largest = jnp.max(logits, axis=-1)
        log_z = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1))
        losses = log_z - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        counted = weights.astype(sum_dtype)
        is_target = targets[:, None] == jnp.arange(held.shape[0], dtype=targets.dtype)[None]
        dlosses = counted if raised is None else counted * raised
        dlogits = ((jnp.exp(logits - log_z[:, None]) - is_target) * dlosses[:, None]).astype(x.dtype)
        dx = jnp.einsum("tv,vm->tm", dlogits, held, preferred_element_type=sum_dtype).astype(x.dtype)
        dtable += jnp.einsum("tv,tm->vm", dlogits, x, preferred_element_type=dtable.dtype)
        return (total + losses * counted, dtable), (dx, losses)

    dtable = jnp.zeros(held.shape, jnp.promote_types(table_dtype, sum_dtype))
    dtable, total = cast_varying((dtable, jnp.zeros((), sum_dtype)), varying_axes(x))
    dx, losses = [], []
    for rows in zip(x, targets, weights, strict=True):
        chunks, tokens = in_chunks(chunk, *rows), rows[0].shape[0]
        # summed over a chunk's tokens after the loop: in each of its turns that is two kernels more on a GPU
        by_place = cast_varying(jnp.zeros(chunks[0].shape[1], sum_dtype), varying_axes(x))
        (by_place, dtable), (of_x, of_tokens) = lax.scan(piece, (by_place, dtable), chunks)
        total += jnp.sum(by_place)
        dx.append(of_x.reshape(-1, of_x.shape[-1])[:tokens])
        losses.append(of_tokens.reshape(-1)[:tokens].astype(rows[2].dtype))
    return total, (tuple(dx), dtable, tuple(losses))


def _loss_bwd(chunk, table_dtype, residuals, d):
    del chunk
    dx, dtable, losses = residuals
    dweights = tuple((part * d).astype(part.dtype) for part in losses)
    if (raised := RAISED.get(dx[0].dtype.name)) is not None:
        d = d / raised
    dx = tuple((part * d).astype(part.dtype) for part in dx)
    return dx, None, (dtable * d).astype(table_dtype), None, dweights


_loss.defvjp(_loss_fwd, _loss_bwd)


def _sum_dtype(x):
    return jnp.promote_types(x.dtype, jnp.float32)


# A student that learns from a frozen teacher: both logits of a chunk are formed in the same pass, so neither is ever in
# memory as [t, V]. Temperature 1. Source: DeepSpeed-MoE (Rajbhandari et al. 2022), on its mixture of students: the
# divergence of the two predictions, times alpha, is added to the student's own loss.
def divergence(teacher_logits, logits):
    """Return KL(teacher || student) [n] in nats, sum_v p (log p - log q), of logits [n, V] of teacher and student.

    The gradient goes to the student's logits alone: q - p.
    """
    teacher = jax.nn.log_softmax(lax.stop_gradient(teacher_logits), axis=-1)
    return jnp.sum(jnp.exp(teacher) * (teacher - jax.nn.log_softmax(logits, axis=-1)), axis=-1)


def chunked_distillation(student: tuple, teacher: tuple, targets, weights, chunk: int):
    """Return (sum_i weights_i CE_i, sum_i weights_i KL_i), with at most `chunk` rows of each logits in memory.

    Args:
      student: (x [t, M], table [V, M]), as `chunked_cross_entropy` takes them.
      teacher: (x [t, M'] of the same tokens, table [V, M']). Neither gets a gradient.
      targets: int32 [t]; weights: float [t], 0 where a token is no target.
      chunk: tokens per chunk; the last chunk is padded with weight 0.
    """
    x, table = student
    acc_dtype = _sum_dtype(x)
    held = in_dtype(table, x.dtype)
    teacher_x, teacher_table = lax.stop_gradient(teacher)
    teacher_held, _ = in_dtype(teacher_table, teacher_x.dtype)
    # else the gradients of x and of the table would be summed over devices in every turn of the loop
    x, held, targets, weights = match_varying(x, held, targets, weights)

    @jax.checkpoint  # the backward computes a chunk's logits again, so that none are kept
    def piece(totals, rows):
        x, teacher_x, targets, weights = rows
        logits = project("tm,vm->tv", x, held, out=acc_dtype)
        losses, _ = token_losses(logits, targets)
        teacher_logits = jnp.einsum("tm,vm->tv", teacher_x, teacher_held, preferred_element_type=acc_dtype)
        counted = weights.astype(acc_dtype)
        by_token = losses, divergence(teacher_logits, logits)
        return tuple(total + jnp.sum(each * counted) for total, each in zip(totals, by_token, strict=True)), None

    axes = varying_axes(x, table, teacher_x, teacher_table, targets, weights)
    zero = cast_varying(jnp.zeros((), acc_dtype), axes)
    return lax.scan(piece, (zero, zero), in_chunks(chunk, x, teacher_x, targets, weights))[0]
