"""What is compiled into a step for decisions after the gate, and what those cost.

Inputs: a planner, which says how large a late transfer should be (`PlannerBase.late_needs`), the shape of a step, cost.
Outputs: the shape with the late transfer in it, and the cost with the seconds of each of its sizes. The rule of the
device and the planner's `refine` read the same numbers.

Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

from moe_jax.cluster import AbsentFigureError
from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.placement import PlanShape
from moe_jax.planner.contract import Planner
from moe_jax.planner.cost import Cost


def with_late(planner: Planner, shape: PlanShape, cost: Cost) -> PlanShape:
    """Return the shape with slots and candidates for what the planner decides after the gate; `shape.late` is kept."""
    needs = planner.late_needs(shape, cost)
    if needs is not None and shape.late is None:
        shape = dataclasses.replace(shape, late=cost.transfer_shape(needs, shape.devices, shape.devices_per_node))
    if shape.replica_slots and planner.any_holder:
        shape = dataclasses.replace(shape, candidates=shape.devices)
    return shape


def with_late_prices(cost: Cost, late: TransferShape | None) -> Cost:
    """Return the cost with the sizes of the late transfer and its seconds, there and back.

    They stay () under the papers' price, which is by the expert, and where the links are not known.
    """
    if late is None or cost.price == "paper":
        return dataclasses.replace(cost, late=late, late_seconds=())
    try:
        each = (2 * cost.shape_seconds(size, "a transfer after the gate") for size in late.halves())
        return dataclasses.replace(cost, late=late, late_seconds=(0.0, *each))
    except AbsentFigureError:
        return dataclasses.replace(cost, late=late, late_seconds=())
