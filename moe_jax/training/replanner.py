"""A run's planners, one for each segment, and the shapes that the run compiles for their plans. Host side only.

Inputs: a run's config and mesh, placements, predicted loads. Outputs: shapes: the first one, of even homes without
replicas, and larger ones for placements that do not fit. Letters: docs/notation.md.
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
from moe_jax.moe.after_gate_rules import RULES
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.choosers import schedule_lines
from moe_jax.moe.schedule import CHOOSERS, LayerSizes, find_schedule
from moe_jax.parallel.bucket_rows import BucketRows, round_up
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.sparse_all_gather import PARTS
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning import routing
from moe_jax.planning.auto import plan_session
from moe_jax.planning.balancer import build_planner, grown, with_late
from moe_jax.planning.block_schedule import Times, shares
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement, most_homes
from moe_jax.planning.plan_shape import PlanShape, build_shape, fits, for_program
from moe_jax.planning.sizes import BUCKET_LIMIT, expected_rows, pairs_by_kind
from moe_jax.training.plan_cost import settle_memory
from moe_jax.training.segments import initial_placement, segment_runs


def split_shares(config: RunConfig, cost: Cost, transfer: TransferShape) -> dict[str, float]:
    """Return {'trans_share', 'agg_share'} for a `PlanShape`, in eighths; {} where the schedule splits nothing."""
    model = config.model
    if model.prefetch != "pro_prophet" or model.prefetch_case != "split":
        return {}
    seconds = cost.shape_seconds(transfer)
    times = Times(attention=cost.attention_seconds, experts=0.0, trans=seconds, agg=seconds)
    cut = (round(share * PARTS) / PARTS for share in shares(times, model.refetch_replicas))
    return dict(zip(("trans_share", "agg_share"), cut, strict=True))


FEWEST = 0.25  # rows of a planned bucket over the mean: fewer would make an overflow, where it comes, take many passes
HEADROOM = 1.25  # of a new bucket over the predicted rows, so that slow growth needs few executables
TOO_OFTEN = 10.0  # times MoEConfig.overflow_chance: buckets grow when they overflow more often, for the same reason


class Replanner:
    """The planner of one segment of a run, and the shapes that the run compiles for what it proposes."""

    def __init__(self, config: RunConfig, roles: Roles, cost: Cost):
        """Take a segment's config and roles (`segment_runs`), and its cost; memory is settled (`settle_memory`)."""
        self.config, self.roles = config, roles
        self.start = initial_placement(config, roles)  # the even homes that the run starts with
        self.devices = roles.size(roles.expert)  # D, of one expert-parallel group
        if config.moe.schedule == "auto":
            cost = dataclasses.replace(cost, schedules=self._lines())
        self.plans = plan_session(
            config.planner, self.start, cost, config.train.grad_accum_steps * roles.size(roles.data)
        )
        self.uncounted = build_planner(config.planner)  # for what is no decision: its counters are read by nobody

    def _lines(self) -> tuple[ScheduleLine, ...]:
        """Return what layers wait for under each schedule that this mesh, model and dtype allow."""
        model, roles, moe = self.config.model, self.roles, self.config.moe
        item = np.dtype(model.dtype).itemsize
        sizes = layer_sizes(moe, roles, self._tokens(), None, model.model_dim, item)
        sizes = dataclasses.replace(sizes, split_tokens=model.sequence_parallel)
        cluster = cluster_named(self.config.planner.cluster, roles.device_kind)
        cluster = cluster.on_mesh(roles.num_devices, roles.config.devices_per_node)
        one_piece = model.prefetch != "none" or model.overlap == "halves" or moe.dispatch_dtype != COMPUTE
        return schedule_lines(roles, sizes, cluster, one_piece)

    def first_shape(self) -> PlanShape:
        """Return what the first step is compiled for: even homes, and slots for what is decided after the gate."""
        return self.with_rule(build_shape(self.start))

    def with_rule(self, shape: PlanShape) -> PlanShape:
        """Return the shape with what is decided after the gate, and the sizes of that; without any where nothing is."""
        if not self.plans.config.decides_late:
            return dataclasses.replace(shape, late=None, after_gate=None)
        shape = with_late(self.plans.planner, shape, self.plans.cost)
        cost = dataclasses.replace(self.plans.cost, late=shape.late)
        declared = self.plans.planner.late_rule(shape, cost, self.roles.size(self.roles.data))
        rule = None if declared is None else RULES[declared[0]](**declared[1])
        return dataclasses.replace(shape, after_gate=rule)

    def refined(self, shape: PlanShape, placement: Placement, loads: np.ndarray, counted: bool = True) -> Placement:
        """Return what a step makes of a placement for its loads [L, S, E]; after the gate, of the mean microbatch.

        Args:
          counted: whether the step did so; else a prediction, which leaves the planner's counters as they are.
        """
        if shape.after_gate is None:
            return placement
        planner = self.plans.planner if counted else self.uncounted
        cost = dataclasses.replace(self.plans.cost, late=shape.late)
        return planner.refine(loads / self.plans.exchanges_per_step, placement, cost)

    def predicted_rows(self, shape: PlanShape, placement: Placement, more_often: float = 1.0) -> BucketRows | None:
        """Return the rows that buckets need by prediction; None where nothing is predicted or capacities rule.

        A step's loads are sums over microbatches and data-parallel groups, and over the N_ESP devices of a member; a
        bucket is of one microbatch's tokens of one MP group, which are those of N_MP devices.

        Args:
          more_often: with MoEConfig.overflow_chance, how many times as often as that buckets may overflow.
        """
        plans = self.plans
        if not plans.predictor.seen or not self.config.moe.dropless:
            return None
        loads = np.rint(plans.predictor.predict()).astype(np.int64)
        refined = self.refined(shape, placement, loads, counted=False)
        error = min(1.0, float(np.max(plans.predictor.error(), initial=0.0)))
        step = self.roles.size(self.roles.model)
        groups = plans.exchanges_per_step * self.roles.size(self.roles.expert_shard) / step
        sizes = self.sizes(shape)
        if self.config.moe.overflow_chance:
            # Each kind of bucket has a third of the chance; data-parallel groups draw for themselves. Where a
            # microbatch travels in two halves, buckets are twice as long as those of a half.
            chance = more_often * self.config.moe.overflow_chance * len(loads) / 3 / self.roles.size(self.roles.data)
            pairs = routing.pair_loads(refined, loads)
            parts, choices = 2 if self.config.model.overlap == "halves" else 1, sizes.config.top_k * sizes.tokens
            rows = {}
            for kind, own in pairs_by_kind(pairs * ((1 + error) / groups), self.start.devices_per_node).items():
                needed = expected_rows(own / parts, choices // parts, chance, math.lcm(8, step)) if own.size else 0
                rows[kind] = parts * needed
            rows = BucketRows(**rows)
        else:
            rows = routing.fullest(refined, loads).each(
                lambda pair: round_up(pair / groups * (1 + error), math.lcm(8, step))
            )
        fewest = round_up(FEWEST * sizes.config.top_k * sizes.tokens / self.devices, math.lcm(8, step))
        return rows.each(lambda size: max(size, fewest)).at_most(self._most_rows(shape))

    def _most_rows(self, shape: PlanShape) -> BucketRows:
        """Return the rows that planned buckets may have: the worst case, or what `BUCKET_LIMIT` allows.

        Never fewer than without a plan. The limit is not for the own bucket: there is one of it, and it does not
        travel; except where the schedule gives other buckets its length.
        """
        sizes = self.sizes(dataclasses.replace(shape, bucket_rows=None))
        most = math.ceil(BUCKET_LIMIT * (sizes.config.top_k * sizes.tokens / self.devices))
        most, worst = min(max(most, sizes.even_rows(self.devices)), sizes.worst_rows()), sizes.worst_rows()
        roles = self.roles
        several = roles.size(roles.model) > roles.size(roles.expert_shard)  # members of an MP group
        name = self.config.moe.schedule
        named = CHOOSERS[name].among if name in CHOOSERS else (name,)
        cut_over_members = several and any(find_schedule(other).cuts_buckets for other in named)
        return BucketRows(own=most if cut_over_members else worst, node=most, far=most)

    def _tokens(self) -> int:
        """Return the tokens of an MP group in a microbatch."""
        config = self.config
        return rows_of(config.model, self.roles, config.train.microbatch_size) * config.data.sequence_length

    def sizes(self, shape: PlanShape) -> LayerSizes:
        return layer_sizes(self.config.moe, self.roles, self._tokens(), shape)

    def grow(self, shape: PlanShape, placement: Placement) -> PlanShape:
        """Return a shape that the placement fits and plans like it, with buckets at least as large as predicted."""
        shape = for_program(shape, placement)
        if is_idle(shape, placement) or not fits(shape, placement):
            first, shape = shape.ahead is None, grown(self.plans.planner, shape, placement, self.plans.cost)
            if first and shape.ahead is not None:
                shape = dataclasses.replace(shape, **split_shares(self.config, self.plans.cost, shape.ahead))
            shape = self.with_rule(shape)
        rows = self.predicted_rows(shape, placement)
        if rows is not None and not rows.within(self.sizes(shape).bucket_rows(self.devices)):
            # With headroom those that do not fit, the others as they are. The first planned buckets are all by
            # prediction: one that was larger without a plan gets smaller.
            step, most = math.lcm(8, self.roles.size(self.roles.model)), self._most_rows(shape)
            headroom = 1.0 if self.config.moe.overflow_chance else HEADROOM
            larger = rows.each(lambda size: math.ceil(headroom * size)).at_most(most)
            larger, there = larger.each(lambda size: round_up(size, step)), shape.bucket_rows
            rows = larger if there is None else there.where_smaller(rows, larger)
            shape = dataclasses.replace(shape, bucket_rows=rows)
        assert most_homes(placement) <= shape.bank_rows
        return shape

    def planned(self, loads: np.ndarray) -> tuple[PlanShape, Placement]:
        """Return what a run would compile after steps with these loads, int64 [L, D, E] each, and its placement.

        The planner sees the same loads as often as its predictor looks back.
        """
        for _ in range(self.config.planner.window):
            self.plans.observe(loads)
        placement = self.plans.propose(self.plans.config.interval)
        return self.grow(self.first_shape(), placement), placement


def is_idle(shape: PlanShape, placement: Placement) -> bool:
    """Say whether a step of this shape sends replicas ahead that the placement does not have."""
    return shape.ahead is not None and not (len(placement.replicas) or placement.program)


def build_replanners(config: RunConfig, roles: Roles) -> dict[str, Replanner]:
    """Return {segment: planner}, first layers first, of a run that has one.

    Raises:
      UserError: a planner that this mesh, schedule or cluster file cannot serve: experts on one device, transfers by
        node with one node, one device on a node or nodes of unequal size, slots without a bound after the gate, more
        replica slots than fit in memory, or a figure that a price needs.
    """
    runs = segment_runs(config, roles)
    planner, devices = config.planner, max(own.size(own.expert) for _, own in runs.values())
    if not find_schedule(config.moe.schedule).moves_tokens or devices == 1:
        raise UserError(
            f"PlannerConfig.name ({planner.name!r}) needs experts spread over devices, but MoEConfig.schedule is "
            f"{config.moe.schedule!r} and the expert axis has {devices}; use another schedule and "
            "MeshConfig.expert > 1, or set PlannerConfig.name = 'none'"
        )
    if planner.transfer == "by_node":  # the smallest transfer is built for its checks
        for _, own in runs.values():
            members = own.size(own.expert)
            inside = max(1, own.config.devices_per_node // own.config.expert_shard)
            TransferShape(devices=members, devices_per_node=min(inside, members), offers=1, slots=1, by_node=True)
    if planner.when == "after_gate" and not planner.bounded:
        raise UserError(
            f"PlannerConfig.bounded (False) with when = 'after_gate': a compiled step has {planner.replica_slots} "
            "replica slots; set bounded = True and replica_slots to the most that you want"
        )
    config, costs = settle_memory(config, roles)
    found = {name: Replanner(*own, costs[name]) for name, own in segment_runs(config, roles).items()}
    for replanner in found.values():
        # plan once, for even loads: a figure that a price needs and the cluster lacks is named before a step compiles
        start, cost = replanner.start, replanner.plans.cost
        replanner.first_shape()
        replanner.uncounted.propose(np.ones((start.layers, start.devices, start.experts)), start, cost)
    return found
