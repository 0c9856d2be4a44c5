"""What a run's buckets are, and what its stated loads fill of them.

Inputs: a RunConfig, its mesh, the shape of its plans. Outputs: `inspection.Buckets` of each segment of layers. The
loads are those that buckets are made for: even ones without a planner, else what the planner predicted. Sizes only: no
array is made and no device is needed. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

from moe_jax.cluster.costs import Buckets
from moe_jax.config.run_config import RunConfig
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.schedules import schedule_record
from moe_jax.moe.schedules.contract import layout_of
from moe_jax.parallel.bucket_rows import round_up
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.planning.sizes import overflow_chance
from moe_jax.training.plan_cost import segment_runs


def stated_buckets(config: RunConfig, roles: Roles, plans: dict[str, PlanShape] | None) -> tuple[Buckets, ...]:
    """Return the buckets of each segment whose rows travel.

    A device fills them from its own part of its MP group's tokens, or from all where its schedule gates the group;
    `parm` counts as s1.

    Args:
      config: with `ModelConfig.overlap` settled.
      plans: {segment: shape of its plans}, None without a planner.
    """
    train, found = config.train, []
    parts = 2 if config.model.overlap == "halves" else 1
    tokens = train.batch_size // train.grad_accum_steps // roles.size(roles.dense) * config.data.sequence_length
    for name, (own, own_roles) in segment_runs(config, roles).items():
        members, mp_size = own_roles.size(own_roles.expert), own_roles.size(own_roles.model)
        record = schedule_record(own.moe.schedule).on_mesh(mp_size, own_roles.size(own_roles.expert_shard))
        if members == 1 or not record.moves_tokens:
            continue
        plan = None if plans is None else plans[name]
        if plan is not None and plan.bucket_rows is not None and parts > 1:
            rows = plan.bucket_rows.each(lambda size: round_up(size / parts, 8))
            plan = dataclasses.replace(plan, bucket_rows=rows)
        sizes = layer_sizes(own.moe, own_roles, tokens // parts, plan)
        by_shape = layout_of(own_roles, record.bucket_rows(sizes, own_roles)).total
        sizes = sizes if record.gates_group else sizes.split(mp_size)
        overflow = 0.0  # the most that the chance of an exchange is to overflow
        if sizes.capacity is None and sizes.planned_rows is not None:  # planned: known where it was stated
            overflow = own.moe.overflow_chance or None
        elif sizes.capacity is None:
            choices, pairs = sizes.top_k * sizes.tokens, sizes.sources * members
            chance = overflow_chance([choices / members], choices, sizes.even_rows(members))
            overflow = min(1.0, pairs * chance)
        found.append(
            Buckets(
                segment=name,
                by_shape=by_shape,
                expected=min(sizes.top_k * sizes.tokens, by_shape),
                exchanges=own.model.moe_layers * parts * train.grad_accum_steps,
                overflow=overflow,
            )
        )
    return tuple(found)
