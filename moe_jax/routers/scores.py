"""Scores of all experts for every token, and random numbers that depend on the token alone.

Inputs: tokens x [t, M] and a gate weight [M, E], or a key and the tokens' global indices. Outputs: float [t, E].
Letters: docs/notation.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def gate_logits(x, w_gate):
    """Return the logits [t, E] of tokens [t, M], in promote(x.dtype, float32): a float64 run stays float64."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.dot(x.astype(dtype), w_gate.astype(dtype), precision=lax.Precision.HIGHEST)


def gate_noise(key, token_ids, num_experts, dtype):
    """Return standard normal noise [t, E] that depends on `key` and each token's global index alone."""
    keys = jax.vmap(lambda token: jax.random.fold_in(key, token))(token_ids)
    return jax.vmap(lambda k: jax.random.normal(k, (num_experts,), dtype))(keys)
