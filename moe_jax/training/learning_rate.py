"""The learning rate as a function of finished updates: warm-up, and what follows it.

Inputs: a TrainConfig. Outputs: an optax schedule.
Names: steps = train.steps, warmup = warm-up steps (at most steps - 1), decay = decay steps of `wsd`.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax

from moe_jax.config.train_config import TrainConfig


def build_learning_rate(config: TrainConfig) -> optax.Schedule:
    """Return the learning rate of update n (from 0).

    It rises linearly from peak / warmup at update 0 to the peak at update `warmup`. Then 'constant' stays at the peak;
    the others fall to final_learning_rate x peak at update `steps`: 'cosine' by half a cosine, 'linear' linearly. 'wsd'
    (warm-up, stable, decay) stays at the peak until update steps - decay and then falls linearly, or by '1-sqrt', where
    the share of the fall that is done after k of `decay` updates is sqrt(k / decay).

    Source: WSD from Hu et al., "MiniCPM" (2024), section 4; 1-sqrt from Haegele et al., "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations" (2024).
    """
    warmup = min(config.warmup_steps, max(config.steps - 1, 0))
    steps = max(config.steps, warmup + 1)
    peak, last = config.learning_rate, config.learning_rate * config.final_learning_rate
    if config.learning_rate_schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=peak / max(warmup, 1) if warmup else peak,
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=steps,
            end_value=last,
        )
    if config.learning_rate_schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.learning_rate_schedule == "linear":
        after = optax.linear_schedule(peak, last, steps - warmup)
    else:
        decay = config.decays_over
        fall = optax.linear_schedule(peak, last, decay)
        if config.decay_shape == "1-sqrt":
            fall = _one_minus_sqrt(peak, last, decay)
        after = optax.join_schedules([optax.constant_schedule(peak), fall], [steps - warmup - decay])
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup), after], [warmup])


def _one_minus_sqrt(first: float, last: float, steps: int) -> optax.Schedule:
    """Return a schedule from first to last by the share sqrt(k / steps); optax has none of this shape."""
    return lambda count: first + (last - first) * jnp.sqrt(jnp.clip(count / steps, 0, 1))
