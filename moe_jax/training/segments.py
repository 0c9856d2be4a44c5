"""A run's model on its mesh, and its segments: runs of equal layers, each with experts and planner of its own.

Inputs: a run's config and mesh, which may be an abstract one. Outputs: descriptions of sizes and places; no arrays.
"""

from __future__ import annotations

import dataclasses

from moe_jax.config.run_config import RunConfig
from moe_jax.models import LanguageModel
from moe_jax.models.config import segments_of, with_experts
from moe_jax.models.counts import Sizes
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.placement import Placement

USUAL_VOCABULARY = 50304  # where neither the config nor a tokenizer says one yet: GPT-2's, a multiple of 128


def segment_runs(config: RunConfig, roles: Roles) -> dict[str, tuple[RunConfig, Roles]]:
    """Return {segment: (config, roles)} of each segment with experts, first layers first."""
    return {
        segment.name: (dataclasses.replace(config, model=segment.config, moe=segment.moe), segment.roles(roles))
        for segment in with_experts(segments_of(config.model, config.moe))
    }


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
