"""Equal work on every device, with the fewest and nearest replicas (ours), as far as mu replicas per device allow.

`level_quotas` splits tokens over replicas that stand, on the host and after the gate. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.planning.arrays import home_loads, loop, put
from moe_jax.planning.balancer import Planner, register
from moe_jax.planning.placement import Placement
from moe_jax.planning.routing import with_quotas

SWEEPS = 8
SPARES = 2  # replicas of a device on average, spare ones included, over which shares can follow counts not yet known
TOLERANCE = 0.1  # the largest effect of one expert's error on a device's load, as a share of the mean load
MEAN_TO_STANDARD = 1.25  # standard over mean absolute error of a normal variable, sqrt(pi / 2)


@register("balanced")
class BalancedPlanner(Planner):
    """Move the surplus of heavy devices into the gaps of light ones, own node first.

    A move takes all that the heavy device has above the mean or all that the light one lacks, so it brings one of the
    two to the mean: at most (devices above + devices below - 1) replicas a layer, as long as single experts are large
    enough.
    """

    after_gate = True

    def propose(self, loads, placement, cost):
        bare, totals = super().propose(loads, placement, cost), loads.sum(axis=1).astype(np.float64)
        quota = fill_gaps(totals, bare, cost.replica_slots)
        holds, mu = (quota > 0) | bare.holds, cost.replica_slots
        error = MEAN_TO_STANDARD * np.minimum(cost.load_error or 0.0, 1.0)
        if self.config.when == "after_gate":
            holds = add_spares(holds, totals, bare, mu)
        elif np.any(error):
            spared = add_spares(holds, totals, bare, mu, error)
            if (spared != holds).any():
                holds = spared
                quota = level_quotas(np, totals, holds, bare.homes, SWEEPS, np.reshape(error, (-1, 1)))
        return with_quotas(bare, quota, loads, holds)

    def late_rule(self, shape, cost, groups):
        return Levelling() if self.config.when == "after_gate" and shape.replica_slots else None

    def refine(self, loads, placement, cost):
        """Solve the shares for the true counts over the replicas that are there."""
        totals = loads.sum(axis=1).astype(np.float64)
        quota = level_quotas(np, totals, placement.holds, placement.homes, SWEEPS)
        return with_quotas(placement, quota, loads, placement.holds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levelling:
    """Give each device the same number of the step's own tokens, over the replicas planned ahead (`level_quotas`).

    Attributes:
      sweeps: rounds over the replicated experts, at most.
    """

    sweeps: int = SWEEPS


def fill_gaps(totals: np.ndarray, placement: Placement, mu: int) -> np.ndarray:
    """Return quotas [L, E, D] with equal device sums: totals [L, E], homes only, at most mu replicas a device."""
    layers, devices, rows, home = placement.layers, placement.devices, np.arange(placement.layers), placement.home
    quota, at_home = np.where(placement.homes, totals[:, :, None], 0.0), totals.copy()
    over = home_loads(np, totals, home, devices)
    over -= over.mean(axis=1, keepdims=True)
    small = 1e-9 * np.abs(totals).sum(axis=1, keepdims=True) + 1e-12
    free, stuck = np.full(over.shape, mu), np.zeros(over.shape, bool)
    node_of = np.arange(devices) // placement.devices_per_node
    for _ in range(2 * devices + placement.experts):
        gaps = (over < -small) & (free > 0)
        has_near = (gaps & (free > 1)).reshape(layers, placement.nodes, -1).any(axis=2)[:, node_of]
        # Sources with a large gap on their own node go first, before a far source takes that gap; then the heaviest.
        heavy = (over > small) & ~stuck
        source = np.where(heavy, over + has_near * over.max(axis=1, keepdims=True), -np.inf).argmax(axis=1)
        expert = np.where(home == source[:, None], at_home, -1.0).argmax(axis=1)
        surplus = np.minimum(over[rows, source], at_home[rows, expert])
        near = node_of == node_of[source][:, None]
        # A last free slot should close its gap: what stays open there cannot be filled. Then the own node, then the
        # largest gap, then the lowest id.
        closes = (-over <= surplus[:, None]) | (free > 1)
        gap = np.where(gaps & (quota[rows, expert] == 0), -over, 0.0)
        span = over.max(axis=1, keepdims=True) - over.min(axis=1, keepdims=True) + 1.0
        target = np.where(gap > 0, gap + span * (2 * closes + near), -1.0).argmax(axis=1)
        amount, active = np.minimum(surplus, gap[rows, target]), heavy[rows, source]
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
        free[layer, b] -= 1
    return quota


def add_spares(
    holds: np.ndarray,
    totals: np.ndarray,
    placement: Placement,
    mu: int,
    error: np.ndarray | None = None,
) -> np.ndarray:
    """Replicate experts with most load per holder until devices hold `SPARES` replicas on average.

    With spares the holders of different experts overlap, and shares can follow counts that were not predicted. Where
    shares are fixed ahead, an expert's error falls on more devices, each of which gets less of it: other shares alone,
    flat as the error asks, gained nothing on a recorded trace (largest over mean load 1.265), spares 1.224.

    Args:
      holds: bool [L, E, D], homes and replicas so far.
      error: [L], relative error of the totals: only experts whose error moves a holder's load by more than `TOLERANCE`
        of the mean load are replicated; None replicates any.

    Returns:
      bool [L, E, D] with the spares; devices with fewest replicas first, of those the expert's own node.
    """
    devices, rows, holds = placement.devices, np.arange(placement.layers), holds.copy()
    holders, free = holds.sum(axis=2), mu - (holds & ~placement.homes).sum(axis=1)
    budget = SPARES * devices - (holds & ~placement.homes).sum(axis=(1, 2))
    node_of, least = np.arange(devices) // placement.devices_per_node, TOLERANCE * totals.sum(axis=1) / devices
    for _ in range(max(0, int(budget.max(initial=0)))):
        expert = np.where(holders < devices, totals / holders, -1.0).argmax(axis=1)
        near = node_of == node_of[placement.home[rows, expert]][:, None]
        score = np.where((free > 0) & ~holds[rows, expert], 2 * free + near, -1)
        device = score.argmax(axis=1)
        ok = (score[rows, device] >= 0) & (budget > 0)
        if error is not None:
            ok &= error * totals[rows, expert] / holders[rows, expert] > least
        if not ok.any():
            break
        holds[rows[ok], expert[ok], device[ok]] = True
        holders[rows[ok], expert[ok]] += 1
        free[rows[ok], device[ok]] -= 1
        budget -= ok
    return holds


def level_quotas(xp, totals, holds, homes, sweeps: int, error=0.0):
    """Even out device loads over fixed holders: totals [L, E], holds, homes bool [L, E, D] -> quota [L, E, D].

    Every token starts at its expert's home; one expert after the other fills its holders to a common level, the others
    held fixed. Each step lowers the sum of squared device loads, whose minimum over all splits also has the least
    possible maximum. A layer is done when a sweep changes little; what it gets depends on its own loads alone.

    Args:
      xp: NumPy or jax.numpy.
      error: [L, 1] or one, standard error of the totals, relative and independent for each expert. What is lowered then
        is the expected sum of squares, sum_d (sum_e x)^2 + sum_e (error x)^2: quotas x spread over more holders.
    """
    (layers, _, devices), stiff = holds.shape, 1.0 + error**2
    rows, upto = xp.arange(layers), xp.arange(1, devices + 1)[None]
    replicated = holds.sum(axis=2) > 1
    count, order = replicated.sum(axis=1), xp.argsort(~replicated, axis=1, stable=True)

    def pour(turn, carry):
        quota, load, going = carry
        expert = order[:, turn]
        mine, holders = quota[rows, expert], holds[rows, expert]
        base = load - mine
        # The level to which the expert's tokens fill up its holders, over the lowest as many as get wet.
        ground = xp.sort(xp.where(holders, base, xp.inf), axis=1)
        dry = xp.isinf(ground)
        level = (totals[rows, expert][:, None] * stiff + xp.where(dry, 0.0, ground).cumsum(axis=1)) / upto
        wet = ~dry & ((level > ground) | (upto == 1))
        level = level[rows, devices - 1 - wet[:, ::-1].argmax(axis=1)]
        new = xp.where(holders, xp.maximum((level[:, None] - base) / stiff, 0.0), 0.0)
        new = xp.where((going & (turn < count))[:, None], new, mine)
        return put(quota, (rows, expert), new), base + new, going

    def sweep(_, carry):
        _, load, going = carry
        quota, after, _ = loop(xp, pour, carry, count.max())
        return quota, after, going & (xp.abs(after - load).max(axis=1) > 1e-3 * after.mean(axis=1))

    quota = xp.where(homes, totals[:, :, None], 0.0)
    start = quota, quota.sum(axis=1), xp.full(layers, True)
    return loop(xp, sweep, start, sweeps, lambda carry: carry[2].any())[0]
