"""Equal work on every device, with the fewest and nearest copies (ours).

Enters: loads, homes, mu. Leaves: copies and shares under which every device computes the same number of tokens, as far
as mu guests per device allow. `refine` keeps the copies and solves the shares again for the step's own counts.

Letters: L layers, S sources, E experts, D devices, Nn nodes.
"""

from __future__ import annotations

import numpy as np

from moe_jax.placement import Placement
from moe_jax.planner.base import PlannerBase, home_loads
from moe_jax.planner.shares import level_quotas, share_rows, starting_quotas

SWEEPS = 8
TOLERANCE = 0.1  # what one expert's error may do to a device's load, as a share of the mean load
MEAN_TO_STANDARD = 1.25  # standard over mean absolute error of a normal variable, sqrt(pi / 2)


class BalancedPlanner(PlannerBase):
    """Move the surplus of heavy devices into the gaps of light ones, own node first.

    A move takes all that the heavy device has over or all that the light one lacks, so one side is done with each copy:
    at most (devices over + devices under - 1) copies a layer, as long as single experts are large enough.
    """

    def propose(self, loads, placement, cost):
        loads = np.asarray(loads, np.float64)
        bare = placement.replace(copies=None, shares=None, rule="nearest")
        totals = loads.sum(axis=1)
        quota = fill_gaps(totals, bare, cost.guest_slots)
        held = (quota > 0) | bare.holds
        limits = (cost.guest_slots, self.config.headroom)
        if self.config.when == "after_gate":
            return _with_shares(bare, quota, loads, add_spares(held, totals, bare, *limits))
        error = MEAN_TO_STANDARD * np.minimum(cost.load_error or 0.0, 1.0)
        spared = add_spares(held, totals, bare, *limits, error) if np.any(error) else held
        if (spared != held).any():
            copied = _with_copies(bare, spared)
            quota = level_quotas(copied, totals, starting_quotas(copied, totals), SWEEPS, error)
        return _with_shares(bare, quota, loads, spared)

    def refine(self, loads, placement, cost):
        """Solve the shares for the true counts over the copies that are there."""
        loads = np.asarray(loads, np.float64)
        totals = loads.sum(axis=1)
        quota = level_quotas(placement, totals, starting_quotas(placement, totals), SWEEPS)
        shares = share_rows(placement, quota, loads)
        return placement.replace(shares=shares, rule="shares")


def fill_gaps(totals: np.ndarray, placement: Placement, mu: int) -> np.ndarray:
    """Return quotas [L, E, D] with equal device sums: totals [L, E], homes only, at most mu guests a device."""
    layers, devices, rows = placement.layers, placement.devices, np.arange(placement.layers)
    home = placement.home
    quota = starting_quotas(placement, totals)
    over = home_loads(totals, home, devices)
    over -= over.mean(axis=1, keepdims=True)
    small = 1e-9 * np.abs(totals).sum(axis=1) + 1e-12
    at_home = totals.copy()
    guests = np.zeros((layers, devices), int)
    node_of = np.arange(devices) // placement.devices_per_node
    stuck = np.zeros((layers, devices), bool)
    for _ in range(2 * devices + placement.experts):
        gaps = (over < -small[:, None]) & (guests < mu)
        roomy = gaps & (guests < mu - 1)
        has_near = roomy.reshape(layers, placement.nodes, -1).any(axis=2)[:, node_of]
        # Sources with a roomy gap on their own node go first, or a far source could take that gap; else the heaviest.
        rank = np.where(over > small[:, None], over + has_near * over.max(axis=1, keepdims=True), -np.inf)
        source = np.where(stuck, -np.inf, rank).argmax(axis=1)
        expert = np.where(home == source[:, None], at_home, -1.0).argmax(axis=1)
        surplus = np.minimum(over[rows, source], at_home[rows, expert])
        near = node_of == node_of[source][:, None]
        # A last free slot should close its gap: what stays open there, nobody can fill.
        closes = (-over <= surplus[:, None]) | (guests < mu - 1)
        gap = np.where(gaps & (quota[rows, expert] == 0), -over, 0.0)
        wide = over.max(axis=1, keepdims=True) - over.min(axis=1, keepdims=True) + 1.0
        score = np.where(gap > 0, gap + wide * (2 * closes + near), -1.0)
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
        guests[layer, b] += 1
    return quota


def add_spares(
    held: np.ndarray,
    totals: np.ndarray,
    placement: Placement,
    mu: int,
    headroom: float,
    error: np.ndarray | None = None,
) -> np.ndarray:
    """Copy experts with most load per holder until devices hold `headroom` guests on average.

    With spares the holders of different experts overlap, and shares can follow counts that nobody predicted. Where
    shares are fixed ahead, an expert's error falls on more devices, each of which gets less of it.

    Args:
      held: bool [L, E, D], homes and copies so far.
      error: [L], relative error of the totals: only experts whose error moves a holder's load by more than `TOLERANCE`
        of the mean load are copied; None copies any.

    Returns:
      bool [L, E, D] with the spares; devices with fewest guests first, of those the expert's own node.
    """
    layers, devices, rows = placement.layers, placement.devices, np.arange(placement.layers)
    held = held.copy()
    homes = np.zeros_like(held)
    np.put_along_axis(homes, placement.home[:, :, None], True, axis=2)
    guests = (held & ~homes).sum(axis=1)
    budget = np.full(layers, int(headroom * devices)) - guests.sum(axis=1)
    node_of = np.arange(devices) // placement.devices_per_node
    holders = held.sum(axis=2)
    for _ in range(max(0, int(budget.max(initial=0)))):
        expert = np.where(holders < devices, totals / holders, -1.0).argmax(axis=1)
        near = node_of == node_of[placement.home[rows, expert]][:, None]
        score = np.where((guests < mu) & ~held[rows, expert], 2 * (mu - guests) + near, -1)
        device = score.argmax(axis=1)
        ok = (score[rows, device] >= 0) & (budget > 0)
        if error is not None:
            ok &= error * totals[rows, expert] / holders[rows, expert] > TOLERANCE * totals.sum(axis=1) / devices
        if not ok.any():
            break
        held[rows[ok], expert[ok], device[ok]] = True
        holders[rows[ok], expert[ok]] += 1
        guests[rows[ok], device[ok]] += 1
        budget -= ok
    return held


def _with_copies(bare: Placement, held: np.ndarray) -> Placement:
    away = held.copy()
    np.put_along_axis(away, bare.home[:, :, None], False, axis=2)
    return bare.replace(copies=np.argwhere(away), rule="shares")


def _with_shares(bare: Placement, quota: np.ndarray, loads: np.ndarray, held: np.ndarray) -> Placement:
    placement = _with_copies(bare, held)
    return placement.replace(shares=share_rows(placement, np.maximum(quota, 0.0), loads))
