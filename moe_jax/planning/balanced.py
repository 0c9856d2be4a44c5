"""Equal work on every device, with the fewest and nearest replicas (ours), as far as mu replicas per device allow.

Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.planning.balancer import NUMPY, Planner, home_loads, knob, register
from moe_jax.planning.placement import Placement
from moe_jax.planning.shares import level_quotas, share_rows, with_quotas

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
        loads = np.asarray(loads, np.float64)
        bare = super().propose(loads, placement, cost)
        totals = loads.sum(axis=1)
        quota = fill_gaps(totals, bare, cost.replica_slots)
        held = (quota > 0) | bare.holds
        limits = (cost.replica_slots, self.config.headroom)
        if self.config.when == "after_gate":
            return with_quotas(bare, quota, loads, add_spares(held, totals, bare, *limits))
        error = MEAN_TO_STANDARD * np.minimum(cost.load_error or 0.0, 1.0)
        spared = add_spares(held, totals, bare, *limits, error) if np.any(error) else held
        if (spared != held).any():
            quota = level_quotas(NUMPY, totals, spared, bare.homes, SWEEPS, np.reshape(error, (-1, 1)))
        return with_quotas(bare, quota, loads, spared)

    def late_rule(self, shape, cost, groups):
        if self.config.when != "after_gate" or not shape.replica_slots:
            return None
        return "shares", {"sweeps": SWEEPS}

    def refine(self, loads, placement, cost):
        """Solve the shares for the true counts over the replicas that are there."""
        loads = np.asarray(loads, np.float64)
        totals = loads.sum(axis=1)
        quota = level_quotas(NUMPY, totals, placement.holds, placement.homes, SWEEPS)
        return placement.replace(shares=share_rows(placement, quota, loads), rule="shares")


def fill_gaps(totals: np.ndarray, placement: Placement, mu: int) -> np.ndarray:
    """Return quotas [L, E, D] with equal device sums: totals [L, E], homes only, at most mu replicas a device."""
    layers, devices, rows = placement.layers, placement.devices, np.arange(placement.layers)
    home = placement.home
    quota = np.where(placement.homes, totals[:, :, None], 0.0)
    over = home_loads(totals, home, devices)
    over -= over.mean(axis=1, keepdims=True)
    small = 1e-9 * np.abs(totals).sum(axis=1) + 1e-12
    at_home = totals.copy()
    replicas = np.zeros((layers, devices), int)
    node_of = np.arange(devices) // placement.devices_per_node
    stuck = np.zeros((layers, devices), bool)
    for _ in range(2 * devices + placement.experts):
        gaps = (over < -small[:, None]) & (replicas < mu)
        roomy = gaps & (replicas < mu - 1)
        has_near = roomy.reshape(layers, placement.nodes, -1).any(axis=2)[:, node_of]
        # Sources with a large gap on their own node go first, before a far source takes that gap; then the heaviest.
        rank = np.where(over > small[:, None], over + has_near * over.max(axis=1, keepdims=True), -np.inf)
        source = np.where(stuck, -np.inf, rank).argmax(axis=1)
        expert = np.where(home == source[:, None], at_home, -1.0).argmax(axis=1)
        surplus = np.minimum(over[rows, source], at_home[rows, expert])
        near = node_of == node_of[source][:, None]
        # A last free slot should close its gap: what stays open there cannot be filled.
        closes = (-over <= surplus[:, None]) | (replicas < mu - 1)
        gap = np.where(gaps & (quota[rows, expert] == 0), -over, 0.0)
        span = over.max(axis=1, keepdims=True) - over.min(axis=1, keepdims=True) + 1.0
        score = np.where(gap > 0, gap + span * (2 * closes + near), -1.0)
        target = score.argmax(axis=1)
        amount = np.minimum(surplus, gap[rows, target])
        active = (over[rows, source] > small) & ~stuck[rows, source]
        if not active.any():
            break
        moves = active & (amount > 0)
        stuck[rows[active & ~moves], source[active & ~moves]] = True
        layer, e, a, b, x = rows[moves], expert[moves], source[moves], target[moves], amount[moves]
        quota[layer, e, b] += x
        quota[layer, e, a] -= x
        at_home[layer, e] -= x
        over[layer, a] -= x
        over[layer, b] += x
        replicas[layer, b] += 1
    return quota


def add_spares(
    held: np.ndarray,
    totals: np.ndarray,
    placement: Placement,
    mu: int,
    headroom: float,
    error: np.ndarray | None = None,
) -> np.ndarray:
    """Replicate experts with most load per holder until devices hold `headroom` replicas on average.

    With spares the holders of different experts overlap, and shares can follow counts that were not predicted. Where
    shares are fixed ahead, an expert's error falls on more devices, each of which gets less of it: other shares alone,
    flat as the error asks, gained nothing on a recorded trace (largest over mean load 1.265), spares 1.224.

    Args:
      held: bool [L, E, D], homes and replicas so far.
      error: [L], relative error of the totals: only experts whose error moves a holder's load by more than `TOLERANCE`
        of the mean load are replicated; None replicates any.

    Returns:
      bool [L, E, D] with the spares; devices with fewest replicas first, of those the expert's own node.
    """
    layers, devices, rows = placement.layers, placement.devices, np.arange(placement.layers)
    held = held.copy()
    replicas = (held & ~placement.homes).sum(axis=1)
    budget = np.full(layers, int(headroom * devices)) - replicas.sum(axis=1)
    node_of = np.arange(devices) // placement.devices_per_node
    holders = held.sum(axis=2)
    for _ in range(max(0, int(budget.max(initial=0)))):
        expert = np.where(holders < devices, totals / holders, -1.0).argmax(axis=1)
        near = node_of == node_of[placement.home[rows, expert]][:, None]
        score = np.where((replicas < mu) & ~held[rows, expert], 2 * (mu - replicas) + near, -1)
        device = score.argmax(axis=1)
        ok = (score[rows, device] >= 0) & (budget > 0)
        if error is not None:
            ok &= error * totals[rows, expert] / holders[rows, expert] > TOLERANCE * totals.sum(axis=1) / devices
        if not ok.any():
            break
        held[rows[ok], expert[ok], device[ok]] = True
        holders[rows[ok], expert[ok]] += 1
        replicas[rows[ok], device[ok]] += 1
        budget -= ok
    return held
