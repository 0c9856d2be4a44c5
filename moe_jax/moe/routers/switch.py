"""`switch`: each token takes its most probable expert, weighted by that probability.

As `topk.py`; the weight is never divided by itself (`MoEConfig.renormalize` is not read), so the gate learns from the
model's loss. With `capacity_factor` an expert takes its first tokens, as published; None is dropless.
Source: Switch Transformers (Fedus et al. 2022), section 2.1 and 2.2.
"""

from __future__ import annotations

from moe_jax.moe.routers.contract import register
from moe_jax.moe.routers.topk import TopK


@register("switch")
class Switch(TopK):
    """One expert per token, with its probability for a weight."""

    ignores = ("routed_scale", "renormalize")
    takes = (1, "takes one expert per token")

    def weigh(self, weights):
        return weights
