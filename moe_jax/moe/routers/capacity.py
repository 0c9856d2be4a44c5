"""Which choices an expert's capacity admits.

Inputs: choices [t, K] of one drop group. Outputs: bool [t, K]. Letters: docs/notation.md.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from moe_jax.moe.routers.options import RouterOptions
from moe_jax.moe.routing import rank_within


def keep_within_capacity(expert_ids, probs, config: RouterOptions):
    """Return bool [t, K]: the choices that their expert's capacity admits.

    By position, an expert takes its first tokens; by probability its most probable ones, ties to the lowest global
    token id, which is the order of a drop group's tokens on every mesh. Tokens that tie are computed in different
    orders, and the last bits in which they then differ depend on the mesh: three quarters of the bits decide.

    Args:
      expert_ids: int32 [t, K].
      probs: [t, K] softmax probabilities of the choices, before any renormalisation, or their scores.
      config: capacity_factor, min_capacity and drop are read.
    """
    t, k = expert_ids.shape
    if config.dropless:
        return jnp.ones((t, k), bool)
    order = None
    if config.drop == "probability":
        bits = jnp.finfo(probs.dtype)
        certain = lax.reduce_precision(lax.stop_gradient(probs), bits.nexp, 3 * bits.nmant // 4)
        order = jnp.argsort(-certain.reshape(-1), stable=True).astype(jnp.int32)
    rank = rank_within(expert_ids.reshape(-1), order)
    return (rank < config.capacity(t)).reshape(t, k)
