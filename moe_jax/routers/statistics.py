"""What the tokens of a drop group tell of their choices, and the two losses that are formed from the sums.

Inputs: choices and scores of tokens gated here. Outputs: `GateStats`, sums from which losses and metrics are formed
once they are summed over all devices. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.replicated import own_part
from moe_jax.collectives.varying import varying_axes
from moe_jax.dispatch.route import Choice, record


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
