"""`forced_balance`: experts in turn, for measuring a layer without skew. Not for training a model.

As `topk.py`, but token i takes the experts i K, i K + 1, .. modulo E, whatever its scores are; i is its global index.
So any run of consecutive tokens loads the experts evenly, to one choice. Weights are the softmax of its scores at the
experts that were given: a step costs what it would. Source: torchtitan issue 1670.
"""

from __future__ import annotations

import jax.numpy as jnp

from moe_jax.moe.routers.contract import register
from moe_jax.moe.routers.topk import TopK


@register("forced_balance")
class ForcedBalance(TopK):
    """Hand out experts in turn."""

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
