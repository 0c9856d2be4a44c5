"""The planners of a run: one session for each segment with experts, with its prices and the rule for its buckets.

Inputs: a run's config and mesh. Outputs: sessions. Host side only. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from moe_jax.cluster import cluster_named
from moe_jax.cluster.layer_seconds import ScheduleLine
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.kernels.float8 import COMPUTE
from moe_jax.models.model_group import rows_of
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.choosers import schedule_lines
from moe_jax.moe.schedule import CHOOSERS, find_schedule
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning.buckets import Buckets
from moe_jax.planning.cost import Cost
from moe_jax.replan.auto import plan_session
from moe_jax.replan.costs import settle_memory
from moe_jax.replan.segments import initial_placement, segment_runs
from moe_jax.replan.session import PlanSession


def build_sessions(config: RunConfig, roles: Roles) -> dict[str, PlanSession]:
    """Return {segment: session of its planner}, first layers first, of a run that has one.

    Raises:
      UserError: a planner that this mesh, schedule or cluster file cannot serve: experts on one device, transfers by
        node with one node, one device on a node or nodes of unequal size, slots without a bound after the gate, more
        replica slots than fit in memory, or a figure that a price needs.
    """
    runs = segment_runs(config, roles)
    _check(config, runs)
    config, costs = settle_memory(config, roles)
    sessions = {name: _build_session(*run, costs[name]) for name, run in segment_runs(config, roles).items()}
    for own in sessions.values():
        # plan once, for even loads: a figure that a price needs and the cluster lacks is named before a step compiles
        own.first_shape  # noqa: B018
        own.trial.propose(np.ones((own.start.layers, own.start.devices, own.start.experts)), own.start, own.cost)
    return sessions


def _check(config: RunConfig, runs: dict[str, tuple[RunConfig, Roles]]) -> None:
    planner, devices = config.planner, max(roles.size(roles.expert) for _, roles in runs.values())
    if not find_schedule(config.moe.schedule).moves_tokens or devices == 1:
        raise UserError(
            f"PlannerConfig.name ({planner.name!r}) needs experts spread over devices, but MoEConfig.schedule is "
            f"{config.moe.schedule!r} and the expert axis has {devices}; use another schedule and "
            "MeshConfig.expert > 1, or set PlannerConfig.name = 'none'"
        )
    if planner.transfer == "by_node":  # the smallest transfer is built for its checks
        for _, roles in runs.values():
            members = roles.size(roles.expert)
            inside = max(1, roles.config.devices_per_node // roles.config.expert_shard)
            TransferShape(devices=members, devices_per_node=min(inside, members), offers=1, slots=1, by_node=True)
    if planner.when == "after_gate" and not planner.bounded:
        raise UserError(
            f"PlannerConfig.bounded (False) with when = 'after_gate': a compiled step has {planner.replica_slots} "
            "replica slots; set bounded = True and replica_slots to the most that you want"
        )


def _build_session(config: RunConfig, roles: Roles, cost: Cost) -> PlanSession:
    """Return the session of a segment: its config, roles and cost, with memory settled."""
    if config.moe.schedule == "auto":
        cost = dataclasses.replace(cost, schedules=_lines(config, roles))
    groups, start = roles.size(roles.data), initial_placement(config, roles)
    exchanges, buckets = config.train.grad_accum_steps * groups, _buckets(config, roles)
    return plan_session(config.planner, start, cost, exchanges, buckets=buckets, groups=groups)


def _tokens(config: RunConfig, roles: Roles) -> int:
    """Return the tokens of an MP group in a microbatch."""
    return rows_of(config.model, roles, config.train.microbatch_size) * config.data.sequence_length


def _lines(config: RunConfig, roles: Roles) -> tuple[ScheduleLine, ...]:
    """Return what layers wait for under each schedule that this mesh, model and dtype allow."""
    model, moe = config.model, config.moe
    item = np.dtype(model.dtype).itemsize
    sizes = layer_sizes(moe, roles, _tokens(config, roles), None, model.model_dim, item)
    sizes = dataclasses.replace(sizes, split_tokens=model.sequence_parallel)
    cluster = cluster_named(config.planner.cluster, roles.device_kind)
    cluster = cluster.on_mesh(roles.num_devices, roles.config.devices_per_node)
    one_piece = model.prefetch != "none" or model.overlap == "halves" or moe.dispatch_dtype != COMPUTE
    return schedule_lines(roles, sizes, cluster, one_piece)


def _buckets(config: RunConfig, roles: Roles) -> Buckets | None:
    """Return the rule for a segment's buckets, None where capacities rule."""
    moe, members, mp_size = config.moe, roles.size(roles.expert), roles.size(roles.model)
    if not moe.dropless:
        return None
    sizes, data_groups = layer_sizes(moe, roles, _tokens(config, roles)), roles.size(roles.data)
    named = CHOOSERS[moe.schedule].among if moe.schedule in CHOOSERS else (moe.schedule,)
    cuts = any(find_schedule(name).cuts_buckets for name in named)
    exchanges = config.train.grad_accum_steps * data_groups
    return Buckets(
        sizes=sizes,
        even=dataclasses.replace(sizes, groups=moe.num_experts).even_rows(members),  # the worst case bounds them later
        devices=members,
        devices_per_node=roles.members_per_node,
        chance=moe.overflow_chance / data_groups,
        multiple=math.lcm(8, mp_size),
        summed=exchanges * roles.size(roles.expert_shard) / mp_size,
        parts=2 if config.model.overlap == "halves" else 1,
        one_length=cuts and mp_size > roles.size(roles.expert_shard),
    )
