"""`topk`: the K experts with the highest softmax probability.

Inputs: tokens [t, M] and w_gate [M, E]. Outputs: `Choice` and `GateStats`. Ties go to the lowest expert id. Source:
DeepSpeed-MoE's top-k gate; with K = 1 and weights not renormalised, Switch Transformers'.
Letters: docs/notation.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.dispatch.route import Choice
from moe_jax.routers.capacity import keep_within_capacity
from moe_jax.routers.contract import RouterBase, RouterInputs
from moe_jax.routers.scores import gate_logits, gate_noise
from moe_jax.routers.statistics import GateStats, count_experts


class TopK(RouterBase):
    """Score all experts and choose the K best of each token."""

    def choose(self, x, params, inputs: RouterInputs):
        config = self.config
        logits = gate_logits(x, params["w_gate"])
        noisy = logits
        if config.gate_noise > 0 and inputs.noise_key is not None:
            noise = gate_noise(inputs.noise_key, inputs.token_ids, config.num_experts, logits.dtype)
            noisy = logits + config.gate_noise * noise
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
