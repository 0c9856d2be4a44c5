"""Which holder a token goes to: as the planner says, near ones first, or in the same proportions from every source.

Inputs: a placement, the loads that it is made for, and the cost model. Outputs: the placement with the cheaper of the
two token rules, and which it is. A padded exchange carries as many rows between all pairs of a kind (own device, own
node, other nodes) as the fullest pair of that kind needs: near holders keep most rows at home and leave the rest
uneven, an even split sends more and leaves nothing empty. Neither is less for every plan.

Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.cluster import AbsentFigureError
from moe_jax.cluster.link_seconds import uniform_seconds
from moe_jax.placement import Placement, routing
from moe_jax.placement.buckets import exchange_bytes, fullest_pairs
from moe_jax.planner.cost import Cost
from moe_jax.planner.shares import split_evenly

SPLITS = ("plan", "even")
STAY = 1.25  # how much dearer the split in use may get before the other one takes over


def choose_split(placement: Placement, loads: np.ndarray, cost: Cost, now: str = "") -> tuple[Placement, str]:
    """Return (placement, split) whose padded exchange takes less time for loads [L, S, E].

    Args:
      now: the split in use, kept until the other is cheaper by `STAY`; '' for none yet.
    """
    if not len(placement.replicas):
        return placement, now
    found = {"plan": placement, "even": split_evenly(placement, loads)}
    price = {name: padded_seconds(plan, loads, cost) for name, plan in found.items()}
    other = {"plan": "even", "even": "plan"}.get(now)
    best = min(SPLITS, key=price.__getitem__) if other is None else (other if price[other] * STAY < price[now] else now)
    return found[best], best


def padded_seconds(placement: Placement, loads: np.ndarray, cost: Cost) -> float:
    """Return the time of one padded exchange of the fullest layer; bytes, where no link's speed is known."""
    pairs = routing.pair_loads(placement, np.rint(loads).astype(np.int64))
    rows = fullest_pairs(pairs, placement.devices_per_node)
    rows = rows.each(lambda size: max(size, 1))
    _, inside, across = exchange_bytes(rows, placement.devices, placement.devices_per_node, cost.exchanged_bytes)
    try:
        return float(uniform_seconds(cost.cluster, inside, across, "the split of tokens"))
    except AbsentFigureError:
        return inside + across
