"""The gate: which experts each token chooses, and with what weight.

Inputs: tokens x [t, M] of one drop group and the gate's weight [M, E]. Outputs: `Choice` (ids, weights and keep_mask,
each [t, K]) and `GateStats`, sums over these tokens from which losses and metrics are formed once they are summed over
all devices. It moves nothing between devices and does not depend on the placement of the experts.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.replicated import own_part
from moe_jax.collectives.varying import varying_axes
from moe_jax.dispatch.route import Choice, rank_within, record
from moe_jax.moe.config import MoEConfig


@record
class GateStats:
    """Sums over the tokens of one drop group, or of any union of such groups after adding.

    Attributes:
      counts: int32 [E], choices per expert before any drop, of the tokens that this device owns: its N / N_MP of the N
        tokens of an MP group. Everything else is a sum over the group.
      probability: float [E], sum of the tokens' softmax probabilities.
      squared_logsumexp: float [], sum of logsumexp(logits) ** 2.
      entropy: float [], sum of the entropies of the tokens' softmax, in nats.
      dropped: int32 [], choices dropped by capacity.
    """

    counts: jax.Array
    probability: jax.Array
    squared_logsumexp: jax.Array
    entropy: jax.Array
    dropped: jax.Array


def gate_noise(key, token_ids, num_experts, dtype):
    """Return standard normal noise [t, E] that depends on `key` and each token's global index alone."""
    keys = jax.vmap(lambda token: jax.random.fold_in(key, token))(token_ids)
    return jax.vmap(lambda k: jax.random.normal(k, (num_experts,), dtype))(keys)


def choose_experts(x, w_gate, config: MoEConfig, *, noise_key=None, token_ids=None):
    """Score all experts and choose the K best of each token.

    Computed in promote(x.dtype, float32), so a float64 run stays float64.

    Args:
      x: [t, M] tokens.
      w_gate: [M, E].
      config: top_k, renormalize, gate_noise, capacity and drop policy are read.
      noise_key: PRNG key of this step and layer, or None for no noise (evaluation).
      token_ids: int32 [t], global index of each token; needed with noise.

    Returns:
      Choice and GateStats of these tokens; tokens are one drop group.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.dot(x.astype(dtype), w_gate.astype(dtype), precision=lax.Precision.HIGHEST)
    noisy = logits
    if config.gate_noise > 0 and noise_key is not None:
        noisy = logits + config.gate_noise * gate_noise(noise_key, token_ids, config.num_experts, dtype)
    log_z = jax.scipy.special.logsumexp(logits, axis=-1)
    probs = jax.nn.softmax(noisy, axis=-1)
    weights, expert_ids = tuple(lax.top_k(probs, config.top_k))
    keep_mask = keep_within_capacity(expert_ids, weights, config)
    if config.renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    stats = GateStats(
        counts=count_experts(expert_ids, config.num_experts),
        probability=jnp.sum(probs, axis=0),
        squared_logsumexp=jnp.sum(jnp.square(log_z)),
        entropy=-jnp.sum(probs * jax.nn.log_softmax(noisy, axis=-1)),
        dropped=jnp.sum(~keep_mask, dtype=jnp.int32),
    )
    return Choice(expert_ids=expert_ids, weights=weights, keep_mask=keep_mask), stats


def share_statistics(stats: GateStats, choice: Choice, x, model: tuple[str, ...]) -> GateStats:
    """Return the statistics as an MP group reports them, whether its devices gated all tokens or a part each.

    Args:
      stats, choice: of the tokens x [t, M] that were gated here, inside `shard_map`.
      model: axes of the MP group; () changes nothing.
    """
    if not model:
        return stats
    if varying_axes(x) & frozenset(model):
        sums = (stats.probability, stats.squared_logsumexp, stats.entropy, stats.dropped)
        probability, squared, entropy, dropped = lax.psum(sums, model)
        return GateStats(stats.counts, probability, squared, entropy, dropped)
    owned = own_part(choice.expert_ids, model)
    return dataclasses.replace(stats, counts=count_experts(owned, stats.counts.shape[0]))


def count_experts(expert_ids, num_experts):
    """Return int32 [E], how often each id stands in `expert_ids` (any shape)."""
    ids = expert_ids.reshape(-1, 1)
    return jnp.sum(ids == jnp.arange(num_experts, dtype=ids.dtype)[None], axis=0, dtype=jnp.int32)


def keep_within_capacity(expert_ids, probs, config: MoEConfig):
    """Return bool [t, K]: the choices that their expert's capacity admits.

    By position, an expert takes its first tokens; by probability its most probable ones, ties to the earlier token.

    Args:
      expert_ids: int32 [t, K].
      probs: [t, K] softmax probabilities of the choices, before any renormalisation.
      config: capacity_factor, min_capacity and drop are read.
    """
    t, k = expert_ids.shape
    if config.dropless:
        return jnp.ones((t, k), bool)
    order = None
    if config.drop == "probability":
        order = jnp.argsort(-lax.stop_gradient(probs).reshape(-1), stable=True).astype(jnp.int32)
    rank = rank_within(expert_ids.reshape(-1), order)
    return (rank < config.capacity(t)).reshape(t, k)


def balance_loss(counts, probability, tokens, top_k):
    """Return the load-balancing loss of one layer: E sum_e (counts_e / (K N)) (probability_e / N).

    It is 1 for uniform routing. Counts and probabilities must be sums over the whole global microbatch, so that the
    loss does not depend on the layout.

    Args:
      counts: int32 [..., E]; probability: float [..., E]; tokens: N, number of tokens summed over; top_k: K.

    Source: Switch Transformer, eq. 4-6, with K choices per token.
    """
    num_experts = counts.shape[-1]
    fraction = counts.astype(probability.dtype) / (top_k * tokens)
    return num_experts * jnp.sum(lax.stop_gradient(fraction) * (probability / tokens), axis=-1)


def z_loss(squared_logsumexp, tokens):
    """Return the mean squared log-partition of the gate. Source: ST-MoE, eq. 5."""
    return squared_logsumexp / tokens
