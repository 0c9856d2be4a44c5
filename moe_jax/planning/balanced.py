"""Equal work on every device, with the fewest and nearest replicas (ours), as far as mu replicas per device allow.

Letters: docs/notation.md.
"""

from __future__ import annotations

import bisect
import heapq

import numpy as np

from moe_jax.planning.balancer import Planner, home_loads, register
from moe_jax.planning.placement import Placement
from moe_jax.planning.shares import level_holders, share_rows, with_quotas

SWEEPS = 8
SPARES = 2  # replicas of a device on average, spare ones included, over which shares can follow counts not yet known
TOLERANCE = 0.1  # the largest effect of one expert's error on a device's load, as a share of the mean load
MEAN_TO_STANDARD = 1.25  # standard over mean absolute error of a normal variable, sqrt(pi / 2)


@register("balanced", after_gate=True)
class BalancedPlanner(Planner):
    """Move the surplus of heavy devices into the gaps of light ones, own node first.

    A move takes all that the heavy device has above the mean or all that the light one lacks, so it brings one of the
    two to the mean: at most (devices above + devices below - 1) replicas a layer, as long as single experts are large
    enough.
    """

    def propose(self, loads, placement, cost):
        bare = super().propose(loads, placement, cost)
        totals = loads.sum(axis=1).astype(np.float64)
        moves, tokens, at_home = fill_gaps(totals, bare, cost.replica_slots)
        filled = bare.replace(replicas=moves)
        if self.config.when == "after_gate":
            return with_quotas(add_spares(filled, totals, cost.replica_slots), moves, tokens, at_home, loads)
        error = MEAN_TO_STANDARD * np.minimum(cost.load_error or 0.0, 1.0)
        spread = np.broadcast_to(error, len(totals))
        spared = add_spares(filled, totals, cost.replica_slots, spread) if np.any(error) else filled
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
    at_home, moves = totals.tolist(), []
    for layer, homes in enumerate(placement.home.tolist() if mu else ()):
        search = _Gaps(over[layer].tolist(), float(small[layer]), placement.devices_per_node, mu)
        kept, of_device = at_home[layer], {}
        for expert, device in enumerate(homes):
            of_device.setdefault(device, []).append(expert)
        while (source := search.source()) is not None:
            expert = max(of_device[source], key=kept.__getitem__)
            target, amount = search.move(source, kept[expert])
            if target is None:
                break
            kept[expert] -= amount
            moves.append((layer, expert, target, amount))
    rows = np.array([move[:3] for move in moves], np.int64).reshape(-1, 3)
    return rows, np.array([move[3] for move in moves]), np.array(at_home)


class _Gaps:
    """Keep a layer's heavy devices and the gaps of its light ones in order, for a search that fills gap after gap.

    Lists are of (tokens, -device), rising, so that of equal ones the lowest id is the last.
    """

    def __init__(self, over: list[float], small: float, per_node: int, mu: int):
        """Take what devices have above the mean, [D]; what is not above `small` is neither heavy nor a gap."""
        self.over, self.small, self.per_node, self.free = over, small, per_node, [mu] * len(over)
        gaps = sorted((-tokens, -device) for device, tokens in enumerate(over) if tokens < -small)
        self.gaps = [gaps if slots == min(mu, 2) else [] for slots in range(3)]  # by free slots; two stand for more
        self.roomy = [0] * (len(over) // per_node)  # gaps of each node with more than one free slot
        for _, device in self.gaps[2]:
            self.roomy[-device // per_node] += 1
        self.heavy: tuple[list, list] = ([], [])  # of nodes without and with such gaps
        for tokens, device in sorted((tokens, -device) for device, tokens in enumerate(over) if tokens > small):
            self.heavy[self.roomy[-device // per_node] > 0].append((tokens, device))

    def source(self) -> int | None:
        """Return the device to take from, None where all are even.

        Those with a large gap on their own node go first, before a far one takes that gap; then the heaviest.
        """
        far, near = self.heavy
        return -_last(near, self._heaviest())[1] if near else -far[-1][1] if far else None

    def _heaviest(self) -> float:
        return max(heavy[-1][0] for heavy in self.heavy if heavy)

    def move(self, source: int, most: float) -> tuple[int | None, float]:
        """Move tokens from a heavy device, at most so many: -> (target, tokens), None where no gap is left.

        A last free slot should close its gap: what stays open there cannot be filled. Then the own node, then the
        largest gap, then the lowest id.
        """
        surplus, (_, last, roomy) = min(self.over[source], most), self.gaps
        span = self._heaviest() + max((gaps[-1][0] for gaps in self.gaps if gaps), default=0.0) + 1.0
        found = [
            _last(roomy, 2 * span),
            _last(last, 2 * span, bisect.bisect_right(last, (surplus, 1))),
            _last(last, 0.0),
        ]
        first = source - source % self.per_node
        for device in range(first, first + self.per_node):
            gap, free = -self.over[device], self.free[device]
            if gap > self.small and free:
                found.append((gap + span * (2 * (free > 1 or gap <= surplus) + 1), -device))
        target = -max(found)[1]
        if target < 0:
            return None, 0.0
        amount = min(surplus, -self.over[target])
        heavy = self.heavy[self.roomy[first // self.per_node] > 0]
        del heavy[bisect.bisect_left(heavy, (self.over[source], -source))]
        gaps, node = self.gaps[min(self.free[target], 2)], target // self.per_node
        del gaps[bisect.bisect_left(gaps, (-self.over[target], -target))]
        before = self.roomy[node]
        self.roomy[node] -= gaps is roomy
        self.over[source] -= amount
        self.over[target] += amount
        self.free[target] -= 1
        if self.over[target] < -self.small:
            gaps = self.gaps[min(self.free[target], 2)]
            bisect.insort(gaps, (-self.over[target], -target))
            self.roomy[node] += gaps is roomy
        if before and not self.roomy[node]:  # its heavy devices have no such gap near any longer
            far, near = self.heavy
            for item in [item for item in near if -item[1] // self.per_node == node]:
                near.remove(item)
                bisect.insort(far, item)
        if self.over[source] > self.small:
            bisect.insort(self.heavy[self.roomy[first // self.per_node] > 0], (self.over[source], -source))
        return target, amount


def _last(ordered: list[tuple[float, int]], more: float, end: int | None = None) -> tuple[float, int]:
    """Return (tokens + more, -device) of the most tokens, and the lowest id of all whose sum is rounded to the same."""
    end = len(ordered) if end is None else end
    if not end:
        return -1.0, 1
    most, device = ordered[end - 1][0] + more, ordered[end - 1][1]
    while end and ordered[end - 1][0] + more == most:
        device = max(device, ordered[end - 1][1])
        end = bisect.bisect_left(ordered, (ordered[end - 1][0],), 0, end)  # past all that have as many
    return most, device


def add_spares(placement: Placement, totals: np.ndarray, mu: int, error: np.ndarray | None = None) -> Placement:
    """Replicate experts with most load per holder until devices hold `SPARES` replicas on average.

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
        for _ in range(SPARES * devices - len(mine)):
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
