"""AdamW with warm-up, cosine and clipping by the global norm, from optax. TrainConfig in, transformation out.

Gradients are global arrays, so the norm is the norm of the whole model however it is laid out.
"""

from __future__ import annotations

import jax
import optax

from moe_jax.training.config import TrainConfig


def build_schedule(config: TrainConfig):
    """Return the learning rate as a function of the number of finished steps."""
    warmup = min(config.warmup_steps, max(config.steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(warmup, 1) if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.learning_rate * config.final_learning_rate,
    )


def decays(path: tuple, leaf) -> bool:
    """Say whether weight decay applies to the leaf at this tree path: not to norms, biases and gates."""
    names = [entry.key for entry in path]
    if names[-1].endswith("bias") or any("norm" in name for name in names):
        return False
    return not ("gate" in names and names[-1] == "w_gate")


def build_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return the optimizer of a run."""
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(
        clip,
        optax.adamw(
            build_schedule(config),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(decays, params),
        ),
    )
