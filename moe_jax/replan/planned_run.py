"""A run as the planner of one segment sees it: the segment's layers alone, with the roles of its experts.

Inputs: a run's config and mesh. Outputs: the config of a run whose layers are all those of the segment, and its roles.
Planners, their costs and the shapes that they ask for know nothing of other segments: each segment has its own. Host
side.
"""

from __future__ import annotations

import dataclasses

from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles
from moe_jax.models.segments import segments_of, with_experts
from moe_jax.placement import Placement


def segment_runs(config: RunConfig, roles: Roles) -> dict[str, tuple[RunConfig, Roles]]:
    """Return {segment: (config, roles)} of each segment with experts, first layers first."""
    return {
        segment.name: (dataclasses.replace(config, model=segment.config, moe=segment.moe), segment.roles(roles))
        for segment in with_experts(segments_of(config.model, config.moe))
    }


def planned_run(config: RunConfig, roles: Roles) -> tuple[RunConfig, Roles]:
    """Return (config, roles) of the only segment with experts; the same where all layers are alike.

    Raises:
      UserError: several segments with experts.
    """
    runs = segment_runs(config, roles)
    if len(runs) > 1:
        raise UserError(
            f"this is for models with one segment that has experts, but this one has {len(runs)} ({', '.join(runs)}); "
            "take a model whose MoE layers are alike"
        )
    (found,) = runs.values()
    return found


def initial_placement(config: RunConfig, roles: Roles) -> Placement:
    """Return even homes on the expert-parallel group of the run's only segment with experts, with its node boundary."""
    config, roles = planned_run(config, roles)
    devices = roles.size(roles.expert)
    return Placement.even(config.model.moe_layers, config.moe.num_experts, devices, roles.members_per_node)
