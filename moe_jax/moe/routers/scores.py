"""Scores of all experts for every token, which experts and choices are open, and random numbers of the token alone.

Inputs: tokens x [t, M] and a gate weight [M, E], choices [t, K] of one drop group, or a key and the tokens' global
indices. Outputs: float [t, E] or [t], bool [t, E] within groups, bool [t, K] within a capacity.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.moe.config import MoEConfig
from moe_jax.moe.routing import rank_within
from moe_jax.parallel.varying import match_varying

_DRAWS = 0xFFFFFFFF  # folded into a key for draws besides the noise; no token has this index


def gate_logits(x, w_gate, router_dtype: str = "auto"):
    """Return the logits [t, E] of tokens [t, M], computed as `MoEConfig.router_dtype` says, in at least float32.

    'auto' computes in promote(x.dtype, float32): a float64 run stays float64.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32) if router_dtype == "auto" else jnp.dtype(router_dtype)
    logits = jnp.dot(x.astype(dtype), w_gate.astype(dtype), precision=lax.Precision.HIGHEST)
    return logits.astype(jnp.promote_types(dtype, jnp.float32))


@jax.custom_vjp
def softmax_and_log_z(logits):
    """Return (softmax [t, E], logsumexp [t]) of logits [t, E]; the probabilities are all that the gradients need."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    raised = jnp.exp(logits - largest)
    total = jnp.sum(raised, axis=-1, keepdims=True)
    return raised / total, (largest + jnp.log(total))[:, 0]


def _softmax_fwd(logits):
    probs, log_z = softmax_and_log_z(logits)
    return (probs, log_z), probs


def _softmax_bwd(probs, cotangents):
    d_probs, d_log_z = cotangents
    shift = d_log_z[:, None] - jnp.sum(d_probs * probs, axis=-1, keepdims=True)
    return (probs * (d_probs + shift),)


softmax_and_log_z.defvjp(_softmax_fwd, _softmax_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def best_scores(scores, top_k: int):
    """Return (the K highest scores [t, K], their experts int32 [t, K]) of scores [t, E], as `lax.top_k` does."""
    values, expert_ids = lax.top_k(scores, top_k)
    return values, expert_ids


def _best_scores_fwd(scores, top_k: int):
    values, expert_ids = best_scores(scores, top_k)
    return (values, expert_ids), (expert_ids, scores[:0])  # carries E, and no bytes


def _best_scores_bwd(_, residuals, cotangents):
    (expert_ids, like), (d_values, _) = residuals, cotangents
    (tokens, top_k), experts = expert_ids.shape, like.shape[1]

    def scatter(values, expert_ids):
        token = lax.broadcasted_iota(jnp.int32, (tokens, top_k), 0)
        zeros = match_varying(jnp.zeros((tokens, experts), values.dtype), values)[0]
        return zeros.at[token, expert_ids].set(values, unique_indices=True)

    def select(values, expert_ids):  # part of whatever reads it, on a GPU
        expert = lax.broadcasted_iota(jnp.int32, (tokens, experts), 1)
        columns = [jnp.where(expert_ids[:, k, None] == expert, values[:, k, None], 0) for k in range(top_k)]
        return functools.reduce(jnp.add, columns)

    return (lax.platform_dependent(d_values, expert_ids, cpu=scatter, default=select),)


best_scores.defvjp(_best_scores_fwd, _best_scores_bwd)


def within_groups(scores, config: MoEConfig, best: int):
    """Return bool [t, E]: the experts of each token's best groups; ties go to the lowest group.

    Groups are consecutive experts. With even homes without replicas, and as many groups as nodes, a group is a node,
    and a token's experts are on `kept_groups` nodes at most. Source: DeepSeek-V2, section 2.1.3 (best expert of a
    group); DeepSeek-V3, section 2.1.2 (its two best).

    Args:
      scores: [t, E] by which experts are chosen.
      config: expert_groups and kept_groups are read.
      best: a group's score is that of its best expert (1), or the sum of its two best (2), or of its only one.
    """
    groups = config.expert_groups
    grouped = scores.reshape(scores.shape[0], groups, -1)
    inside = grouped.shape[-1]
    score = jnp.max(grouped, axis=-1) if best == 1 else jnp.sum(lax.top_k(grouped, min(best, inside))[0], axis=-1)
    kept = lax.top_k(score, config.kept_groups)[1]
    stays = jnp.any(kept[:, :, None] == jnp.arange(groups, dtype=kept.dtype)[None, None], axis=1)
    return jnp.repeat(stays, inside, axis=1)


def gate_noise(key, token_ids, num_experts, dtype):
    """Return standard normal noise [t, E] that depends on `key` and each token's global index alone."""
    keys = jax.vmap(lambda token: jax.random.fold_in(key, token))(token_ids)
    return jax.vmap(lambda k: jax.random.normal(k, (num_experts,), dtype))(keys)


def token_draws(key, token_ids, dtype):
    """Return one number of [0, 1) per token [t]; it depends on `key` and the token's index alone, and on no noise."""
    draws = jax.random.fold_in(key, _DRAWS)
    return jax.vmap(lambda token: jax.random.uniform(jax.random.fold_in(draws, token), (), dtype))(token_ids)


def keep_within_capacity(expert_ids, probs, config: MoEConfig, real=None):
    """Return bool [t, K]: the choices that their expert's capacity admits.

    By position, an expert takes its first tokens; by probability its most probable ones, ties to the lowest global
    token id, which is the order of a drop group's tokens on every mesh. Tokens that tie are computed in different
    orders, and the last bits in which they then differ depend on the mesh: three quarters of the bits decide.

    Args:
      expert_ids: int32 [t, K].
      probs: [t, K] softmax probabilities of the choices, before any renormalisation, or their scores.
      config: capacity_factor, min_capacity and drop are read.
      real: bool [t], False for padding, of which nothing is admitted; None where nothing is.
    """
    t, k = expert_ids.shape
    admitted = jnp.ones((t, k), bool) if real is None else jnp.broadcast_to(real[:, None], (t, k))
    if config.dropless:
        return admitted
    order = None
    if config.drop == "probability":
        bits = jnp.finfo(probs.dtype)
        certain = lax.reduce_precision(lax.stop_gradient(probs), bits.nexp, 3 * bits.nmant // 4)
        order = jnp.argsort(-certain.reshape(-1), stable=True).astype(jnp.int32)
    if real is not None:  # padding takes no places
        expert_ids = jnp.where(admitted, expert_ids, config.num_experts)
    most = of_real(config.capacity, t, real)
    kept = (rank_within(expert_ids.reshape(-1), order) < most).reshape(t, k)
    return kept if real is None else kept & admitted


def of_real(function, tokens: int, real=None):
    """Return function(n), an int, of the n among `tokens` tokens that are no padding: int32 [] where some may be.

    Args:
      function: int to int; real: bool [tokens], None where nothing is padding.
    """
    if real is None:
        return function(tokens)
    values = np.array([function(number) for number in range(tokens + 1)], np.int32)  # exact, as without padding
    return jnp.asarray(values)[jnp.sum(real, dtype=jnp.int32)]
