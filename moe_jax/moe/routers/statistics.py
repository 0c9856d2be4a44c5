"""What the tokens of a drop group tell of their choices, and the two losses that are formed from the sums.

Inputs: choices and scores of tokens gated here. Outputs: `GateStats`, sums from which losses and metrics are formed
once they are summed over all devices. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.routing import Choice, record
from moe_jax.parallel.few_kernels import sum_rows
from moe_jax.parallel.varying import own_part, varying_axes


@record
class GateStats:
    """Sums over the tokens of one drop group, or of any union of such groups after adding.

    Attributes:
      counts: int32 [E], choices per expert before any drop, of the tokens that this device owns: its N / N_MP of the N
        tokens of an MP group. Everything else is a sum over the group.
      probability: float [E], sum of the tokens' softmax probabilities.
      squared_logsumexp: float [], sum of logsumexp(logits) ** 2; its mean over tokens is the z-loss (ST-MoE, eq. 5).
      entropy: float [], sum of the entropies of the tokens' softmax, in nats.
      dropped: int32 [], choices dropped by capacity, or not drawn by `gshard`.
      first_counts: int32 [E], of first choices alone; None where the router does not need them.
      completed: int32 [], tokens that `base` placed after its auction had ended; None for every other router.
      sequence_balance: float [], sum over sequences of their tokens times their load-balancing loss; None unless
        `MoEConfig.balance_over` is 'sequence'.
      choices: int32 [t, K], of the tokens that this device owns, -1 of padding; None unless they are recorded.
    """

    counts: jax.Array
    probability: jax.Array
    squared_logsumexp: jax.Array
    entropy: jax.Array
    dropped: jax.Array
    first_counts: jax.Array | None = None
    completed: jax.Array | None = None
    sequence_balance: jax.Array | None = None
    choices: jax.Array | None = None

    @property
    def sums(self) -> GateStats:
        """What is summed over the devices of a group: all but what each device owns."""
        return dataclasses.replace(self, counts=None, choices=None)


def statistics_of(choice: Choice, probs, log_probs, log_z, real=None) -> GateStats:
    """Return the statistics of one drop group.

    Args:
      probs, log_probs: float [t, E] of its softmax; log_z: float [t].
      real: bool [t], the tokens that count; None counts all.
    """
    entropies = -jnp.sum(lax.stop_gradient(probs * log_probs), axis=-1)  # for show alone
    per_token = jnp.stack([jnp.square(log_z), entropies.astype(log_z.dtype)])
    if real is not None:
        per_token, probs = jnp.where(real, per_token, 0), jnp.where(real[:, None], probs, 0)
    sums = jnp.sum(per_token, axis=1)
    return GateStats(
        counts=count_experts(choice.expert_ids, probs.shape[-1], real),
        probability=sum_rows(probs),
        squared_logsumexp=sums[0],
        entropy=sums[1],
        dropped=jnp.sum(~choice.keep_mask if real is None else ~choice.keep_mask & real[:, None], dtype=jnp.int32),
    )


def share_statistics(stats: GateStats, choice: Choice, x, model: tuple[str, ...], real=None) -> GateStats:
    """Return the statistics as an MP group reports them, whether its devices gated all tokens or a part each.

    stats, choice: of the tokens x [t, M] gated here, inside `shard_map`; model: axes of the MP group; real: as in
    `statistics_of`.
    """
    if not model:
        return stats
    if varying_axes(x) & frozenset(model):
        return dataclasses.replace(lax.psum(stats.sums, model), counts=stats.counts, choices=stats.choices)
    owned = own_part(choice.expert_ids, model)
    choices = None if stats.choices is None else own_part(stats.choices, model)
    counted = None if real is None else own_part(real, model)
    return dataclasses.replace(stats, counts=count_experts(owned, stats.counts.shape[0], counted), choices=choices)


def count_experts(expert_ids, num_experts, real=None):
    """Return int32 [E], how often each id stands in `expert_ids` [t, ...]; real: bool [t], which count."""
    if real is not None:
        expert_ids = jnp.where(real.reshape(-1, *[1] * (expert_ids.ndim - 1)), expert_ids, num_experts)
    ids = expert_ids.reshape(-1)
    experts = jnp.arange(num_experts, dtype=ids.dtype)

    def count(ids, over: int):
        is_there = jnp.expand_dims(ids, 1 - over) == jnp.expand_dims(experts, over)
        return jnp.sum(is_there, axis=over, dtype=jnp.int32)

    # over the last dim it is one kernel on a GPU; over the first it takes half as long on a CPU
    by_choice, by_expert = (functools.partial(count, over=over) for over in (0, 1))
    return lax.platform_dependent(ids, cpu=by_choice, default=by_expert)


def balance_loss(counts, probability, tokens, top_k):
    """Return the load-balancing loss of one layer: E sum_e (counts_e / (K N)) (probability_e / N).

    It is 1 for uniform routing. Counts int32 [..., E] and probabilities [..., E] are sums over N tokens, the whole
    global microbatch, so that the loss does not depend on the layout.
    Source: Switch Transformer, eq. 4-6, with K choices per token.
    """
    num_experts = counts.shape[-1]
    fraction = counts.astype(probability.dtype) / (top_k * tokens)
    return num_experts * jnp.sum(lax.stop_gradient(fraction) * (probability / tokens), axis=-1)
