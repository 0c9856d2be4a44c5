"""Hecate's heterogeneous sharding: which device homes which expert, over all layers together.

Every device homes Rb = L E / D experts, 0..E of any one layer. Experts that are not materialized are balanced first;
the overlappable ones get the homes that are left. Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.errors import UserError
from moe_jax.planning.balancer import falling
from moe_jax.planning.placement import Placement


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
    per_node = placement.devices_per_node
    free = np.full(devices, layers * experts // devices)
    home = np.full((layers, experts), -1, np.int32)
    order = falling(totals)
    rest, hot = order[:, tau:], order[:, :tau]
    # The rest, heaviest layer and expert first: each on the least-loaded node, then its least-loaded device.
    heaviest = np.take_along_axis(totals, rest[:, :1], axis=1)[:, 0] if rest.size else np.zeros(0)
    for layer in falling(heaviest):
        device_load, node_load = np.zeros(devices), np.zeros(placement.nodes)
        node_free = free.reshape(-1, per_node).sum(axis=1)
        for expert in rest[layer].tolist():
            # of equals the one with fewer free slots, of those the lowest id
            node = int(np.lexsort((node_free, np.where(node_free > 0, node_load, np.inf)))[0])
            mine = slice(node * per_node, (node + 1) * per_node)
            slots = free[mine]
            device = node * per_node + int(np.lexsort((slots, np.where(slots > 0, device_load[mine], np.inf)))[0])
            home[layer, expert] = device
            free[device] -= 1
            node_free[node] -= 1
            device_load[device] += totals[layer, expert]
            node_load[node] += totals[layer, expert]
    # The overlappable experts, which the paper places anywhere. What a transfer sends grows with the most hot experts
    # that one device, or one node, homes in a layer, so every layer takes an equal part of what room each node and
    # device has left. Within that, heaviest first, each goes to its layer's least-loaded device: this also serves steps
    # without replicas.
    for layer in range(layers):
        left = layers - layer
        of_node = _even_part(free.reshape(-1, per_node).sum(axis=1), left, hot.shape[1])
        room = np.concatenate(
            [_even_part(part, left, count) for part, count in zip(free.reshape(-1, per_node), of_node, strict=True)]
        )
        free -= room
        placed = home[layer] >= 0
        load = np.bincount(home[layer][placed], totals[layer][placed], devices)
        for expert in hot[layer].tolist():
            device = int(np.where(room > 0, load, np.inf).argmin())
            home[layer, expert] = device
            load[device] += totals[layer, expert]
            room[device] -= 1
    home = relabelled(home, placement.home, devices, per_node)
    return placement if (home == placement.home).all() else placement.replace(home=home, replicas=None, shares=None)


def _even_part(places: np.ndarray, parts: int, count: int) -> np.ndarray:
    """Return `count` of `places` [n], from each its part of 1 / parts, rounded down or up."""
    part = places // parts
    rest = places - part * parts
    part[np.argsort(-rest, kind="stable")[: count - part.sum()]] += 1
    return part


def relabelled(home_new: np.ndarray, home_old: np.ndarray, devices: int, devices_per_node: int) -> np.ndarray:
    """Return the new homes with labels under which more experts stay where they are, never fewer.

    Homes are int [L, E]. Devices of a node are exchanged among themselves, and whole nodes: first in all layers at
    once, then in single layers among devices that home as many experts of it. So every layer keeps the loads and the
    transfers that the new homes were made for, and every device as many rows of the bank.
    """
    home = _exchanged(home_new, home_old, devices, devices_per_node, np.zeros(devices, int))
    for layer, (new, old) in enumerate(zip(home, home_old, strict=True)):
        home[layer] = _exchanged(new, old, devices, devices_per_node, np.bincount(new, minlength=devices))
    return home


def _exchanged(new: np.ndarray, old: np.ndarray, devices: int, per_node: int, kind: np.ndarray) -> np.ndarray:
    """Return new homes under the permutation of nodes and of devices on them that agrees most with the old ones.

    Args:
      new, old: int [...]; kind: int [D]; a device takes the place of one of its own kind only.
    """
    nodes = devices // per_node
    agreement = np.bincount(new.ravel() * devices + old.ravel(), minlength=devices * devices)
    forbidden = -new.size * devices  # one of these outweighs all that could agree
    value = np.where(kind[:, None] == kind, agreement.reshape(devices, devices), forbidden)
    blocks = value.reshape(nodes, per_node, nodes, per_node).swapaxes(1, 2)
    kinds = np.sort(kind.reshape(nodes, per_node), axis=1)
    inside = np.zeros((nodes, nodes, per_node), np.int64)  # member to member, for each pair of nodes
    staying = np.full((nodes, nodes), forbidden)
    for pair in np.argwhere((kinds[:, None] == kinds).all(axis=2)):
        at = tuple(pair)
        inside[at] = best_assignment(blocks[at])
        staying[at] = blocks[at][np.arange(per_node), inside[at]].sum()
    to_node = best_assignment(staying)
    label = to_node[:, None] * per_node + inside[np.arange(nodes), to_node]
    return label.ravel()[new].astype(new.dtype)


def best_assignment(value: np.ndarray) -> np.ndarray:
    """Return column int [n] of each row, every column once, with the largest sum of value [n, n].

    The Hungarian method: rows join one by one along the shortest augmenting path under potentials, O(n^3). Of equal
    assignments an earlier row keeps the lower column.
    """
    size = len(value)
    cost = (value.max(initial=0) - value) * (size + 1) + (np.arange(size)[:, None] != np.arange(size))  # ties: as it is
    row_of = np.full(size + 1, -1)  # of each column; the last is the root of a search
    u, v = np.zeros(size, np.int64), np.zeros(size + 1, np.int64)
    far = np.iinfo(np.int64).max // 2
    for row in range(size):
        column, row_of[size] = size, row
        least, before, used = np.full(size + 1, far), np.full(size + 1, size), np.zeros(size + 1, bool)
        while row_of[column] >= 0:
            used[column] = True
            at = row_of[column]
            slack = cost[at] - u[at] - v[:size]
            better = ~used[:size] & (slack < least[:size])
            least[:size][better], before[:size][better] = slack[better], column
            following = int(np.where(used[:size], far, least[:size]).argmin())
            step = least[following]
            u[row_of[used]] += step
            v[used] -= step
            least[~used] -= step
            column = following
        while column != size:
            row_of[column] = row_of[before[column]]
            column = before[column]
    column_of = np.empty(size, np.int64)
    column_of[row_of[:size]] = np.arange(size)
    return column_of
