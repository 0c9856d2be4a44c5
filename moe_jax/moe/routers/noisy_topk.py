"""`noisy_topk`: top-K of logits with noise whose scale is learned, per expert and token.

As `topk.py`, and w_noise [M, E], which starts at zero: a scale of softplus(0) = 0.69. The noise of a token is keyed by
its global index, so it does not depend on the layout; in evaluation there is none. Source: Shazeer et al.,
Outrageously Large Neural Networks (2017), equations 3 to 5.
"""

from __future__ import annotations

import jax

from moe_jax.errors import UserError
from moe_jax.moe.routers.contract import register
from moe_jax.moe.routers.scores import gate_logits, gate_noise
from moe_jax.moe.routers.topk import TopK


@register("noisy_topk")
class NoisyTopK(TopK):
    """H = x w_gate + softplus(x w_noise) n with n standard normal; the K best of softmax(H)."""

    draws = True

    @classmethod
    def check(cls, config):
        super().check(config)
        if config.gate_noise:
            raise UserError(
                f"MoEConfig.gate_noise ({config.gate_noise}) must be 0 with MoEConfig.router = 'noisy_topk', which "
                "learns the scale of its noise"
            )

    def leaves(self, model_dim):
        return {"w_noise": (model_dim, self.config.num_experts)}

    def with_noise(self, logits, x, params, inputs):
        if inputs.noise_key is None:
            return logits
        noise = gate_noise(inputs.noise_key, inputs.token_ids, self.config.num_experts, logits.dtype)
        return logits + jax.nn.softplus(gate_logits(x, params["w_noise"], self.config.router_dtype)) * noise
