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
from moe_jax.planner.relabel import relabelled


def shard_homes(totals: np.ndarray, placement: Placement, tau: int) -> Placement:
    """Return the placement with new homes and no replicas, or the same placement if nothing changes.

    Args:
      totals: [L, E], expert loads.
      tau: overlap degree; the top tau experts of a layer are placed last.

    Of equal devices each takes the part that moves fewest experts (`relabelled`, ours).

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
    _fill(home, order[:, :tau], totals, free, placement.devices_per_node)
    home = relabelled(home, placement.home, devices, placement.devices_per_node)
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


def _fill(home: np.ndarray, hot: np.ndarray, totals: np.ndarray, free: np.ndarray, per_node: int) -> None:
    """Home the overlappable experts evenly: of each layer about as many on every node, and on every device of it.

    The paper places them anywhere. What a transfer sends grows with the most hot experts that one device, or one node,
    homes in a layer, so every layer takes an equal part of what room each node and device has left. Within that,
    heaviest first, each goes to its layer's least-loaded device: this also serves steps without replicas.

    Args:
      hot: [L, tau], experts by falling load; free: [D], places left, L tau in all.
    """
    layers, tau = hot.shape
    for layer in range(layers):
        left = layers - layer
        of_node = _even_part(free.reshape(-1, per_node).sum(axis=1), left, tau)
        room = np.concatenate(
            [_even_part(part, left, count) for part, count in zip(free.reshape(-1, per_node), of_node, strict=True)]
        )
        free -= room
        placed = home[layer] >= 0
        load = np.bincount(home[layer][placed], totals[layer][placed], len(free))
        for expert in hot[layer].tolist():
            device = int(np.where(room > 0, load, np.inf).argmin())
            home[layer, expert] = device
            load[device] += totals[layer, expert]
            room[device] -= 1


def _even_part(places: np.ndarray, parts: int, count: int) -> np.ndarray:
    """Return `count` of `places` [n], from each its part of 1 / parts, rounded down or up."""
    part = places // parts
    rest = places - part * parts
    part[np.argsort(-rest, kind="stable")[: count - part.sum()]] += 1
    return part
