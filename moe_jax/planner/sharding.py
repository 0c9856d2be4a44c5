"""Hecate's heterogeneous sharding: which device homes which expert, over all layers together.

Inputs: expert loads and the current homes. Outputs: homes with Rb = L E / D experts on every device, 0..E of any one
layer. Experts that are not materialized are balanced first; the overlappable ones get the homes that are left.

Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.errors import UserError
from moe_jax.placement import Placement
from moe_jax.planner.contract import falling


def shard_homes(totals: np.ndarray, placement: Placement, tau: int) -> Placement:
    """Return the placement with new homes and no replicas, or the same placement if nothing changes.

    Args:
      totals: [L, E], expert loads.
      tau: overlap degree; the top tau experts of a layer are placed last.

    Source: Hecate, algorithm 2.
    """
    layers, experts, devices = placement.layers, placement.experts, placement.devices
    if layers * experts % devices:
        raise UserError(
            f"layers ({layers}) x experts ({experts}) must be a multiple of devices ({devices}) for even memory; "
            "set PlannerConfig.shard_every = 0"
        )
    free = np.full(devices, layers * experts // devices)
    home = np.full((layers, experts), -1, np.int32)
    order = falling(totals)
    rest = order[:, tau:]
    heaviest = np.take_along_axis(totals, rest[:, :1], axis=1)[:, 0] if rest.size else np.zeros(layers)
    for layer in falling(heaviest) if rest.size else ():
        _place_layer(home[layer], rest[layer], totals[layer], free, placement.devices_per_node)
    _fill(home, order[:, :tau], totals, free)
    return placement if (home == placement.home).all() else placement.replace(home=home, replicas=None, shares=None)


def _place_layer(home: np.ndarray, experts: np.ndarray, loads: np.ndarray, free: np.ndarray, per_node: int) -> None:
    """Put one layer's experts, heaviest first, on the least-loaded node, then its least-loaded device."""
    devices = len(free)
    device_load, node_load = np.zeros(devices), np.zeros(devices // per_node)
    node_free = free.reshape(-1, per_node).sum(axis=1)
    for expert in experts.tolist():
        # Least loaded first, of equals the one with fewer free slots, of those the lowest id.
        node = int(np.lexsort((node_free, np.where(node_free > 0, node_load, np.inf)))[0])
        mine = slice(node * per_node, (node + 1) * per_node)
        slots = free[mine]
        device = node * per_node + int(np.lexsort((slots, np.where(slots > 0, device_load[mine], np.inf)))[0])
        home[expert] = device
        free[device] -= 1
        node_free[node] -= 1
        device_load[device] += loads[expert]
        node_load[node] += loads[expert]


def _fill(home: np.ndarray, order: np.ndarray, totals: np.ndarray, free: np.ndarray) -> None:
    """Home the overlappable experts: heaviest first, each on its layer's least-loaded device that has room.

    The paper places them anywhere; this choice also serves steps in which they are not materialized.
    """
    layers = np.arange(len(home))
    load = np.zeros((len(home), len(free)))
    placed = home >= 0
    layer, expert = np.nonzero(placed)
    np.add.at(load, (layer, home[layer, expert]), totals[layer, expert])
    for rank in range(order.shape[1]):
        for at in layers[np.argsort(-totals[layers, order[:, rank]], kind="stable")].tolist():
            device = int(np.where(free > 0, load[at], np.inf).argmin())
            home[at, order[at, rank]] = device
            load[at, device] += totals[at, order[at, rank]]
            free[device] -= 1
