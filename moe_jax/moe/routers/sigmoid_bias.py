"""`sigmoid_bias`: experts are chosen by score plus a bias, weighted by score; the bias moves until loads are even.

Inputs: as in `topk.py`, and choice_bias [E] by expert id, which lies with the gate's parameters. Scores are
sigmoid(x w_gate); the K highest of score + bias are chosen, groups by the sum of their two best. Once per optimizer
step the bias rises by bias_rate where an expert had less than the mean of the step's choices, and falls where more.
The balance loss takes scores over their sum for probabilities.
Source: Wang et al., Auxiliary-Loss-Free Load Balancing (2024), algorithm 1; DeepSeek-V3, section 2.1.2.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import check_bounds
from moe_jax.moe.routers.contract import register
from moe_jax.moe.routers.scores import gate_logits, keep_within_capacity, within_groups
from moe_jax.moe.routers.topk import TopK
from moe_jax.moe.routing import Choice

_LEAST = 1e-20  # of a sum of scores that something is divided by


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidBias:
    """Options of the router `sigmoid_bias`.

    Attributes:
      bias_rate: by how much an expert's bias moves in one optimizer step.
    """

    bias_rate: float = 0.001

    def __post_init__(self):
        check_bounds(self, {"bias_rate": 0})


@register("sigmoid_bias")
class SigmoidBiasRouter(TopK):
    """Choose by biased sigmoid scores."""

    options: SigmoidBias = SigmoidBias()
    keeps = {"choice_bias": "E"}
    state = ("choice_bias",)

    def choose(self, x, params, inputs):
        config = self.config
        logits = gate_logits(x, params["w_gate"], config.router_dtype)
        noisy = self.with_noise(logits, x, params, inputs)
        scores = jax.nn.sigmoid(noisy)
        expert_ids = inputs.replay
        if expert_ids is None:
            plain, bias = lax.stop_gradient(scores), lax.stop_gradient(params["choice_bias"])
            biased = plain + bias.astype(scores.dtype)[None]
            if config.expert_groups:
                biased = jnp.where(within_groups(biased, config, 2), biased, -jnp.inf)
            expert_ids = lax.top_k(biased, config.top_k)[1]
        chosen = jnp.take_along_axis(scores, expert_ids, axis=-1)
        keep_mask = keep_within_capacity(expert_ids, chosen, config, inputs.real)
        weights = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + _LEAST) if config.renormalize else chosen
        choice = Choice(expert_ids=expert_ids, weights=config.routed_scale * weights, keep_mask=keep_mask)
        log_scores = jax.nn.log_sigmoid(noisy)
        log_probs = log_scores - jax.scipy.special.logsumexp(log_scores, axis=-1, keepdims=True)
        log_z = jax.scipy.special.logsumexp(logits, axis=-1)
        return choice, self.statistics(choice, jnp.exp(log_probs), log_probs, log_z, inputs.real)

    def next_state(self, state, counts):
        bias = state["choice_bias"]
        mean, rest = jnp.divmod(jnp.sum(counts, axis=-1, keepdims=True), counts.shape[-1])
        above, below = counts > mean, (counts < mean) | (counts == mean) & (rest > 0)  # exact for every int32
        step = jnp.asarray(self.options.bias_rate, bias.dtype)
        return {"choice_bias": bias + step * (below.astype(bias.dtype) - above.astype(bias.dtype))}
