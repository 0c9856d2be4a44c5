"""Pro-Prophet's lightweight placements: the heaviest device's heaviest expert goes to all devices but a few, greedily.

Inputs: loads, homes, cost. Outputs: the homes with some experts replicated on subsets of devices, rule `home`.

Letters: docs/notation.md; H [L, D] computed, R [L, D] received, s experts chosen so far.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.errors import UserError
from moe_jax.overlap import Prefetch
from moe_jax.placement import Placement
from moe_jax.placement.transfer_sizes import RunningSizes
from moe_jax.planner.contract import PlannerBase, home_loads, own_tokens, rows_of
from moe_jax.planner.cost import Cost
from moe_jax.planner.registry import balancer, knob

MOST_TRIES = 16  # numbers of skipped devices that a search compares, from none to all


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProProphetKnobs:
    """The knobs of Pro-Prophet; their names in the paper are n and alpha."""

    skipped_devices: int | str = knob(
        "search", "devices left out per expert, those with fewest of its tokens; 'search' tries every number"
    )
    balance_threshold: float = knob(0.5, "loads whose spread is below this part of the mean I / D are even")
    crossing: int = knob(
        3, "experts that one node sends one other in a layer, at most: what transfers by node grow with"
    )
    scheduler: bool = knob(True, "cost model with the scheduler: transfers hide behind computation")

    def check(self):
        if self.skipped_devices != "search":
            self.whole("skipped_devices", 0)
        self.whole("crossing", 1)
        if self.balance_threshold <= 0:
            raise UserError(
                f"PlannerConfig.balance_threshold ({self.balance_threshold}) must be above 0; 0.5 is the default"
            )


@balancer("pro_prophet", knobs=ProProphetKnobs)
class ProProphetPlanner(PlannerBase):
    """Search placements greedily and keep the prefix with the least predicted time.

    Source: Pro-Prophet, algorithm 1, equations 6 to 8. Its n is `skipped_devices`, its alpha `balance_threshold`.

    The paper states no n, and fewer targets are what it calls lightweight: every number is tried by default. Its
    equation 7 compares max H - min H with alpha I / E, and has one expert a device, so that I / E is a device's mean
    load. Where E differs from D the two differ: here the bound is alpha I / D, the mean of what is compared. With E =
    2 D the formula as printed asks for twice as even loads at the same alpha.
    """

    schedule = "pro_prophet"

    def propose(self, loads, placement, cost):
        loads = np.asarray(loads, np.float64)
        if not self.config.scheduler:
            cost = dataclasses.replace(cost, prefetch=Prefetch())
        most, given = placement.devices - 1, self.config.skipped_devices
        if isinstance(given, str):
            tries = np.unique(np.linspace(0, most, min(MOST_TRIES, most + 1)).round().astype(int)).tolist()
        else:
            tries = [min(given, most)]
        best_time, best_kept = self._search(loads, placement, cost, tries[0])
        for skipped in tries[1:]:
            time, kept = self._search(loads, placement, cost, skipped)
            better = time < best_time
            best_time = np.where(better, time, best_time)
            best_kept = np.where(better[:, None, None], kept, best_kept)
        return placement.replace(replicas=rows_of(best_kept), shares=None, rule="home")

    def _search(
        self, loads: np.ndarray, placement: Placement, cost: Cost, skipped: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the least time [L] and the replicas behind it, bool [L, E, D]."""
        home, devices, layers = placement.home, placement.devices, np.arange(placement.layers)
        totals, own = loads.sum(axis=1), own_tokens(loads, home)
        computed, received = home_loads(totals, home, devices), home_loads(totals - own, home, devices)
        threshold = self.config.balance_threshold * totals.sum(axis=1) / devices
        unused = np.array(totals)
        step_of = np.full(home.shape, -1)
        replicated = np.zeros((*home.shape, devices), bool)
        node_of = np.arange(devices) // placement.devices_per_node
        needed = RunningSizes(placement.layers, devices, placement.devices_per_node)
        best = cost.layer(computed, received, needed.sizes(), self.config.name)
        best_step = np.zeros(placement.layers, int)
        active = np.ones(placement.layers, bool)
        for step in range(1, placement.experts + 1):
            heaviest = computed.argmax(axis=1)
            mine = np.where(home == heaviest[:, None], unused, -1.0)
            expert = mine.argmax(axis=1)
            active &= (computed.max(axis=1) - computed.min(axis=1) >= threshold) & (mine[layers, expert] >= 0)
            targets = _targets(loads[layers, :, expert], heaviest, skipped)
            if self.config.bounded:
                targets &= needed.slots < cost.replica_slots
            home_node = heaviest // placement.devices_per_node
            targets &= (needed.pairs[layers, home_node] < self.config.crossing)[:, node_of] | (
                node_of == home_node[:, None]
            )
            if not active.any():
                break
            targets &= active[:, None]
            moved = np.where(targets, loads[layers, :, expert], 0.0)
            computed = computed + moved
            computed[layers, heaviest] -= moved.sum(axis=1)
            received[layers, heaviest] -= moved.sum(axis=1)
            needed.add(heaviest, targets)
            replicated[layers, expert] |= targets
            unused[layers[active], expert[active]] = -1.0
            step_of[layers[active], expert[active]] = step
            time = cost.layer(computed, received, needed.sizes(), self.config.name)
            better = active & (time < best)
            best, best_step = np.where(better, time, best), np.where(better, step, best_step)
        kept = (step_of >= 1) & (step_of <= best_step[:, None])
        return best, replicated & kept[:, :, None]


def _targets(tokens: np.ndarray, home: np.ndarray, skipped: int) -> np.ndarray:
    """Choose the devices that get a replica: tokens [L, D] -> bool [L, D].

    These are all but the home and the `skipped` devices with fewest of the expert's tokens.
    """
    ranked = tokens.copy()
    layers = np.arange(len(tokens))
    ranked[layers, home] = np.inf  # the home holds it anyway and is never dropped
    chosen = np.ones(tokens.shape, bool)
    # Of equal devices the lowest id is dropped first, as ties go to the lowest id everywhere.
    np.put_along_axis(chosen, np.argsort(ranked, axis=1, kind="stable")[:, :skipped], False, axis=1)
    chosen[layers, home] = False
    return chosen
