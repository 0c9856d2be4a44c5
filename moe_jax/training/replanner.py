"""A run's planners: what they compare plans by, and the shapes that the run compiles for their plans. Host side only.

Inputs: a run's config and mesh, placements, predicted loads. Outputs: the run as the planner of one segment sees it
(planners know nothing of other segments), its `Cost`, the replica slots that fit in memory; and shapes: the first one,
of even homes without replicas, and larger ones for placements that do not fit. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np

from moe_jax.cluster import AbsentFigureError, Cluster, read_cluster
from moe_jax.cluster.layer_seconds import matrices_of
from moe_jax.cluster.targets import Target
from moe_jax.cluster.timeline import Constants
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.models import LanguageModel
from moe_jax.models.config import segments_of, with_experts
from moe_jax.models.counts import Sizes, device_bytes, flops_before_moe
from moe_jax.moe.after_gate_rules import RULES
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.routers import build_router
from moe_jax.moe.schedule import LayerSizes, schedule_record
from moe_jax.parallel.bucket_rows import BucketRows, round_up
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.sparse_all_gather import PARTS
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning import routing
from moe_jax.planning.balancer import build_planner, with_late
from moe_jax.planning.block_schedule import Prefetch, Times, shares, stage_seconds
from moe_jax.planning.cost import Cost, slots_in, with_late_prices
from moe_jax.planning.placement import Placement, most_homes
from moe_jax.planning.plan_session import PlanSession
from moe_jax.planning.plan_shape import PlanShape, build_shape, fits, grow
from moe_jax.planning.sizes import TransferSizes, expected_rows, fullest_pairs, pairs_by_kind

_LOG = logging.getLogger(__name__)
_said: list[bool] = []  # whether the missing figures were logged


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


USUAL_VOCABULARY = 50304  # where neither the config nor a tokenizer says one yet: GPT-2's, a multiple of 128


def plan_cost(config: RunConfig, roles: Roles, segment: str) -> Cost:
    """Return the planner's cost model of a segment; figures that the cluster file lacks stay absent."""
    cost, planner = _cost(*segment_runs(config, roles)[segment]), build_planner(config.planner)
    memory = cost.cluster.memory_bytes
    if memory is None or not planner.config.decides_late:
        return cost
    shapes, sizes, room = largest_shapes(config, roles, within_memory=False), sizes_of(config, roles), 0
    if all(shape.late is None for shape in shapes.values()):
        return cost
    # how many late slots of each segment fit in memory, the step's other needs included
    for slots in range(1, 1 + max(shape.late.slots for shape in shapes.values() if shape.late is not None)):
        cut = {}
        for name, shape in shapes.items():
            if shape.late is not None and shape.late.slots > slots:
                offers = min(slots, shape.late.offers)
                crossing = min(shape.late.crossing, offers * shape.devices_per_node)
                late = dataclasses.replace(shape.late, slots=slots, offers=offers, crossing=crossing)
                shape = dataclasses.replace(shape, late=late)
            cut[name] = shape
        if device_bytes(sizes, cut).at_most > memory:
            break
        room = slots
    return dataclasses.replace(cost, late_room=room)


def _cost(config: RunConfig, roles: Roles) -> Cost:
    """Return the cost model of a run of one segment, the memory that the model itself takes not counted."""
    planner, model, start = config.planner, config.model, initial_placement(config, roles)
    shards = roles.size(roles.expert_shard)
    unknown = Cluster(name="of this run; name one in PlannerConfig.cluster")
    cluster = read_cluster(planner.cluster) if planner.cluster else unknown
    cluster = cluster.sized(start.nodes, start.devices_per_node).part_of(shards)
    return Cost(
        cluster=cluster,
        model_dim=model.model_dim,
        hidden_dim=model.hidden_dim,
        matrices=matrices_of(model.activation),
        shards=shards,
        dtype_bytes=np.dtype(model.dtype).itemsize,
        sent_bytes=config.moe.sent_bytes(model.model_dim) or None,
        param_bytes=np.dtype(model.param_dtype).itemsize,
        replica_slots=planner.replica_slots,
        overlap_degree=planner.overlap_degree,
        attention_seconds=None if cluster.flops is None else attention_seconds(config, roles, cluster.flops),
        layers_alive=model.replica_layers,
        microbatches=config.train.grad_accum_steps,
        prefetch=model.block_wise,
        price=planner.price,
        transfer=planner.transfer if planner.transfer in ("flat", "by_node") else "auto",
    )


def attention_seconds(config: RunConfig, roles: Roles, flops: float) -> float:
    """Return the modelled forward time of what precedes an MoE layer, for one device's tokens of one microbatch."""
    model, length = config.model, config.data.sequence_length
    tokens = config.train.batch_size * length / config.train.grad_accum_steps / roles.num_devices
    return tokens * flops_before_moe(model, length) / flops


def with_replica_slots(config: RunConfig, roles: Roles) -> RunConfig:
    """Return the config with `PlannerConfig.replica_slots = 'memory'` as the number of replicas that fit (Hecate 4.2).

    That is the most with which a step stays within the device's memory by `device_bytes`, in the `largest_shapes`; of
    several segments each one's layers have as many, or all that there are. AbsentFigureError: no memory is known.
    """
    if config.planner.replica_slots != "memory":
        return config
    sizes, most = sizes_of(config, roles), 0

    def holding(slots: int) -> RunConfig:
        return dataclasses.replace(config, planner=dataclasses.replace(config.planner, replica_slots=slots))

    for own, own_roles in segment_runs(holding(0), roles).values():
        none, start = _cost(own, own_roles), initial_placement(own, own_roles)
        memory = none.cluster.need("memory_bytes", "PlannerConfig.replica_slots = 'memory'")
        room = slots_in(memory, none.layers_alive, none.expert_bytes)
        most = max(most, min(start.experts - build_shape(start).home_slots, room))
    fewest = 0
    while fewest < most:  # bisection, with all late slots that the planner wants
        middle = (fewest + most + 1) // 2
        shapes = largest_shapes(holding(middle), roles, within_memory=False)
        if device_bytes(sizes, shapes).at_most <= memory:
            fewest = middle
        else:
            most = middle - 1
    return holding(fewest)


def build_model(config: RunConfig, roles: Roles, vocab_size: int) -> LanguageModel:
    """Return the model of a run on its mesh; vocab_size: V."""
    stages = {"zero_stage": config.train.zero_stage, "expert_zero_stage": config.train.expert_zero_stage}
    return LanguageModel(config=config.model, moe=config.moe, vocab_size=vocab_size, roles=roles, **stages)


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


def largest_shapes(config: RunConfig, roles: Roles, within_memory: bool = True) -> dict[str, PlanShape]:
    """Return {segment: shape of a plan with as many replicas as the planner may have, ahead and after the gate}.

    Every home is offered. `PlannerConfig.replica_slots` must be a number.

    Args:
      within_memory: no more late slots than fit in the memory; else all that the planner wants.
    """
    found = {}
    for name, (own, own_roles) in segment_runs(config, roles).items():
        cost = plan_cost(config, roles, name) if within_memory else _cost(own, own_roles)
        planner, shape = build_planner(own.planner), build_shape(initial_placement(own, own_roles))
        if planner.config.decides_late:
            shape = with_late(planner, shape, cost)
        slots = min(own.planner.replica_slots, shape.experts - shape.home_slots)
        if slots and (shape.late is None or own.planner.when != "after_gate"):  # else all that there are come late
            group = {"devices": shape.devices, "devices_per_node": shape.devices_per_node, "offers": shape.home_slots}
            shape = dataclasses.replace(shape, ahead=TransferShape(**group, slots=slots))
        found[name] = shape
    return found


def split_shares(config: RunConfig, cost: Cost, transfer: TransferShape) -> dict[str, float]:
    """Return {'trans_share', 'agg_share'} for a `PlanShape`, in eighths; {} where the schedule splits nothing.

    Without a cluster file that has FLOP/s and links, half of each runs beside attention, logged once.
    """
    model = config.model
    if model.prefetch != "pro_prophet" or model.prefetch_case != "split":
        return {}
    try:
        seconds = cost.shape_seconds(transfer, "the split of a transfer")
    except AbsentFigureError:
        seconds = None
    if seconds is None or cost.attention_seconds is None:
        if not _said:
            _said.append(True)
            _LOG.warning(
                "ModelConfig.prefetch_case = 'split' runs half of each transfer (0.5) beside attention: "
                "PlannerConfig.cluster names no file with flops and a bandwidth, from which the split would follow"
            )
        return {"trans_share": 0.5, "agg_share": 0.5}
    times = Times(attention=cost.attention_seconds, experts=0.0, trans=seconds, agg=seconds)
    cut = (round(share * PARTS) / PARTS for share in shares(times, model.refetch_replicas))
    return dict(zip(("trans_share", "agg_share"), cut, strict=True))


FEWEST = 0.25  # rows of a planned bucket over the mean: fewer would make an overflow, where it comes, take many passes
HEADROOM = 1.25  # of a new bucket over the predicted rows, so that slow growth needs few executables
TOO_OFTEN = 10.0  # times MoEConfig.overflow_chance: buckets grow when they overflow more often, for the same reason


class Replanner:
    """The planner of one segment of a run, and the shapes that the run compiles for what it proposes.

    Raises:
      UserError: a cluster file that is not there, or more replica slots than its memory holds.
    """

    def __init__(self, config: RunConfig, roles: Roles, segment: str):
        check_transfer(config, roles)
        config = with_replica_slots(config, roles)
        self.config, self.roles = segment_runs(config, roles)[segment]
        self.start = initial_placement(self.config, self.roles)  # the even homes that the run starts with
        self.devices = self.roles.size(self.roles.expert)  # D, of one expert-parallel group
        exchanges = config.train.grad_accum_steps * self.roles.size(self.roles.data)
        self.plans = PlanSession(self.config.planner, self.start, plan_cost(config, roles, segment), exchanges)

    def first_shape(self) -> PlanShape:
        """Return what the first step is compiled for: even homes, and slots for what is decided after the gate."""
        return self.with_rule(build_shape(self.start))

    def with_rule(self, shape: PlanShape) -> PlanShape:
        """Return the shape with what is decided after the gate, and the sizes of that; without any where nothing is."""
        if not self.plans.config.decides_late:
            return dataclasses.replace(shape, late=None, after_gate=None)
        shape = with_late(self.plans.planner, shape, self.plans.cost)
        cost = with_late_prices(self.plans.cost, shape.late)
        declared = self.plans.planner.late_rule(shape, cost, self.roles.size(self.roles.data))
        rule = None if declared is None else RULES[declared[0]](**declared[1])
        return dataclasses.replace(shape, after_gate=rule)

    def refined(self, shape: PlanShape, placement: Placement, loads: np.ndarray) -> Placement:
        """Return what a step makes of a placement for its loads [L, S, E]; after the gate, of the mean microbatch."""
        if shape.after_gate is None:
            return placement
        return self.plans.refine(loads / self.plans.exchanges_per_step, placement, shape.late)

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
        counters = dict(plans.planner.counters)  # a prediction is not a decision to be counted
        pairs = routing.pair_loads(self.refined(shape, placement, loads), loads)
        plans.planner.counters.clear()
        plans.planner.counters.update(counters)
        error = min(1.0, float(np.max(plans.predictor.error(), initial=0.0)))
        step = self.roles.size(self.roles.model)
        groups = plans.exchanges_per_step * self.roles.size(self.roles.expert_shard) / step
        sizes = self.sizes(shape)
        if self.config.moe.overflow_chance:
            # Each kind of bucket has a third of the chance; data-parallel groups draw for themselves. Where a
            # microbatch travels in two halves, buckets are twice as long as those of a half.
            chance = more_often * self.config.moe.overflow_chance * len(pairs) / 3 / self.roles.size(self.roles.data)
            parts, choices = 2 if self.config.model.overlap == "halves" else 1, sizes.config.top_k * sizes.tokens
            rows = {}
            for kind, own in pairs_by_kind(pairs * ((1 + error) / groups), self.start.devices_per_node).items():
                needed = expected_rows(own / parts, choices // parts, chance, math.lcm(8, step)) if own.size else 0
                rows[kind] = parts * needed
            rows = BucketRows(**rows)
        else:
            fullest = fullest_pairs(pairs, placement.devices_per_node)
            rows = fullest.each(lambda pair: round_up(pair / groups * (1 + error), math.lcm(8, step)))
        fewest = round_up(FEWEST * sizes.config.top_k * sizes.tokens / self.devices, math.lcm(8, step))
        return rows.each(lambda size: max(size, fewest)).at_most(self._most_rows(shape))

    def _most_rows(self, shape: PlanShape) -> BucketRows:
        """Return the rows that planned buckets may have: the worst case, or what `PlannerConfig.bucket_limit` allows.

        Never fewer than without a plan. The limit is not for the own bucket: there is one of it, and it does not
        travel; except where the schedule gives other buckets its length.
        """
        sizes = self.sizes(dataclasses.replace(shape, bucket_rows=None))
        most = math.ceil(self.config.planner.bucket_limit * (sizes.config.top_k * sizes.tokens / self.devices))
        most, worst = min(max(most, sizes.even_rows(self.devices)), sizes.worst_rows()), sizes.worst_rows()
        roles = self.roles
        several = roles.size(roles.model) > roles.size(roles.expert_shard)  # members of an MP group
        schedule = schedule_record(self.config.moe.schedule)
        cuts = [schedule_record(name).cuts_buckets for name in (schedule.name, *schedule.chooses_from)]
        cut_over_members = several and any(cuts)
        return BucketRows(own=most if cut_over_members else worst, node=most, far=most)

    def sizes(self, shape: PlanShape) -> LayerSizes:
        train, roles = self.config.train, self.roles
        tokens = train.batch_size * self.config.data.sequence_length // train.grad_accum_steps
        tokens = tokens * roles.size(roles.model) // roles.num_devices
        return layer_sizes(self.config.moe, roles, tokens, shape)

    def grow(self, shape: PlanShape, placement: Placement) -> PlanShape:
        """Return a shape that the placement fits and plans like it, with buckets at least as large as predicted."""
        if not fits(shape, placement):
            several_levels = 1 < self.start.devices_per_node < self.start.devices  # nodes of several devices
            first, need = shape.ahead is None, build_shape(placement, by_node=several_levels).ahead
            cost, by_node = self.plans.cost, False
            if need is not None:  # whether the first transfer of replicas planned ahead goes by node
                sizes = TransferSizes(*(np.array(size) for size in (need.offers, need.slots, need.crossing)))
                by_node = cost.transfer_shape(sizes, need.devices, need.devices_per_node).by_node
            most, slots = self.plans.planner.ahead_most(placement, cost), self.config.planner.replica_slots
            shape = grow(shape, placement, by_node=by_node, replica_slots=slots, most=most)
            if first and shape.ahead is not None:
                shape = dataclasses.replace(shape, **split_shares(self.config, cost, shape.ahead))
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
            self.plans.predictor.observe(loads)
        placement = self.plans.propose(self.plans.config.interval)
        return self.grow(self.first_shape(), placement), placement


def check_planner(config: RunConfig, roles: Roles) -> None:
    """Refuse a planner that this mesh, schedule or cluster file cannot serve.

    Raises:
      UserError: experts on one device, slots without a bound after the gate, or a figure that a price needs.
    """
    runs = segment_runs(config, roles)
    planner, devices = config.planner, max(own.size(own.expert) for _, own in runs.values())
    if not schedule_record(config.moe.schedule).moves_tokens or devices == 1:
        raise UserError(
            f"PlannerConfig.name ({planner.name!r}) needs experts spread over devices, but MoEConfig.schedule is "
            f"{config.moe.schedule!r} and the expert axis has {devices}; use another schedule and "
            "MeshConfig.expert > 1, or set PlannerConfig.name = 'none'"
        )
    if planner.when == "after_gate" and not planner.bounded:
        raise UserError(
            f"PlannerConfig.bounded (False) with when = 'after_gate': a compiled step has {planner.replica_slots} "
            "replica slots; set bounded = True and replica_slots to the most that you want"
        )
    for name in runs:
        replanner = Replanner(config, roles, name)
        replanner.first_shape()
        # plan once, for even loads: a figure that a price needs and the cluster lacks is named before a step compiles
        start, plans = replanner.start, replanner.plans
        plans.planner.propose(np.ones((start.layers, replanner.devices, start.experts)), start, plans.cost)


def check_transfer(config: RunConfig, roles: Roles) -> None:
    """Refuse a form of transfers that the nodes of an expert-parallel group cannot have.

    UserError: by node with nodes of unequal size, one node, or one device on a node.
    """
    if config.planner.name == "none" or config.planner.transfer != "by_node":
        return
    for _, own in segment_runs(config, roles).values():
        members = own.size(own.expert)
        inside = max(1, own.config.devices_per_node // own.config.expert_shard)
        TransferShape(devices=members, devices_per_node=min(inside, members), offers=1, slots=1, by_node=True)


# `ModelConfig.overlap` = 'auto': two halves where the modelled step is faster with them. It is 'none' without rates, on
# CPU devices, inside one node, whose exchanges the compiler hides by itself (docs/results.md), and where tokens are not
# gated each by itself: halves would change which tokens compete for a place.
MORE_KERNELS = 75  # of one layer in two halves, both ways: (2,061 - 1,164) / 12 on GPT-MoE-S (docs/results.md)


def settle_overlap(config: RunConfig, roles: Roles, target: Target | None) -> RunConfig:
    """Return the config with 'none' or 'halves' in place of 'auto'; target: None where rates are not known."""
    if config.model.overlap != "auto":
        return config
    gain = 0.0
    if target is not None and not why_not_halves(config, roles):
        for name, (own, _) in segment_runs(config, roles).items():
            in_one_piece, in_halves = layer_seconds(config, roles, target, name)
            gain += own.model.moe_layers * (in_one_piece - in_halves)
    model = dataclasses.replace(config.model, overlap="halves" if gain > 0 else "none")
    return dataclasses.replace(config, model=model)


def why_not_halves(config: RunConfig, roles: Roles) -> str:
    """Return why 'auto' leaves a run in one piece whatever the rates, '' where nothing speaks against halves."""
    train = config.train
    rows = train.microbatch_size // roles.size(roles.dense)
    if roles.members_per_node == roles.size(roles.expert):
        return "no exchange leaves a node"
    if rows % 2:
        return f"a device has {rows} sequence(s), an odd number"
    if config.distillation.teacher:
        return "the run has a teacher"
    for own, _ in segment_runs(config, roles).values():
        record, router = schedule_record(own.moe.schedule), build_router(own.moe)
        if not (record.one_piece and record.moves_tokens):
            return f"MoEConfig.schedule is {own.moe.schedule!r}"
        if not own.moe.dropless or not router.replays:
            return "tokens compete for places among those gated together"
        if own.moe.record_choices:
            return "choices are recorded"
    return ""


def layer_seconds(config: RunConfig, roles: Roles, target: Target, segment: str) -> tuple[float, float]:
    """Return the modelled seconds of one layer of a segment under even loads, forward and backward: in one piece, and
    in two halves with their launches, as `timeline.Constants` has them.
    """
    own, own_roles = segment_runs(config, roles)[segment]
    members, shards = own_roles.size(own_roles.expert), own_roles.size(own_roles.expert_shard)
    nodes = members // own_roles.members_per_node
    cluster = Cluster(
        name=target.name,
        nodes=target.nodes,
        devices_per_node=target.per_node,
        intra_bandwidth=target.intra_bandwidth,
        inter_bandwidth=target.node_bandwidth,
        intra_latency=target.base_latency + target.intra_latency,
        inter_latency=target.base_latency + target.inter_latency,
        cards_per_node=target.adapters,
        flops=target.flops_bf16,
    )
    cluster = cluster.sized(nodes, own_roles.members_per_node).part_of(shards)
    cost = dataclasses.replace(plan_cost(config, roles, segment), cluster=cluster)
    tokens = own.train.batch_size * own.data.sequence_length / own.train.grad_accum_steps / roles.num_devices
    computed = np.full(members, tokens * own.moe.top_k * shards)
    asked_by = "ModelConfig.overlap = 'auto'"
    times = Times(
        attention=attention_seconds(own, own_roles, target.flops_bf16),
        experts=float(cost.forward(computed, asked_by)),
        exchange=float(cost.exchange(computed * (1 - 1 / members), asked_by)),
    )
    launches, recompute = MORE_KERNELS * Constants().launch, own.model.recomputes
    in_one_piece, in_halves = (
        float(stage_seconds(Prefetch(halves=halves), times, recompute)) for halves in (False, True)
    )
    return in_one_piece, in_halves + launches
