"""A student beside a teacher by whole log probabilities on one device."""

import jax
import jax.numpy as jnp

from moe_jax.models.reference import reference_logits


def taught_loss(params, frozen, batch, student, teacher, alpha):
    """Return (loss, KL) of parameters {'dense', 'experts'} of two models, each given as (ModelConfig, MoEConfig)."""
    logits, gate_loss, _ = reference_logits(params, batch.inputs, *student)
    taught, _, _ = reference_logits(frozen, batch.inputs, *teacher)
    log_probs, taught = jax.nn.log_softmax(logits, -1), jax.nn.log_softmax(taught, -1)
    kl = jnp.sum(jnp.sum(jnp.exp(taught) * (taught - log_probs), -1) * batch.weights) / jnp.sum(batch.weights)
    picked = jnp.take_along_axis(log_probs, batch.targets[..., None], -1)[..., 0]
    return gate_loss - jnp.sum(picked * batch.weights) / jnp.sum(batch.weights) + alpha * kl, kl
