"""How the shape of a compiled step follows the plans of a run: larger where they need more, so that few changes follow.

Inputs: the shape in force, a placement, its planner and cost. Outputs: the shape to compile. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.planning.balancer import Planner
from moe_jax.planning.cost import Cost, predicted_layer_seconds
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape, build_shape
from moe_jax.planning.sizes import SIZES, TransferSizes


def for_program(shape: PlanShape, placement: Placement) -> PlanShape:
    """Return the shape where it is of the placement's program, else what of it another one starts from: its homes."""
    if shape.program == placement.program:
        return shape
    return dataclasses.replace(shape, program=placement.program, ahead=None, spare=None, bucket_rows=None)


def grow(
    shape: PlanShape,
    placement: Placement,
    *,
    by_node: bool = False,
    replica_slots: int = 0,
    most: TransferSizes | None = None,
) -> PlanShape:
    """Return a shape that this placement fits and every plan that fitted the old one too.

    A transfer that has to change gets room for one more offer and one more crossing than this placement needs, so that
    few changes follow; a device never offers more than its homes, and no plan needs more than its planner's `most`.

    Args:
      by_node: form of the first transfer; a later one keeps it.
      replica_slots: mu, the slots that a transfer has at least.
      most: the sizes beyond which there is no need for room (`Planner.ahead_most`), None where none is known.
    """
    shape = for_program(shape, placement)
    old = shape.ahead
    plan = build_shape(placement, by_node=by_node if old is None else old.by_node)
    largest = {name: max(getattr(plan, name), getattr(shape, name)) for name in ("home_slots", "bank_rows")}
    candidates = shape.candidates
    if plan.candidates > candidates:
        candidates = min(shape.devices, 2 * plan.candidates)
    shape = dataclasses.replace(shape, candidates=candidates, **largest)
    need = plan.ahead
    if need is None or (old is not None and all(getattr(need, name) <= getattr(old, name) for name in SIZES)):
        return shape
    offers, crossing = need.offers, need.crossing
    if old is None or offers > old.offers:
        offers = min(shape.home_slots, offers + 1)
    if need.by_node and (old is None or crossing > old.crossing):
        crossing = min(need.devices_per_node * offers, crossing + 1)
    if most is not None:
        offers = max(need.offers, min(offers, int(most.offers)))
        crossing = max(need.crossing, min(crossing, int(most.crossing)))
    sizes = {"offers": offers, "slots": max(need.slots, replica_slots), "crossing": crossing}
    kept = {name: max(size, getattr(old, name, 0)) for name, size in sizes.items()}
    return dataclasses.replace(shape, ahead=dataclasses.replace(need, **kept))


def with_late(planner: Planner, shape: PlanShape, cost: Cost) -> PlanShape:
    """Return the shape with slots and candidates for what the planner decides after the gate; `shape.late` is kept."""
    slots = planner.slots_after_gate(cost)
    if slots and shape.late is None:
        offers = min(slots, shape.home_slots)
        crossing = offers * shape.devices_per_node
        if not planner.any_holder:  # then each of the experts has a replica on every device
            crossing = min(slots, crossing)
        sizes = TransferSizes(offers, slots, crossing)
        group = shape.devices, shape.devices_per_node
        shape = dataclasses.replace(shape, late=sizes.shape(*group, cost.form(sizes, *group) == "by_node"))
    if shape.replica_slots and planner.any_holder:
        shape = dataclasses.replace(shape, candidates=shape.devices)
    return shape


def grown(planner: Planner, shape: PlanShape, plan: Placement, cost: Cost) -> PlanShape:
    """Return what a run compiles for a plan after a shape: an idle transfer leaves, and comes back as it was.

    The first one takes the cheaper form. Programs that `auto` names keep theirs.
    """
    if not len(plan.replicas):
        kept = shape.ahead if plan.program else None
        return grow(dataclasses.replace(shape, ahead=kept, spare=shape.ahead or shape.spare), plan)
    shape, group = for_program(shape, plan), (plan.devices, plan.devices_per_node)
    shape = dataclasses.replace(shape, ahead=shape.ahead or shape.spare)
    by_node, most = cost.form(plan.needs.transfer, *group) == "by_node", planner.ahead_most(plan, cost)
    return grow(shape, plan, by_node=by_node, replica_slots=cost.replica_slots, most=most)


def plan_seconds(planner: Planner, plan: Placement, loads: np.ndarray, cost: Cost) -> float:
    """Return the predicted seconds of all layers, with what a step compiled for the plan sends: loads [L, S, E]."""
    shape = grown(planner, dataclasses.replace(build_shape(plan), ahead=None), plan, cost)
    return float(predicted_layer_seconds(plan, loads, cost, shape).sum())
