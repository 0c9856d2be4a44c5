"""What a plan's layers take under the compiled sizes, and whether a change of these pays.

Inputs: a placement, loads, cost, and the shape that the step is compiled for. Outputs: seconds by layer, a decision.
"""

from __future__ import annotations

import numpy as np

from moe_jax.placement import Placement, PlanShape, routing
from moe_jax.placement.late_sizes import late_size
from moe_jax.placement.transfer_sizes import placement_sizes, transfer_sizes
from moe_jax.planner.cost import Cost
from moe_jax.planner.late import with_late_prices


def predicted_layer_seconds(
    placement: Placement,
    loads: np.ndarray,
    cost: Cost,
    shape: PlanShape | None = None,
    planned: Placement | None = None,
) -> np.ndarray:
    """Return what every layer takes, forward and backward of one microbatch: loads [L, S, E] -> seconds [L].

    Args:
      loads: as the gate of one microbatch and one expert-parallel group counts them.
      shape: what the step is compiled for; its transfer ahead is paid in full by every layer. None: each pays what its
        own replicas need.
      planned: what was planned ahead, where `placement` has replicas that come after the gate.
    """
    computed, received = routing.expected(placement, loads)
    requested_by = "predicted_layer_seconds"
    if shape is None or cost.price == "paper":
        return cost.layer(computed, received, placement_sizes(placement), requested_by)
    ahead = 0.0 if shape.ahead is None else cost.shape_seconds(shape.ahead, requested_by)
    trans = np.full(placement.layers, ahead)
    parts = cost.parts(computed, received, placement_sizes(placement), requested_by, trans=trans)
    total = parts["place"] + parts["reduce"] + parts["others"]
    if shape.late is None or planned is None:
        return total
    added = placement.holds & ~planned.holds
    needed = transfer_sizes(placement.home, added, shape.late.inside)
    each = with_late_prices(cost, shape.late).late_seconds
    return total + np.array(each or (0.0,))[late_size(needed, shape.late) if each else 0]


def worth_a_swap(now_seconds: float, then_seconds: float, horizon: int, price_seconds: float) -> bool:
    """Say whether changed sizes pay: the gain over `horizon` steps exceeds what the change costs."""
    return (now_seconds - then_seconds) * horizon > price_seconds
