"""Homes for freely packed replicas, so that every device homes equally many experts over all layers.

Inputs: how many replicas of each expert each device holds. Outputs: a home among the holders, Rb = L E / D on every
device, so that parameters and optimizer state fit the bank. Where replicas leave no such choice, single replicas change
places with a replica of about equal load on a device that homes too few.

Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np


def choose_homes(count: np.ndarray, totals: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose homes: count int [L, E, D], totals [L, E], old homes [L, E] -> (home [L, E], count [L, E, D] after swaps).

    An expert stays at home where the packing allows it.
    """
    held = count > 0
    layers, experts, devices = count.shape
    single = held.sum(axis=2) == 1
    home = np.where(single, held.argmax(axis=2), -1).astype(np.int32)
    homes = np.bincount(home[single], minlength=devices)
    limit = -(-layers * experts // devices)
    in_layer = (single[:, :, None] & held).sum(axis=1)
    for layer, expert in np.argwhere(~single):
        holders = np.flatnonzero(held[layer, expert])
        mine = int(old[layer, expert])
        if held[layer, expert, mine] and homes[mine] < limit and in_layer[layer, mine] < experts // devices:
            device = mine
        else:
            # Even in the layer first, so that home slots and replica slots stay few; then over all layers.
            device = int(holders[np.lexsort((homes[holders], in_layer[layer, holders]))[0]])
        home[layer, expert] = device
        homes[device] += 1
        in_layer[layer, device] += 1
    while homes.max() > limit and _shift_chain(home, held, homes, limit):
        pass
    if homes.max() > limit:
        count = count.copy()
        _swap_positions(home, count, homes, totals, limit)
    return home, count


def _shift_chain(home: np.ndarray, held: np.ndarray, homes: np.ndarray, limit: int) -> bool:
    """Move homes along a chain of holders from an overfull device to one with room; say whether there was one."""
    start = int(homes.argmax())
    came: dict[int, tuple[int, int, int] | None] = {start: None}
    queue = [start]
    for device in queue:
        layer, expert = np.nonzero(home == device)
        reach = held[layer, expert]  # [n, D]
        for other in np.flatnonzero(reach.any(axis=0)).tolist():
            if other in came:
                continue
            first = int(reach[:, other].argmax())
            came[other] = (device, int(layer[first]), int(expert[first]))
            if homes[other] < limit:
                homes[start] -= 1
                homes[other] += 1
                step = came[other]
                while step is not None:
                    previous, at_layer, at_expert = step
                    home[at_layer, at_expert] = other
                    other, step = previous, came[previous]
                return True
            queue.append(other)
    return False


def _swap_positions(home: np.ndarray, count: np.ndarray, homes: np.ndarray, totals: np.ndarray, limit: int) -> None:
    """Swap experts homed on overfull devices with replicas on the device that homes fewest, nearest loads first."""
    load = totals / np.maximum(count.sum(axis=2), 1)
    while homes.max() > limit:
        giver, best = int(homes.argmax()), None
        for taker in np.argsort(homes, kind="stable").tolist():
            if best is not None or homes[taker] >= limit:
                break
            mine = (home == giver) & (count[:, :, taker] == 0)
            spare = count[:, :, taker] > (home == taker)
            (at, give), (there, take) = np.nonzero(mine), np.nonzero(spare)
            if not len(at) or not len(there):
                continue
            gap = np.abs(load[at, give][:, None] - load[there, take])
            gap[at[:, None] != there] = np.inf  # swaps are within a layer only
            i, j = np.unravel_index(gap.argmin(), gap.shape)
            if np.isfinite(gap[i, j]):
                best = (int(at[i]), int(give[i]), int(take[j]), taker)
        if best is None:
            return
        layer, moved, returned, taker = best
        count[layer, moved, giver] -= 1
        count[layer, moved, taker] += 1
        count[layer, returned, taker] -= 1
        count[layer, returned, giver] += 1
        home[layer, moved] = taker
        homes[giver] -= 1
        homes[taker] += 1
