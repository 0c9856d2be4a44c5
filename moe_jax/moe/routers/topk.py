"""`topk`: the K experts with the highest softmax probability. Its kin differ in groups, weight, noise or choice alone.

They are `group_limited`, `switch`, `noisy_topk` and `forced_balance`. Inputs: tokens [t, M] and w_gate [M, E]. Outputs:
`Choice` and `GateStats`. Ties go to the lowest expert id. Source: DeepSpeed-MoE's top-k gate.
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
        if config.renormalize and "renormalize" not in self.ignores:
            columns = [weights[:, k] for k in range(weights.shape[1])]
            total = functools.reduce(jnp.add, columns)  # a reduction is a kernel by itself
            weights = jnp.stack([column / total for column in columns], axis=1)
        if config.routed_scale != 1 and "routed_scale" not in self.ignores:
            weights = config.routed_scale * weights
        choice = Choice(expert_ids=expert_ids, weights=weights, keep_mask=keep_mask)
        return choice, self.statistics(choice, probs, noisy - noisy_z[:, None], log_z, inputs.real)

    def check_tokens(self, tokens):
        if self.config.balance_over != "sequence":
            return
        length = 0
        if self.place is not None:
            tokens, length = self.place.gated(tokens), self.place.length
        if not length or tokens % length:
            raise UserError(
                f"MoEConfig.balance_over ('sequence') needs whole sequences on a device, and it gates {tokens} tokens "
                f"of sequences of {length or 'unknown length'}; set it to 'batch', or raise train.batch_size"
            )

    def statistics(self, choice: Choice, probs, log_probs, log_z, real=None):
        """Return what `statistics_of` does, with what a balance loss over sequences needs."""
        stats = statistics_of(choice, probs, log_probs, log_z, real)
        if self.config.balance_over != "sequence":
            return stats
        if self.place is None:  # else its layer asked
            self.check_tokens(probs.shape[0])
        length, top_k, experts = self.place.length, choice.expert_ids.shape[1], probs.shape[1]
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


@register("switch")
class Switch(TopK):
    """Each token takes its most probable expert, weighted by that probability, so the gate learns from the loss.

    With `capacity_factor` an expert takes its first tokens, as published; None is dropless. Source: Switch Transformers
    (Fedus et al. 2022), sections 2.1 and 2.2.
    """

    ignores = ("routed_scale", "renormalize")
    takes = (1, "takes one expert per token")


@register("noisy_topk")
class NoisyTopK(TopK):
    """H = x w_gate + softplus(x w_noise) n with n standard normal; the K best of softmax(H).

    w_noise [M, E] starts at zero: a scale of softplus(0) = 0.69. The noise of a token is keyed by its global index, so
    it does not depend on the layout; in evaluation there is none. Source: Shazeer et al., Outrageously Large Neural
    Networks (2017), equations 3 to 5.
    """

    keeps = {"w_noise": "ME"}
    draws = True

    @classmethod
    def check(cls, config):
        super().check(config)
        if config.gate_noise:
            raise UserError(
                f"MoEConfig.gate_noise ({config.gate_noise}) must be 0 with MoEConfig.router = 'noisy_topk', which "
                "learns the scale of its noise"
            )

    def with_noise(self, logits, x, params, inputs):
        if inputs.noise_key is None:
            return logits
        noise = gate_noise(inputs.noise_key, inputs.token_ids, self.config.num_experts, logits.dtype)
        return logits + jax.nn.softplus(gate_logits(x, params["w_noise"], self.config.router_dtype)) * noise


@register("forced_balance")
class ForcedBalance(TopK):
    """Hand out experts in turn, for measuring a layer without skew; not for training a model.

    Token i takes the experts i K, i K + 1, .. modulo E, whatever its scores are; i is its global index. So any run of
    consecutive tokens loads the experts evenly, to one choice. Weights are the softmax of its scores at the experts
    that were given: a step costs what it would. Source: torchtitan issue 1670.
    """

    ignores = ("expert_groups", "kept_groups")
    replays = False
    by_token = False

    def pick(self, probs, inputs):
        config, token_ids = self.config, inputs.token_ids
        token_ids = jnp.arange(probs.shape[0]) if token_ids is None else token_ids
        first = token_ids.astype(jnp.uint32)[:, None] * config.top_k
        turn = jnp.arange(config.top_k, dtype=jnp.uint32)[None]
        expert_ids = ((first + turn) % config.num_experts).astype(jnp.int32)
        return jnp.take_along_axis(probs, expert_ids, axis=-1), expert_ids
