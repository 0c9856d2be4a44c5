"""`ModelConfig.overlap` = 'halves', priced: a layer of a run in one piece and in two halves, and what rules halves out.

They bring nothing inside one node, whose exchanges the compiler hides by itself, and tokens that are not gated each by
itself would compete with others for a place.
"""

from __future__ import annotations

from moe_jax.cluster import cluster_of
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import Target
from moe_jax.config.run_config import RunConfig
from moe_jax.moe.routers import build_router
from moe_jax.moe.schedule import find_schedule
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.block_schedule import Prefetch, stage_seconds
from moe_jax.replan.costs import base_cost, layer_times
from moe_jax.replan.segments import segment_runs

MORE_KERNELS = 75  # of one layer in two halves, both ways: (2,061 - 1,164) / 12 on GPT-MoE-S, compiled for H200


def why_not_halves(config: RunConfig, roles: Roles) -> str:
    """Return why a run is better left in one piece whatever the prices, '' where nothing speaks against halves."""
    train = config.train
    rows = -(-train.microbatch_size // roles.size(roles.dense))
    if roles.members_per_node == roles.size(roles.expert):
        return "no exchange leaves a node"
    if rows % 2:
        return f"a device has {rows} sequence(s), an odd number"
    if config.distillation.teacher:
        return "the run has a teacher"
    for own, _ in segment_runs(config, roles).values():
        router = build_router(own.moe)
        if not find_schedule(own.moe.schedule).one_piece:
            return f"MoEConfig.schedule is {own.moe.schedule!r}"
        if not own.moe.dropless or not router.replays:
            return "tokens compete for places among those gated together"
        if own.moe.record_choices:
            return "choices are recorded"
    return ""


def compare_halves(config: RunConfig, roles: Roles, target: Target) -> tuple[float, float]:
    """Return the modelled seconds of one layer of a segment under even loads, forward and backward: in one piece, and
    in two halves with their launches, as `timeline.Constants` has them. config, roles: `segment_runs`.
    """
    prices = Prices(target)
    times = layer_times(config, roles, base_cost(config, roles, cluster_of(prices)))
    launches, recompute = MORE_KERNELS * prices.launch, config.model.recomputes
    in_one_piece, in_halves = (
        float(stage_seconds(Prefetch(halves=halves), times, recompute)) for halves in (False, True)
    )
    return in_one_piece, in_halves + launches
