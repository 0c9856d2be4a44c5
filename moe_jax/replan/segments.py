"""A run's model on its mesh, and its segments: runs of equal layers, each with experts and planner of its own.

Inputs: a run's config and mesh, which may be an abstract one. Outputs: descriptions of sizes and places; no arrays.
"""

from __future__ import annotations

import dataclasses

from moe_jax.cluster.costs import Buckets
from moe_jax.config.run_config import RunConfig
from moe_jax.models import LanguageModel
from moe_jax.models.config import segments_of, with_experts
from moe_jax.models.counts import Sizes
from moe_jax.models.model_group import rows_of
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.schedule import schedule_on
from moe_jax.parallel.bucket_rows import round_up
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.buckets import overflow_chance
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape

USUAL_VOCABULARY = 50304  # where neither the config nor a tokenizer says one yet: GPT-2's, a multiple of 128


def segment_runs(config: RunConfig, roles: Roles) -> dict[str, tuple[RunConfig, Roles]]:
    """Return {segment: (config, roles)} of each segment with experts, first layers first."""
    return {
        segment.name: (dataclasses.replace(config, model=segment.config, moe=segment.moe), segment.roles(roles))
        for segment in with_experts(segments_of(config.model, config.moe))
    }


def group_tokens(config: RunConfig, roles: Roles) -> int:
    """Return the tokens of an MP group in a microbatch."""
    return rows_of(config.model, roles, config.train.microbatch_size) * config.data.sequence_length


def stated_buckets(config: RunConfig, roles: Roles, plans: dict[str, PlanShape] | None) -> tuple[Buckets, ...]:
    """Return the buckets of each segment whose rows travel, and what the stated loads fill of them.

    The loads are those that buckets are made for: even ones without a planner, else what the planner predicted. A
    device fills its buckets from its own part of its MP group's tokens, or from all where its schedule gates the group;
    `parm` counts as s1. Sizes only: no array is made and no device is needed.

    Args:
      plans: {segment: shape of its plans}, None without a planner.
    """
    train, found = config.train, []
    parts = 2 if config.model.overlap == "halves" else 1
    tokens = group_tokens(config, roles)
    for name, (own, own_roles) in segment_runs(config, roles).items():
        members, mp_size = own_roles.size(own_roles.expert), own_roles.size(own_roles.model)
        schedule = schedule_on(own.moe.schedule, mp_size, own_roles.size(own_roles.expert_shard))
        if members == 1 or not schedule.moves_tokens:
            continue
        plan = None if plans is None else plans[name]
        if plan is not None and plan.bucket_rows is not None and parts > 1:
            rows = plan.bucket_rows.each(lambda size: round_up(size / parts, 8))
            plan = dataclasses.replace(plan, bucket_rows=rows)
        built = schedule(own_roles, layer_sizes(own.moe, own_roles, tokens // parts, plan))
        sizes = built.sizes
        for what, layout, mean in built.buckets():
            overflow = 0.0  # the most that the chance of an exchange is to overflow
            if sizes.capacity is None and sizes.planned_rows is not None:  # planned: known where it was stated
                overflow = own.moe.overflow_chance or None
            elif sizes.capacity is None:
                chance = overflow_chance([mean], sizes.config.top_k * sizes.tokens, layout.rows.far)
                overflow = min(1.0, sizes.sources * members * chance)
            found.append(
                Buckets(
                    segment=f"{name}, {what}" if what else name,
                    by_shape=layout.total,
                    expected=min(round(members * mean), layout.total),
                    exchanges=own.model.moe_layers * parts * train.grad_accum_steps,
                    overflow=overflow,
                )
            )
    return tuple(found)


def initial_placement(config: RunConfig, roles: Roles) -> Placement:
    """Return even homes on a segment's expert-parallel group, with its node boundary; config, roles: `segment_runs`."""
    devices = roles.size(roles.expert)
    return Placement.even(config.model.moe_layers, config.moe.num_experts, devices, roles.members_per_node)


def build_model(config: RunConfig, roles: Roles, vocab_size: int) -> LanguageModel:
    """Return the model of a run on its mesh; vocab_size: V."""
    stages = {"zero_stage": config.train.zero_stage, "expert_zero_stage": config.train.expert_zero_stage}
    stages["padded"] = config.data.kind == "chat"  # windows of whole conversations are filled up
    return LanguageModel(
        config=config.model, moe=config.moe, vocab_size=vocab_size, roles=roles, lora=config.lora, **stages
    )


def sizes_of(config: RunConfig, roles: Roles, vocab_size: int = 0) -> Sizes:
    """Return what `device_bytes` takes; vocab_size: V, 0 where only the config may say it."""
    train = config.train
    return Sizes(
        model=build_model(config, roles, vocab_size or config.model.vocab_size or USUAL_VOCABULARY),
        length=config.data.sequence_length,
        batch_size=train.batch_size,
        grad_accum_steps=train.grad_accum_steps,
        ema=train.ema_decay > 0,
    )
