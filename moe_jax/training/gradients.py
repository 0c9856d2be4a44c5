"""The gradient of one optimizer step, in one microbatch or summed over several.

Inputs: parameters, one step's batch [Nm, B / Nm, Sq], the plan's tables, a key. Outputs: the gradient of the step's
loss, laid out as the parameters are, and `StepStats` [Nm, ...]. Traced, and taken outside the model's `shard_map`.

Of one microbatch the model sums each layer's gradient over the data-parallel devices while the layers before it run
backward; under ZeRO-1 those of embedding and head are reduce-scattered at the end. Of several, each device sums those
of its own sequences first, and the devices are summed once a step: with Nm microbatches an Nm-th of the bytes. That is
for the parameters that every device holds; ZeRO-3's parts and experts that several devices hold are summed in every
microbatch.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.config.train_config import TrainConfig
from moe_jax.models import LanguageModel, Layout, make_loss
from moe_jax.models.distillation import Teacher
from moe_jax.models.own_gradients import kept_apart, summed, with_own_leaves
from moe_jax.placement import PlanShape


def make_gradients(
    model: LanguageModel, layout: Layout, config: TrainConfig, length: int, plan: PlanShape | None = None,
    teacher: Teacher | None = None,
) -> Callable:  # fmt: skip
    """Return gradients(params, batch, tables, key, *teacher_params) -> (gradients, StepStats [Nm, ...]).

    Raises:
      UserError: as `make_loss` does.
    """
    microbatches = config.grad_accum_steps
    rows = config.batch_size // microbatches
    roles = model.roles
    apart = kept_apart(microbatches, model.zero_stage, roles.size(roles.dense))
    loss = make_loss(model, layout, rows, length, microbatches=microbatches, plan=plan, teacher=teacher, apart=apart)
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def of_one(params, batch, tables, key, normalizer, *frozen):
        microbatch = jax.tree.map(lambda array: array[0], batch)
        (_, stats), grads = value_and_grad(params, microbatch, tables, key, jnp.int32(0), normalizer, *frozen)
        return grads, jax.tree.map(lambda leaf: leaf[None], stats)

    def of_several(params, batch, tables, key, normalizer, *frozen):
        def body(carry, inputs):
            (total, counted), (microbatch, index) = carry, inputs
            microbatch = dataclasses.replace(microbatch, counted=counted)
            (_, stats), grads = value_and_grad(params, microbatch, tables, key, index * rows, normalizer, *frozen)
            counted = None if counted is None else counted + jnp.sum(stats.loads, axis=1)
            return (jax.tree.map(jnp.add, total, grads), counted), stats

        layers, experts = model.config.moe_layers, max(part.moe.num_experts for part in model.expert_segments)
        counted = jnp.zeros((layers, experts), jnp.int32) if model.moe.balance_over == "step" else None
        start = jax.tree.map(jnp.zeros_like, params), counted
        (grads, _), stats = lax.scan(body, start, (batch, jnp.arange(microbatches, dtype=jnp.int32)))
        return grads, stats

    of_all = of_one if microbatches == 1 else of_several

    def gradients(params, batch, tables, key, *frozen):
        normalizer = jnp.maximum(jnp.sum(batch.weights), 1)
        if apart == "none":
            return of_all(params, batch, tables, key, normalizer, *frozen)
        own = with_own_leaves(params, layout, roles, apart)
        grads, stats = of_all(own, batch, tables, key, normalizer, *frozen)
        return summed(grads, layout, roles, apart), stats

    return gradients
