"""Which of equal devices takes which part of new homes, so that few experts move at a reshard.

Inputs: new homes and old ones. Outputs: the new homes with devices exchanged: those of a node among themselves, and
whole nodes. First in all layers at once; then in single layers, among devices that home as many experts of it. So every
layer keeps the loads and the transfers that the new homes were made for, and every device as many rows of the bank.

Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np


def relabelled(home_new: np.ndarray, home_old: np.ndarray, devices: int, devices_per_node: int) -> np.ndarray:
    """Return the new homes with labels under which more experts stay where they are, never fewer.

    Args:
      home_new, home_old: int [L, E]; devices: D; devices_per_node: Dn.

    Returns:
      int [L, E]; home_new as it is where it agrees already.
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
