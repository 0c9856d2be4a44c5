"""FlexMoE's dynamic placement: standing replicas that grow, shrink and migrate while the predicted time falls.

Homes stay; a load is taken as split evenly over the holders. Layers whose gain would not pay for moving state stay.

Letters: docs/notation.md; mu replicas of a device.
"""

from __future__ import annotations

import numpy as np

from moe_jax.planning.balancer import Planner, register
from moe_jax.planning.placement import within_group

HORIZON = 100  # steps over which a gain must pay for the state of experts that move


@register("flexmoe")
class FlexMoePlanner(Planner):
    """Expand the expert with most load per holder where time falls most, then migrate.

    Where a device has no free slot, its replica with least load is dropped (shrink).

    Source: FlexMoE (SIGMOD 2023), expand, shrink and migrate; the paper's code is not public.
    """

    most_devices = 1024

    def propose(self, loads, placement, cost):
        totals = np.asarray(loads, np.float64).sum(axis=1)
        start = placement.replace(shares=None, rule="nearest")
        homes, mu = start.homes, cost.replica_slots
        replicas = start.holds & ~homes
        if replicas.sum(axis=1).max(initial=0) > mu:  # drop the lightest ones
            order = np.argsort(-np.where(replicas, totals[:, :, None], -1.0), axis=1, kind="stable")
            replicas &= np.argsort(order, axis=1) < mu
        held = replicas | homes
        search = _Search(held, homes, totals, mu)
        before = search.load.max(axis=1)
        for move in (search.expand, search.migrate):
            for _ in range(placement.devices):
                if not move():
                    break
        gain = 3 * (before - search.load.max(axis=1)) / cost.prices.tokens_per_second()
        new = search.held & ~start.holds
        moved = cost.prices.moves(new.sum(axis=1).max(axis=1))
        pays = gain * cost.microbatches * HORIZON > moved
        held = np.where(pays[:, None, None], search.held, held)
        return start.replace(replicas=np.argwhere(held & ~homes))


class _Search:
    """Hold one search over all layers: who holds what, and the loads that follow."""

    def __init__(self, held: np.ndarray, homes: np.ndarray, totals: np.ndarray, mu: int):
        self.held, self.homes, self.totals, self.mu = held.copy(), homes, totals, mu
        self.rows = np.arange(len(totals))
        self.count = held.sum(axis=2)
        self.load = (held * (totals / self.count)[:, :, None]).sum(axis=1)
        replica = held & ~homes
        self.replicas = replica.sum(axis=1)
        self.slots = np.full((len(totals), held.shape[2], max(mu, 1)), -1)  # [L, D, mu] expert in each replica slot
        layer, device, expert = np.nonzero(replica.transpose(0, 2, 1))
        self.slots[layer, device, within_group(layer * held.shape[2] + device)] = expert

    def expand(self) -> bool:
        """Give the expert with most load per holder one replica more, on the device where the time falls most.

        Say whether the heaviest load falls by it in any layer.
        """
        rows, per_holder = self.rows, self.totals / self.count
        full = self.count == self.held.shape[2]
        expert = np.where(full, -1.0, per_holder).argmax(axis=1)
        mine = self.held[rows, expert]
        smaller = self.totals[rows, expert] / (self.count[rows, expert] + 1)
        rest = self.load - mine * (per_holder[rows, expert] - smaller)[:, None]
        # the replica with least load on each device (-1: none), and the load that it takes along: [L, D] each
        usable = (self.slots >= 0) & (self.slots != expert[:, None, None])
        part = np.where(usable, per_holder[rows[:, None, None], self.slots], np.inf)
        at = part.argmin(axis=2)[:, :, None]
        saved = np.take_along_axis(part, at, axis=2)[:, :, 0]
        victim = np.where(np.isfinite(saved), np.take_along_axis(self.slots, at, axis=2)[:, :, 0], -1)
        crowded = self.replicas >= self.mu
        trial = rest + smaller[:, None] - np.where(crowded & np.isfinite(saved), saved, 0.0)
        allowed = ~mine & (~crowded | (victim >= 0)) & (self.mu > 0)
        device = np.where(allowed, trial, np.inf).argmin(axis=1)
        evicted = np.where(crowded[rows, device], victim[rows, device], -1)

        new_expert = mine.copy()
        load = self.load - new_expert * per_holder[rows, expert][:, None]
        new_expert[rows, device] = True
        load += new_expert * (self.totals[rows, expert] / new_expert.sum(axis=1))[:, None]
        out, shrinks = np.maximum(evicted, 0), evicted >= 0
        new_out = self.held[rows, out].copy()
        load -= np.where(shrinks[:, None], new_out * per_holder[rows, out][:, None], 0.0)
        new_out[rows, device] &= ~shrinks
        per = self.totals[rows, out] / np.maximum(new_out.sum(axis=1), 1)
        load += np.where(shrinks[:, None], new_out * per[:, None], 0.0)
        better = allowed[rows, device] & (load.max(axis=1) < self.load.max(axis=1) * (1 - 1e-9))
        self.held[rows[better], expert[better]] = new_expert[better]
        self.count[rows[better], expert[better]] += 1
        shrunk, grown = better & shrinks, better & ~shrinks
        self.held[rows[shrunk], out[shrunk]] = new_out[shrunk]
        self.count[rows[shrunk], out[shrunk]] -= 1
        self._swap_slot(rows[better], device[better], evicted[better], expert[better])
        self.replicas[rows[grown], device[grown]] += 1
        self.load = np.where(better[:, None], load, self.load)
        return bool(better.any())

    def migrate(self) -> bool:
        """Move one replica of the heaviest device to the lightest device with room."""
        rows = self.rows
        source = self.load.argmax(axis=1)
        replica = self.held[rows, :, source] & ~self.homes[rows, :, source]
        free = np.where(self.replicas < self.mu, self.load, np.inf)
        target = free.argmin(axis=1)
        part = self.totals / self.count
        fits = replica & ~self.held[rows, :, target] & np.isfinite(free[rows, target])[:, None]
        peak = np.maximum(self.load[rows, source][:, None] - part, self.load[rows, target][:, None] + part)
        expert = np.where(fits, peak, np.inf).argmin(axis=1)
        better = fits[rows, expert] & (peak[rows, expert] < self.load[rows, source] * (1 - 1e-9))
        layer, e, a, b = rows[better], expert[better], source[better], target[better]
        self.held[layer, e, a], self.held[layer, e, b] = False, True
        self.load[layer, a] -= part[layer, e]
        self.load[layer, b] += part[layer, e]
        self.replicas[layer, a] -= 1
        self.replicas[layer, b] += 1
        self._swap_slot(layer, a, e, np.full(len(layer), -1))
        self._swap_slot(layer, b, np.full(len(layer), -1), e)
        return bool(better.any())

    def _swap_slot(self, layer: np.ndarray, device: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
        """Put `new` where `old` is in the replica slots of these devices (-1: an empty slot)."""
        at = (self.slots[layer, device] == old[:, None]).argmax(axis=1)
        self.slots[layer, device, at] = new
