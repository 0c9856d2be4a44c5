"""A student beside a teacher by whole log probabilities on one device, and the comparison of gradients with it."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.models.reference import reference_logits


def taught_loss(params, frozen, batch, student, teacher, alpha):
    """Return (loss, KL) of parameters {'dense', 'experts'} of two models, each given as (ModelConfig, MoEConfig)."""
    logits, gate_loss, _ = reference_logits(params, batch.inputs, *student)
    taught, _, _ = reference_logits(frozen, batch.inputs, *teacher)
    log_probs, taught = jax.nn.log_softmax(logits, -1), jax.nn.log_softmax(taught, -1)
    kl = jnp.sum(jnp.sum(jnp.exp(taught) * (taught - log_probs), -1) * batch.weights) / jnp.sum(batch.weights)
    picked = jnp.take_along_axis(log_probs, batch.targets[..., None], -1)[..., 0]
    return gate_loss - jnp.sum(picked * batch.weights) / jnp.sum(batch.weights) + alpha * kl, kl


def assert_close(got, want, tolerance=1e-10):
    """Compare trees to a tolerance of each leaf's largest entry."""
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(a)) + 1e-30, jax.tree_util.keystr(path)
