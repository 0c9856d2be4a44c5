"""One plan of all segments of a run: who holds which expert, and the compiled step that this needs. Pure.

Inputs: for each segment what a planner is asked (`Asked`), with the predicted loads; what runs now. Output: a `Plan`.
`make_plan` is the one door: a proposal, whether it fits the step in force, and if not, which step to compile and why.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_jax.parallel.static_sizes import PARTS, BucketRows, TransferShape
from moe_jax.planning import routing
from moe_jax.planning.balancer import Planner
from moe_jax.planning.block_schedule import Times, shares
from moe_jax.planning.buckets import TOO_OFTEN, Buckets, fullest
from moe_jax.planning.cost import Cost, predicted_layer_seconds
from moe_jax.planning.placement import Placement, TransferSizes
from moe_jax.planning.plan_shape import (
    PlanShape,
    Shapes,
    Tables,
    build_shape,
    fill_tables,
    for_program,
    grow,
    misfits,
)
from moe_jax.planning.routing import split_evenly

# {segment: part} of the segments with experts, first layers first: each has a planner of its own
Placements = dict[str, Placement]
STAY = 1.05  # how much longer than homes alone replicas that run may take, so that programs seldom change
STAY_SPLIT = 1.25  # how much dearer the token split in use may get before the other one takes over


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """A planner's newest placement, from which it goes on; `adopted` is what of it runs.

    Attributes:
      split: of `PlannerConfig.split`, the one in use where it is chosen by price, else ''.
      pays: whether the replicas run: layers take less time with them than by their homes alone.
    """

    placement: Placement
    split: str = ""
    pays: bool = True

    @property
    def adopted(self) -> Placement:
        """The placement, without its replicas where these do not pay."""
        return self.placement if self.pays else self.placement.bare()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What is asked of a segment's planner before a step.

    Attributes:
      config: with the planner's own defaults filled in.
      loads: [L, S, E], predicted for a step; exchanges: microbatches times data-parallel groups, over which they are
        summed: planners get the loads of one of them, as one gate counts them.
      error: [L], relative, of such predictions so far.
      last: the newest proposal; due: whether there is to be a new one; reshard: whether homes may move first.
      trial: a planner for what no step does, whose counters nobody reads.
      buckets: the rule for the segment's buckets, None where capacities rule; groups: data-parallel groups.
    """

    planner: Planner
    trial: Planner
    config: Any  # a `PlannerConfig`
    cost: Cost
    loads: np.ndarray
    exchanges: int
    error: np.ndarray
    last: Proposal
    due: bool
    reshard: bool
    buckets: Buckets | None
    groups: int

    @property
    def of_one(self) -> np.ndarray:
        """Predicted loads of one exchange."""
        return self.loads if self.exchanges == 1 else self.loads / self.exchanges


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What the next step runs with, and what is to be compiled.

    Attributes:
      proposals: of each planner; placement: what of them runs.
      tables: of the placement, where it fits the step in force and is not what ran last.
      fits: whether the step in force runs the placement; fits_pending: whether the one that is being compiled does.
      shape: the step to compile, equal to the one in force where there is nothing to compile.
      why: in words, what the step in force lacks, '' for nothing.
    """

    proposals: dict[str, Proposal]
    placement: Placements
    tables: dict[str, Tables] | None
    fits: bool
    fits_pending: bool
    shape: Shapes
    why: str


def propose(asked: Asked) -> Proposal:
    """Return a planner's proposal for predicted loads, with the token split, and whether its replicas pay."""
    planner, config, cost, loads, last = asked.planner, asked.config, asked.cost, asked.of_one, asked.last
    placement, split, running = last.placement, last.split, last.adopted
    if asked.reshard:
        placement = planner.reshard(loads, running, cost)
    homes = placement.bare()
    placement = planner.propose(loads, placement, dataclasses.replace(cost, load_error=tuple(asked.error.tolist())))
    # the newest plan's token rule; what is decided late keeps its own
    if config.split == "even":
        placement = split_evenly(placement, loads)
    elif config.split == "auto" and not config.decides_late:
        placement, split = choose_split(placement, loads, cost, split)
    if not (config.must_pay and cost.prices.of_program and len(placement.replicas)):
        return Proposal(placement=placement, split=split)
    taken, alone = (plan_seconds(planner, plan, loads, cost) for plan in (placement, homes))
    pays = taken < alone * (STAY if len(running.replicas) else 1.0)
    moved = (placement.home != homes.home).any()
    return Proposal(placement=placement if pays or not moved else homes, split=split, pays=pays)


def choose_split(placement: Placement, loads: np.ndarray, cost: Cost, now: str = "") -> tuple[Placement, str]:
    """Return (placement, split) whose padded exchange takes less time for loads [L, S, E].

    'plan' is as the planner says, near holders first; 'even' in the same proportions from every source. A padded
    exchange carries as many rows between all pairs of a kind (own device, own node, other nodes) as the fullest pair of
    that kind needs: near holders keep most rows at home and leave the rest uneven, an even split sends more and leaves
    nothing empty. Neither is less for every plan.

    Args:
      now: the split in use, kept until the other is cheaper by `STAY_SPLIT`; '' for none yet.
    """
    if not len(placement.replicas):
        return placement, now
    plans, price = {"plan": placement, "even": split_evenly(placement, loads)}, {}
    for name, plan in plans.items():
        price[name] = cost.prices.padded_exchange(fullest(plan, loads).each(lambda size: max(size, 1)), plan)
    best = min(price, key=price.__getitem__)
    if now and not price[best] * STAY_SPLIT < price[now]:
        best = now
    return plans[best], best


def make_plan(asked: Mapping[str, Asked], running: Placements, shape: Shapes, pending: Shapes | None = None) -> Plan:
    """Return the plan of a step.

    A placement that fits the step in force changes its tables alone. Another step is compiled, one at a time, where
    one of these holds: homes move or another program is asked for; a placement that does not fit, or leaves the step's
    transfer idle, takes less time by prediction; or buckets are predicted to be too small.

    Args:
      asked: of each segment.
      running: what the last step ran with; shape: the step in force; pending: the one that is being compiled.
    """
    proposals = {name: propose(own) if own.due or own.reshard else own.last for name, own in asked.items()}
    placement = {name: proposal.adopted for name, proposal in proposals.items()}
    fitting = not any(misfits(shape[name], own) for name, own in placement.items())
    new = fitting and placement != running
    tables = {name: fill_tables(shape[name], own) for name, own in placement.items()} if new else None
    common = {"proposals": proposals, "placement": placement, "tables": tables, "fits": fitting}
    if pending is not None:
        fits_pending = not any(misfits(pending[name], own) for name, own in placement.items())
        return Plan(**common, fits_pending=fits_pending, shape=shape, why="")
    larger, why = shape, ""
    idle = any(is_idle(shape[name], own) for name, own in placement.items())
    if not fitting or idle or any(rows_lacking(own, shape[n], placement[n], TOO_OFTEN) for n, own in asked.items()):
        larger = {name: enlarge(own, placement[name], shape[name]) for name, own in asked.items()}
    if not fitting or idle:
        moved = any(own.moves(running[n]) or own.program != shape[n].program for n, own in placement.items())
        if not moved and not seconds_of(asked, running, shape) > seconds_of(asked, placement, larger):
            larger = shape
        why = "the placement needs more room" if not fitting else "a transfer is idle"
    why = (why or "buckets are predicted to overflow") if larger != shape else ""
    return Plan(**common, fits_pending=False, shape=larger, why=why)


def is_idle(shape: PlanShape, placement: Placement) -> bool:
    """Say whether a step of this shape sends replicas ahead that the placement does not have."""
    return shape.ahead is not None and not (len(placement.replicas) or placement.program)


def refined(planner: Planner, shape: PlanShape, placement: Placement, loads: np.ndarray, cost: Cost) -> Placement:
    """Return what a step makes of a placement for the loads [L, S, E] of one exchange, after its gate."""
    if shape.after_gate is None:
        return placement
    return planner.refine(loads, placement, dataclasses.replace(cost, late=shape.late))


def rows_lacking(asked: Asked, shape: PlanShape, placement: Placement, more_often: float = 1.0) -> BucketRows | None:
    """Return the rows that buckets need by prediction (`Buckets.needed`).

    None where they have them, or capacities rule.
    """
    if asked.buckets is None:
        return None
    loads, error = np.rint(asked.loads).astype(np.int64), min(1.0, float(np.max(asked.error, initial=0.0)))
    after = refined(asked.trial, shape, placement, loads / asked.exchanges, asked.cost)
    rows = asked.buckets.needed(shape, after, loads, error, more_often)
    return None if rows.within(asked.buckets.there(shape)) else rows


def enlarge(asked: Asked, placement: Placement, shape: PlanShape) -> PlanShape:
    """Return a shape that a placement fits and plans like it, with buckets at least as large as predicted."""
    shape = for_program(shape, placement)
    if is_idle(shape, placement) or misfits(shape, placement):
        first, shape = shape.ahead is None, grown(asked.planner, shape, placement, asked.cost)
        if first and shape.ahead is not None:
            shape = dataclasses.replace(shape, **split_of_transfer(asked.cost, shape.ahead))
        shape = with_rule(asked.planner, shape, asked.cost, asked.groups)
    needed = rows_lacking(asked, shape, placement)
    return shape if needed is None else asked.buckets.enlarged(shape, needed)


def split_of_transfer(cost: Cost, transfer: TransferShape) -> dict[str, float]:
    """Return {'trans_share', 'agg_share'} for a `PlanShape`, in eighths; {} where the schedule splits nothing."""
    if cost.prefetch.schedule != "pro_prophet":
        return {}
    seconds = cost.prices.shape_seconds(transfer)
    times = Times(attention=cost.attention_seconds, experts=0.0, trans=seconds, agg=seconds)
    cut = (round(share * PARTS) / PARTS for share in shares(times, cost.prefetch.refetch_replicas))
    return dict(zip(("trans_share", "agg_share"), cut, strict=True))


def with_rule(planner: Planner, shape: PlanShape, cost: Cost, groups: int = 1) -> PlanShape:
    """Return the shape with what is decided after the gate, and its slots and candidates; without any where nothing is.

    `shape.late`, where there is one, is kept; groups are data-parallel ones, over which a rule's counts are sums.
    """
    if not planner.config.decides_late:
        return dataclasses.replace(shape, late=None, after_gate=None)
    slots = planner.slots_after_gate(cost)
    if slots and shape.late is None:
        offers = min(slots, shape.home_slots)
        crossing = offers * shape.devices_per_node
        if not planner.any_holder:  # then each of the experts has a replica on every device
            crossing = min(slots, crossing)
        sizes = TransferSizes(offers, slots, crossing)
        group = shape.devices, shape.devices_per_node
        shape = dataclasses.replace(shape, late=sizes.shape(*group, cost.prices.is_by_node(sizes, *group)))
    if shape.replica_slots and planner.any_holder:
        shape = dataclasses.replace(shape, candidates=shape.devices)
    return dataclasses.replace(shape, after_gate=planner.late_rule(shape, cost, groups))


def grown(planner: Planner, shape: PlanShape, plan: Placement, cost: Cost) -> PlanShape:
    """Return `shape` enlarged for a plan; a transfer that the plan leaves idle is set aside, and comes back as it was.

    The first one takes the cheaper form. Programs that `auto` names keep theirs.
    """
    if not len(plan.replicas):
        kept = shape.ahead if plan.program else None
        return grow(dataclasses.replace(shape, ahead=kept, spare=shape.ahead or shape.spare), plan)
    shape, group = for_program(shape, plan), (plan.devices, plan.devices_per_node)
    shape = dataclasses.replace(shape, ahead=shape.ahead or shape.spare)
    by_node, most = cost.prices.is_by_node(plan.sizes.largest(), *group), planner.ahead_most(plan, cost)
    return grow(shape, plan, by_node=by_node, replica_slots=cost.replica_slots, most=most)


def plan_seconds(planner: Planner, plan: Placement, loads: np.ndarray, cost: Cost) -> float:
    """Return the predicted seconds of all layers, with what a step compiled for the plan sends: loads [L, S, E]."""
    shape = grown(planner, dataclasses.replace(build_shape(plan), ahead=None), plan, cost)
    return float(predicted_layer_seconds(plan, loads, cost, shape).sum())


def seconds_of(asked: Mapping[str, Asked], placement: Placements, shape: Shapes) -> float:
    """Return the predicted seconds of all layers of all segments in one microbatch, under the shapes' schedules."""
    costs = {name: dataclasses.replace(own.cost, schedule=shape[name].schedule) for name, own in asked.items()}
    return sum(
        predicted_layer_seconds(placement[name], own.of_one, costs[name], shape[name]).sum()
        for name, own in asked.items()
    )


def look_back(asked: Mapping[str, Asked], planned: Placements, shape: Shapes) -> dict[str, Any]:
    """Return a plan's part of a step's record: what the step made of what was planned ahead of it.

    Args:
      asked: about the loads of the step itself.

    Returns:
      replicas, after the gate; and by layer [L], all segments in turn, device_load_max_over_mean, the largest of the
      devices' loads over their mean, and predicted_layer_seconds, in one microbatch.
    """
    replicas, balance, seconds = 0, [], []
    for name, own in asked.items():
        placement = refined(own.planner, shape[name], planned[name], own.of_one, own.cost)
        replicas += len(placement.replicas)
        computed = routing.pair_loads(placement, own.loads).sum(axis=1)
        balance.append(computed.max(axis=1) / np.maximum(computed.mean(axis=1), 1e-9))
        cost = dataclasses.replace(own.cost, schedule=shape[name].schedule)
        seconds.append(predicted_layer_seconds(placement, own.of_one, cost, shape[name], planned[name]))
    balance, seconds = np.concatenate(balance), np.concatenate(seconds)
    return {"replicas": replicas, "device_load_max_over_mean": balance, "predicted_layer_seconds": seconds}
