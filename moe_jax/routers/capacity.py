"""Which choices an expert's capacity admits.

Inputs: choices [t, K] of one drop group. Outputs: bool [t, K]. Letters: docs/notation.md.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from moe_jax.dispatch.route import rank_within
from moe_jax.routers.options import RouterOptions


def keep_within_capacity(expert_ids, probs, config: RouterOptions):
    """Return bool [t, K]: the choices that their expert's capacity admits.

    By position, an expert takes its first tokens; by probability its most probable ones, ties to the earlier token.

    Args:
      expert_ids: int32 [t, K].
      probs: [t, K] softmax probabilities of the choices, before any renormalisation.
      config: capacity_factor, min_capacity and drop are read.
    """
    t, k = expert_ids.shape
    if config.dropless:
        return jnp.ones((t, k), bool)
    order = None
    if config.drop == "probability":
        order = jnp.argsort(-lax.stop_gradient(probs).reshape(-1), stable=True).astype(jnp.int32)
    rank = rank_within(expert_ids.reshape(-1), order)
    return (rank < config.capacity(t)).reshape(t, k)
