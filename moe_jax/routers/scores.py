"""Scores of all experts for every token, and random numbers that depend on the token alone.

Inputs: tokens x [t, M] and a gate weight [M, E], or a key and the tokens' global indices. Outputs: float [t, E] or [t].
Letters: docs/notation.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_DRAWS = 0xFFFFFFFF  # folded into a key for draws beside the noise; no token has this index


def gate_logits(x, w_gate, router_dtype: str = "auto"):
    """Return the logits [t, E] of tokens [t, M], computed as `MoEConfig.router_dtype` says, in at least float32.

    'auto' computes in promote(x.dtype, float32): a float64 run stays float64.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32) if router_dtype == "auto" else jnp.dtype(router_dtype)
    logits = jnp.dot(x.astype(dtype), w_gate.astype(dtype), precision=lax.Precision.HIGHEST)
    return logits.astype(jnp.promote_types(dtype, jnp.float32))


def gate_noise(key, token_ids, num_experts, dtype):
    """Return standard normal noise [t, E] that depends on `key` and each token's global index alone."""
    keys = jax.vmap(lambda token: jax.random.fold_in(key, token))(token_ids)
    return jax.vmap(lambda k: jax.random.normal(k, (num_experts,), dtype))(keys)


def token_draws(key, token_ids, dtype):
    """Return one number of [0, 1) per token [t]; it depends on `key` and the token's index alone, and on no noise."""
    draws = jax.random.fold_in(key, _DRAWS)
    return jax.vmap(lambda token: jax.random.uniform(jax.random.fold_in(draws, token), (), dtype))(token_ids)
