"""`topk`: the K experts with the highest softmax probability; `group_limited`: inside each token's best groups.

Inputs: tokens [t, M] and w_gate [M, E]. Outputs: `Choice` and `GateStats`. Ties go to the lowest expert id. Source:
DeepSpeed-MoE's top-k gate. Routers that differ in noise or weights only are subclasses (`switch.py`, `noisy_topk.py`,
`forced_balance.py`).
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.moe.config import BALANCE_OVER
from moe_jax.moe.routers.contract import Router, RouterInputs, register
from moe_jax.moe.routers.scores import (
    best_scores,
    gate_logits,
    gate_noise,
    keep_within_capacity,
    softmax_and_log_z,
    within_groups,
)
from moe_jax.moe.routers.statistics import balance_loss, statistics_of
from moe_jax.moe.routing import Choice


@register("topk")
class TopK(Router):
    """Score all experts and choose the K best of each token, among all or inside its groups."""

    replays = True
    takes_padding = True
    balances = BALANCE_OVER

    def choose(self, x, params, inputs: RouterInputs):
        config = self.config
        logits = gate_logits(x, params["w_gate"], config.router_dtype)
        noisy = self.with_noise(logits, x, params, inputs)
        probs, noisy_z = softmax_and_log_z(noisy)
        log_z = noisy_z if noisy is logits else jax.scipy.special.logsumexp(logits, axis=-1)
        weights, expert_ids = self.pick(probs, inputs)
        keep_mask = keep_within_capacity(expert_ids, weights, config, inputs.real)
        choice = Choice(expert_ids=expert_ids, weights=self.weigh(weights), keep_mask=keep_mask)
        return choice, self.statistics(choice, probs, noisy - noisy_z[:, None], log_z, inputs.real)

    def check_tokens(self, tokens):
        if self.config.balance_over == "sequence" and self.place is not None:
            self.check_sequences(self.place.gated(tokens))

    def check_sequences(self, tokens: int) -> int:
        """Return the length of a sequence, or raise a UserError where a device does not gate whole ones."""
        length = 0 if self.place is None else self.place.length
        if not length or tokens % length:
            raise UserError(
                f"MoEConfig.balance_over ('sequence') needs whole sequences on a device, and it gates {tokens} tokens "
                f"of sequences of {length or 'unknown length'}; set it to 'batch', or raise train.batch_size"
            )
        return length

    def statistics(self, choice: Choice, probs, log_probs, log_z, real=None):
        """Return what `statistics_of` does, with what a balance loss over sequences needs."""
        stats = statistics_of(choice, probs, log_probs, log_z, real)
        if self.config.balance_over != "sequence":
            return stats
        length = self.check_sequences(probs.shape[0])
        top_k, experts = choice.expert_ids.shape[1], probs.shape[1]
        ids, each = choice.expert_ids, length
        if real is not None:
            ids, probs = jnp.where(real[:, None], ids, experts), jnp.where(real[:, None], probs, 0)
            each = jnp.maximum(jnp.sum(real.reshape(-1, length), axis=1, keepdims=True, dtype=jnp.int32), 1)
        ids = ids.reshape(-1, length * top_k, 1)
        counts = jnp.sum(ids == jnp.arange(experts, dtype=ids.dtype)[None, None], axis=1, dtype=jnp.int32)
        probability = jnp.sum(probs.reshape(-1, length, experts), axis=1)
        losses = balance_loss(counts, probability, each, top_k)
        total = jnp.sum(losses) * length if real is None else jnp.sum(losses * each[:, 0])
        return dataclasses.replace(stats, sequence_balance=total)

    def with_noise(self, logits, x, params, inputs: RouterInputs):
        """Return the logits [t, E] by which experts are chosen."""
        if self.config.gate_noise == 0 or inputs.noise_key is None:
            return logits
        noise = gate_noise(inputs.noise_key, inputs.token_ids, self.config.num_experts, logits.dtype)
        return logits + self.config.gate_noise * noise

    def pick(self, probs, inputs: RouterInputs):
        """Return the probabilities [t, K] of the chosen experts, and their ids int32 [t, K]."""
        config = self.config
        if inputs.replay is not None:
            return jnp.take_along_axis(probs, inputs.replay, axis=-1), inputs.replay
        if config.expert_groups:
            open_groups = within_groups(lax.stop_gradient(probs), config, 1)
            _, expert_ids = lax.top_k(jnp.where(open_groups, lax.stop_gradient(probs), -jnp.inf), config.top_k)
            return jnp.take_along_axis(probs, expert_ids, axis=-1), expert_ids
        return best_scores(probs, config.top_k)

    def weigh(self, weights):
        """Return the factors [t, K] of the experts' outputs, from the chosen probabilities."""
        if self.config.renormalize:
            columns = [weights[:, k] for k in range(weights.shape[1])]
            total = functools.reduce(jnp.add, columns)  # a reduction is a kernel by itself
            weights = jnp.stack([column / total for column in columns], axis=1)
        return weights if self.config.routed_scale == 1 else self.config.routed_scale * weights


@register("group_limited")
class GroupLimited(TopK):
    """Top-K of the softmax inside groups. Source: DeepSeek-V2, section 2.1.3."""

    @classmethod
    def check(cls, config):
        super().check(config)
        if not config.expert_groups:
            raise UserError(
                "MoEConfig.router ('group_limited') needs MoEConfig.expert_groups, and 0 is none; set it to a divisor "
                f"of MoEConfig.num_experts ({config.num_experts}), such as the number of nodes"
            )
