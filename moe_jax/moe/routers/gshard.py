"""`gshard`: the two most probable experts, the second by a draw, first choices before second ones.

Weights are the two probabilities over their sum, formed before the draw. The second expert is kept with probability
min(1, 2 g2), drawn by the token's global index; in evaluation always. With a capacity an expert serves all first
choices before any second one. The balance loss is E sum_e (c_e / T) m_e with c_e the first choices of e, m_e the mean
probability; the paper's is E^2 times smaller. Source: GShard (Lepikhin et al. 2021), section 2.2 and algorithm 1.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.moe.routers.contract import register
from moe_jax.moe.routers.scores import gate_logits, of_real, token_draws
from moe_jax.moe.routers.statistics import balance_loss, count_experts, statistics_of
from moe_jax.moe.routers.topk import TopK
from moe_jax.moe.routing import Choice, rank_within


@register("gshard")
class GShard(TopK):
    """Two experts per token, the second one by a draw."""

    ignores = ("routed_scale", "renormalize", "expert_groups", "kept_groups")
    replays = False
    balances = ("batch",)
    takes = (2, "takes two experts per token")
    draws = True

    @classmethod
    def check(cls, config):
        super().check(config)
        if config.drop != "position":
            raise UserError(
                f"MoEConfig.drop ({config.drop!r}) must be 'position' with MoEConfig.router = 'gshard', whose experts "
                "serve first choices before second ones, each in order of tokens"
            )

    def choose(self, x, params, inputs):
        config, tokens = self.config, x.shape[0]
        logits = gate_logits(x, params["w_gate"], config.router_dtype)
        noisy = self.with_noise(logits, x, params, inputs)
        probs = jax.nn.softmax(noisy, axis=-1)
        best, expert_ids = tuple(lax.top_k(probs, 2))
        weights = best / jnp.sum(best, axis=-1, keepdims=True)
        served = jnp.ones(expert_ids.shape, bool)
        if inputs.noise_key is not None:
            second = token_draws(inputs.noise_key, inputs.token_ids, probs.dtype) < 2 * lax.stop_gradient(weights[:, 1])
            served = jnp.stack([jnp.ones_like(second), second], axis=1)
        if inputs.real is not None:
            served = served & inputs.real[:, None]
        if not config.dropless:  # a queue of each expert, in which all first choices come first
            place = jnp.arange(2 * tokens, dtype=jnp.int32).reshape(tokens, 2)
            queue = jnp.where(served, expert_ids, config.num_experts).reshape(-1)
            rank = rank_within(queue, place.T.reshape(-1)).reshape(tokens, 2)
            served = served & (rank < of_real(config.capacity, tokens, inputs.real))
        choice = Choice(expert_ids=expert_ids, weights=weights, keep_mask=served)
        stats = statistics_of(
            choice, probs, jax.nn.log_softmax(noisy, axis=-1), jax.scipy.special.logsumexp(logits, axis=-1), inputs.real
        )
        first = count_experts(expert_ids[:, 0], config.num_experts, inputs.real)
        return choice, dataclasses.replace(stats, first_counts=first)

    def balance_loss(self, stats, tokens):
        return balance_loss(stats.first_counts, stats.probability, tokens, 1)
