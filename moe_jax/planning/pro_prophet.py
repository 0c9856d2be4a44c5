"""Pro-Prophet's lightweight placements: the heaviest device's heaviest expert goes to all devices but a few, greedily.

Letters: docs/notation.md; H [r, D] computed, R [r, D] received; r rows, one for each number skipped and layer.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.errors import UserError, check_bounds
from moe_jax.planning.arrays import home_loads
from moe_jax.planning.balancer import Planner, register
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement, TransferSizes, sent_with

AT_A_TIME = 1 << 14  # numbers of an array [r, D] up to which searches over several numbers run as one
MOST_TRIES = 16  # numbers of skipped devices that a search compares, from none to all
# Where bounded: experts that one node sends one other in a layer, at most. Transfers by node grow with it.
CROSSING = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProProphet:
    """Options of the planner `pro_prophet`.

    Attributes:
      skipped_devices: devices left out per expert, those with fewest of its tokens; 'search' tries every number.
      balance_threshold: loads whose spread is below this part of the mean I / D are even.
      scheduler: cost model with the scheduler: transfers hide behind computation.
    """

    skipped_devices: int | str = "search"
    balance_threshold: float = 0.5
    scheduler: bool = True

    def __post_init__(self):
        check_bounds(self, {"skipped_devices": 0}, above={"balance_threshold": 0})
        if isinstance(self.skipped_devices, str) and self.skipped_devices != "search":
            raise UserError(
                f"ProProphet.skipped_devices ({self.skipped_devices!r}) must be a whole number from 0 on, or 'search'"
            )


@register("pro_prophet")
class ProProphetPlanner(Planner):
    """Search placements greedily and keep the prefix with the least predicted time.

    Source: Pro-Prophet, algorithm 1, equations 6 to 8. Its n is `skipped_devices`, its alpha `balance_threshold`.

    The paper states no n, and fewer targets are what it calls lightweight: every number is tried by default. Its
    equation 7 compares max H - min H with alpha I / E, and has one expert a device, so that I / E is a device's mean
    load. Where E differs from D the two differ: here the bound is alpha I / D, the mean of what is compared. With E =
    2 D the formula as printed asks for twice as even loads at the same alpha.
    """

    options: ProProphet = ProProphet()

    @property
    def schedule(self):
        return "pro_prophet" if self.options.scheduler else "none"

    def ahead_most(self, placement, cost):
        if not self.config.bounded:
            return None
        return TransferSizes(placement.experts, cost.replica_slots, CROSSING)

    def propose(self, loads, placement, cost):
        if not self.options.scheduler:
            cost = dataclasses.replace(cost, prefetch=Prefetch())
        most, given = placement.devices - 1, self.options.skipped_devices
        if isinstance(given, str):
            tries = np.unique(np.linspace(0, most, min(MOST_TRIES, most + 1)).round().astype(int)).tolist()
        else:
            tries = [min(given, most)]
        together = max(1, AT_A_TIME // (placement.layers * placement.devices))
        totals, own = loads.sum(axis=1), np.take_along_axis(loads, placement.home[:, None, :], axis=1)[:, 0]
        totals = totals.astype(np.float64)
        best_time, kept = np.full(placement.layers, np.inf), np.zeros((0, 3), int)
        for start in range(0, len(tries), together):
            time, rows = self._search(
                (loads, totals, totals - own), placement, cost, np.array(tries[start : start + together])
            )
            better = time < best_time
            best_time = np.where(better, time, best_time)
            kept = np.concatenate([kept[~better[kept[:, 0]]], rows[better[rows[:, 0]]]])
        return placement.replace(replicas=kept, shares=None, rule="home")

    def _search(
        self, counted: tuple[np.ndarray, ...], placement: Placement, cost: Cost, tries: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the least time [L], and the replicas of the number of skipped devices behind it, int [n, 3].

        Every number in `tries` is searched at the same time: r rows, one for each number and layer.

        Args:
          counted: loads [L, S, E]; their totals, and of those what comes from other devices than the home, [L, E].
        """
        loads, totals, away = counted
        layers, devices = placement.layers, placement.devices
        layer, skipped = np.tile(np.arange(layers), len(tries)), np.repeat(tries, layers)
        home, rows = placement.home[layer], np.arange(len(layer))
        computed, received = (home_loads(np, tokens, placement.home, devices)[layer] for tokens in (totals, away))
        threshold = self.options.balance_threshold * totals.sum(axis=1)[layer] / devices
        unused = totals[layer]
        per_node, nodes = placement.devices_per_node, placement.nodes
        node_of = np.arange(devices) // per_node
        sent = tuple(np.zeros((len(rows), *dims), int) for dims in ((devices,), (nodes, nodes), (devices,)))
        crossing, holders = np.zeros((2, len(rows)), int)
        best = cost.layer(computed, received, TransferSizes(*np.zeros((4, len(rows)), int)))
        best_step = np.zeros(len(rows), int)
        active = np.ones(len(rows), bool)
        chosen = []  # (expert [r], targets [r, D]) of each step
        for step in range(1, placement.experts + 1):
            heaviest = computed.argmax(axis=1)
            at_node = heaviest // per_node
            mine = np.where(home == heaviest[:, None], unused, -1.0)
            expert = mine.argmax(axis=1)
            active &= (computed.max(axis=1) - computed.min(axis=1) >= threshold) & (mine[rows, expert] >= 0)
            if not active.any():
                break
            tokens = loads[layer, :, expert]
            # All but the home and the `skipped` devices with fewest of the expert's tokens, of equal ones lowest ids.
            ranked, targets = tokens.copy(), np.empty(tokens.shape, bool)
            ranked[rows, heaviest] = tokens.max() + 1  # the home holds it anyway and is never dropped
            if ranked.dtype.kind == "i":  # numbers of 16 bits are sorted in linear time
                ranked = ranked.astype(np.min_scalar_type(ranked.max()))
            by_tokens = np.argsort(ranked, axis=1, kind="stable")
            np.put_along_axis(targets, by_tokens, np.arange(devices) >= skipped[:, None], axis=1)
            targets[rows, heaviest] = False
            if self.config.bounded:
                targets &= sent[2] < cost.replica_slots
                targets &= (sent[1][rows, at_node] < CROSSING)[:, node_of] | (node_of == at_node[:, None])
            targets &= active[:, None]
            moved = np.where(targets, tokens, 0.0)
            computed = computed + moved
            computed[rows, heaviest] -= moved.sum(axis=1)
            received[rows, heaviest] -= moved.sum(axis=1)
            sent = sent_with(np, sent, heaviest, targets, per_node)
            crossing = np.maximum(crossing, sent[1][rows, at_node].max(axis=1))
            holders = holders + targets.sum(axis=1) + targets.any(axis=1)
            chosen.append((expert, targets))
            unused[rows[active], expert[active]] = -1.0
            sizes = TransferSizes(sent[0].max(axis=1), sent[2].max(axis=1), crossing, holders)
            time = cost.layer(computed, received, sizes)
            better = active & (time < best)
            best, best_step = np.where(better, time, best), np.where(better, step, best_step)
        best = best.reshape(len(tries), layers)
        row = best.argmin(axis=0) * layers + np.arange(layers)
        kept = [np.zeros((0, 3), int)]
        for step, (expert, targets) in enumerate(chosen, 1):
            at, device = np.nonzero(targets[row] & (step <= best_step[row])[:, None])
            kept.append(np.stack([at, expert[row][at], device], axis=1))
        return best.min(axis=0), np.concatenate(kept)
