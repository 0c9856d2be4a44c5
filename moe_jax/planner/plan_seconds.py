"""What a plan's layers take, and whether a change of the compiled sizes pays.

Inputs: a placement, loads, cost, and the sizes that the step is compiled for. Outputs: seconds by layer, a decision.
"""

from __future__ import annotations

import numpy as np

from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.placement import Placement, routing
from moe_jax.placement.transfer_sizes import sizes_in_force
from moe_jax.planner.cost import Cost


def predicted_layer_seconds(
    placement: Placement, loads: np.ndarray, cost: Cost, shape: TransferShape | None = None
) -> np.ndarray:
    """Return what every layer takes, forward and backward of one microbatch: loads [L, S, E] -> seconds [L].

    Args:
      loads: as the gate of one microbatch and one expert-parallel group counts them.
      shape: the transfer that the step is compiled for, which every layer pays in full; None: what each layer needs.
    """
    computed, received = routing.expected(placement, loads)
    return cost.layer(computed, received, sizes_in_force(placement, shape), "predicted_layer_seconds")


def worth_a_swap(now_seconds: float, then_seconds: float, horizon: int, price_seconds: float) -> bool:
    """Say whether changed sizes pay: the gain over `horizon` steps exceeds what the change costs."""
    return (now_seconds - then_seconds) * horizon > price_seconds
