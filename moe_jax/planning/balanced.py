"""Equal work on every device, with the fewest and nearest replicas (ours), as far as mu replicas per device allow.

Letters: docs/notation.md.
"""

from __future__ import annotations

import bisect
import heapq

import numpy as np

from moe_jax.planning.balancer import Planner, home_loads, knob, register
from moe_jax.planning.placement import Placement
from moe_jax.planning.shares import level_holders, share_rows, with_quotas

SWEEPS = 8
TOLERANCE = 0.1  # the largest effect of one expert's error on a device's load, as a share of the mean load
MEAN_TO_STANDARD = 1.25  # standard over mean absolute error of a normal variable, sqrt(pi / 2)


@register("balanced", after_gate=True)
class BalancedPlanner(Planner):
    """Move the surplus of heavy devices into the gaps of light ones, own node first.

    A move takes all that the heavy device has above the mean or all that the light one lacks, so it brings one of the
    two to the mean: at most (devices above + devices below - 1) replicas a layer, as long as single experts are large
    enough.
    """

    headroom: float = knob(
        2.0, "after the gate, replicas per device on average, so that shares can follow the counts", least=0.0
    )

    def propose(self, loads, placement, cost):
        bare = super().propose(loads, placement, cost)
        totals = loads.sum(axis=1).astype(np.float64)
        moves, tokens, at_home = fill_gaps(totals, bare, cost.replica_slots)
        filled = bare.replace(replicas=moves)
        limits = (cost.replica_slots, self.config.headroom)
        if self.config.when == "after_gate":
            return with_quotas(add_spares(filled, totals, *limits), moves, tokens, at_home, loads)
        error = MEAN_TO_STANDARD * np.minimum(cost.load_error or 0.0, 1.0)
        spared = add_spares(filled, totals, *limits, np.broadcast_to(error, len(totals))) if np.any(error) else filled
        if len(spared.replicas) == len(moves):
            return with_quotas(filled, moves, tokens, at_home, loads)
        quota = level_holders(totals, spared, SWEEPS, np.reshape(error, (-1, 1)))
        return spared.replace(shares=share_rows(spared, quota, loads), rule="shares")

    def late_rule(self, shape, cost, groups):
        if self.config.when != "after_gate" or not shape.replica_slots:
            return None
        return "shares", {"sweeps": SWEEPS}

    def refine(self, loads, placement, cost):
        """Solve the shares for the true counts over the replicas that are there."""
        quota = level_holders(loads.sum(axis=1).astype(np.float64), placement, SWEEPS)
        return placement.replace(shares=share_rows(placement, quota, loads), rule="shares")


def fill_gaps(totals: np.ndarray, placement: Placement, mu: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Move loads so that device sums are equal: totals [L, E], homes only, at most mu replicas a device.

    Returns:
      (moves int [n, 3], rows (layer, expert, device), each once; tokens [n]; what homes keep [L, E]).
    """
    over = home_loads(totals, placement.home, placement.devices)
    over -= over.mean(axis=1, keepdims=True)
    small = 1e-9 * np.abs(totals).sum(axis=1) + 1e-12
    moves, at_home = [], totals.tolist()
    for layer, start in enumerate(over.tolist() if mu else ()):
        search = _Gaps(start, float(small[layer]), placement.devices_per_node, mu)
        of_device: dict[int, list[int]] = {}
        for expert, device in enumerate(placement.home[layer].tolist()):
            of_device.setdefault(device, []).append(expert)
        # Sources with a large gap on their own node go first, before a far source takes that gap; then the heaviest.
        heap = [(not search.has_near(d), -start[d], d) for d in of_device if start[d] > small[layer]]
        heapq.heapify(heap)
        while heap:
            far, _, source = heapq.heappop(heap)
            if not far and not search.has_near(source):
                heapq.heappush(heap, (True, -search.over[source], source))
                continue
            kept = at_home[layer]
            expert = max(of_device[source], key=kept.__getitem__)
            surplus = min(search.over[source], kept[expert])
            target = search.best(source, surplus)
            if target is None:
                break
            amount = min(surplus, -search.over[target])
            moves.append((layer, expert, target, amount))
            kept[expert] -= amount
            search.over[source] -= amount
            search.fill(target, amount)
            if search.over[source] > small[layer]:
                heapq.heappush(heap, (far, -search.over[source], source))
    rows = np.array([move[:3] for move in moves], np.int64).reshape(-1, 3)
    return rows, np.array([move[3] for move in moves]), np.array(at_home)


class _Gaps:
    """Keep what the light devices of a layer lack, for a search that fills one gap after the other."""

    def __init__(self, over: list[float], small: float, per_node: int, mu: int):
        """Take what devices have above the mean, [D]; gaps of at most `small` are none."""
        self.over, self.small, self.per_node, self.mu = over, small, per_node, mu
        self.replicas = [0] * len(over)
        # devices with a gap and more than one free slot, large gaps first; entries that no longer hold are passed over
        self.roomy: list[tuple[float, int]] = []
        self.last: list[tuple[float, int]] = []  # (gap, -device), rising, of those whose last slot is free
        self.near = [0] * (len(over) // per_node)  # roomy devices of each node
        for device in range(len(over)):
            self._enter(device)

    def _enter(self, device: int) -> None:
        gap, free = -self.over[device], self.mu - self.replicas[device]
        if gap > self.small and free > 1:
            heapq.heappush(self.roomy, (-gap, device))
            self.near[device // self.per_node] += 1
        elif gap > self.small and free == 1:
            bisect.insort(self.last, (gap, -device))

    def has_near(self, device: int) -> bool:
        """Say whether the device's node has a gap with more than one free slot."""
        return self.near[device // self.per_node] > 0

    def fill(self, device: int, amount: float) -> None:
        """Put so many tokens into a device's gap."""
        if self.mu - self.replicas[device] > 1:
            self.near[device // self.per_node] -= 1
        else:
            self.last.pop(bisect.bisect_left(self.last, (-self.over[device], -device)))
        self.over[device] += amount
        self.replicas[device] += 1
        self._enter(device)

    def best(self, source: int, surplus: float) -> int | None:
        """Return the device to move to, None where no gap is left.

        A last free slot should close its gap: what stays open there cannot be filled. Then the own node, then the
        largest gap, then the lowest id.
        """
        first = source - source % self.per_node
        found = []
        for device in range(first, first + self.per_node):
            gap, free = -self.over[device], self.mu - self.replicas[device]
            if gap > self.small and free:
                found.append((free > 1 or gap <= surplus, True, gap, -device))
        if not found or not max(found)[0]:
            while self.roomy and not self._is_roomy(*self.roomy[0]):
                heapq.heappop(self.roomy)
            found += [(True, False, -self.roomy[0][0], -self.roomy[0][1])] if self.roomy else []
            place = bisect.bisect_right(self.last, (surplus, 1))
            found += [(True, False, *self.last[place - 1])] if place else []
            found += [(False, False, *self.last[-1])] if self.last else []
        return -max(found)[3] if found else None

    def _is_roomy(self, negative: float, device: int) -> bool:
        return self.over[device] == negative and self.mu - self.replicas[device] > 1 and -negative > self.small


def add_spares(
    placement: Placement, totals: np.ndarray, mu: int, headroom: float, error: np.ndarray | None = None
) -> Placement:
    """Replicate experts with most load per holder until devices hold `headroom` replicas on average.

    With spares the holders of different experts overlap, and shares can follow counts that were not predicted. Where
    shares are fixed ahead, an expert's error falls on more devices, each of which gets less of it: other shares alone,
    flat as the error asks, gained nothing on a recorded trace (largest over mean load 1.265), spares 1.224.

    Args:
      error: [L], relative error of the totals: only experts whose error moves a holder's load by more than `TOLERANCE`
        of the mean load are replicated; None replicates any.

    Returns:
      The placement with the spares; devices with fewest replicas first, of those the expert's own node.
    """
    devices, per_node, (pair, device) = placement.devices, placement.devices_per_node, placement.holders
    start, spares = np.searchsorted(pair, np.arange(placement.home.size + 1)), []
    for layer, total in enumerate(totals):
        mine = placement.replicas[placement.replicas[:, 0] == layer, 2]
        room = (2 * (mu - np.bincount(mine, minlength=devices))).astype(np.int16)  # 0 where no slot is free
        place = layer * placement.experts
        holders = np.diff(start[place : place + placement.experts + 1]).tolist()
        heap = [(-weight / many, e) for e, (weight, many) in enumerate(zip(total.tolist(), holders, strict=True))]
        heapq.heapify(heap)
        least, open_to = TOLERANCE * total.sum() / devices, {}
        for _ in range(int(headroom * devices) - len(mine)):
            while heap and holders[heap[0][1]] == devices:
                heapq.heappop(heap)
            if not heap or error is not None and not error[layer] * total[heap[0][1]] / holders[heap[0][1]] > least:
                break
            expert = heap[0][1]
            if expert not in open_to:  # 1 where the expert is not held
                open_to[expert] = np.ones(devices, room.dtype)
                open_to[expert][device[start[place + expert] : start[place + expert + 1]]] = 0
            score = room * open_to[expert]
            home = int(placement.home[layer, expert])
            near = score[home - home % per_node :][:per_node]
            near += near > 0
            target = int(score.argmax())
            if not score[target]:
                break
            spares.append((layer, expert, target))
            open_to[expert][target] = 0
            room[target] -= 2
            holders[expert] += 1
            heapq.heapreplace(heap, (-total[expert] / holders[expert], expert))
    return placement.replace(replicas=np.concatenate([placement.replicas, np.reshape(spares, (-1, 3))]))
