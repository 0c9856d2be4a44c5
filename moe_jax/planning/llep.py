"""Least-loaded expert parallelism: what is too much for a device goes to the least-loaded ones, with its experts.

No device computes more than a capacity, as far as the slots allow.
Source: Nguyen et al., Least-Loaded Expert Parallelism, arXiv 2601.17111 (2026). Theirs are alpha = `capacity`, m =
`least_chunk`, lambda = `uneven_from`. What finds no device with room stays at home here, where theirs goes to the least
loaded all the same; and which tokens of an expert travel is ours: those nearest to a holder stay there.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.errors import check_bounds
from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning.arrays import falling, loop, put
from moe_jax.planning.balancer import Planner, register
from moe_jax.planning.placement import fit_replicas
from moe_jax.planning.routing import with_quotas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llep:
    """Options of the planner `llep`, by which it decides after the gate too.

    Attributes:
      capacity: tokens that a device computes before others help, over the mean; at least 1.
      least_chunk: fewest tokens that are worth moving an expert, over the mean load of a device.
      uneven_from: layers whose largest load is below this times the mean stay as they are.
    """

    capacity: float = 1.0
    least_chunk: float = 0.0625
    uneven_from: float = 1.3

    def __post_init__(self):
        check_bounds(self, {"capacity": 1, "least_chunk": 0, "uneven_from": 0})


def spill_quotas(xp, totals, home, slots: int, devices: int, options: Llep):
    """Return tokens by expert and device, [L, E, D], from totals [L, E] and homes int [L, E].

    Experts are taken by falling load. Of one whose home is above capacity the surplus goes, chunk by chunk, to the
    least-loaded device that has a slot left, up to that one's capacity.

    Args:
      xp: NumPy or jax.numpy.
      slots: replica slots of a device. It sends as many experts at most, so that the transfer of one that fits all
        slots has room for every spill.
      devices: D.
    """
    layers, experts = totals.shape
    rows, device = xp.arange(layers), xp.arange(devices)[None]
    quota = xp.where(home[:, :, None] == device[None], totals[:, :, None], 0.0)
    load = quota.sum(axis=1)
    mean = load.sum(axis=1) / devices
    full = options.capacity * mean
    least = xp.maximum(options.least_chunk, 1e-9) * mean
    uneven = load.max(axis=1) > options.uneven_from * mean

    def next_expert(carry):
        """Return the heaviest expert above capacity that can still give: its total [L], -1 for none, and id [L]."""
        quota, load, used, sent, open_ = carry
        over = open_ & (xp.take_along_axis(load, home, axis=1) > full[:, None])
        gives = xp.take_along_axis(quota, home[:, :, None], axis=2)[:, :, 0] < totals
        over = over & (gives | (xp.take_along_axis(sent, home, axis=1) < slots))
        weight = xp.where(over & uneven[:, None], totals, -1.0)
        return weight.max(axis=1), weight.argmax(axis=1)

    def step(_, carry):
        quota, load, used, sent, open_ = carry
        weight, expert = next_expert(carry)
        source, mine = home[rows, expert], quota[rows, expert]
        surplus = xp.minimum(mine[rows, source], load[rows, source] - full)
        free = (used < slots) & (mine == 0) & (device != source[:, None])
        target = xp.where(free, load, xp.inf).argmin(axis=1)
        chunk = xp.minimum(surplus, full - load[rows, target])
        ok = (weight > 0) & free.any(axis=1) & (chunk >= least)
        here = ok[:, None] & (device == target[:, None])
        moved = xp.where(ok, chunk, 0.0)[:, None]
        change = xp.where(here, moved, 0.0) - xp.where(device == source[:, None], moved, 0.0)
        first = ok & (mine[rows, source] == totals[rows, expert])
        sent = sent + (first[:, None] & (device == source[:, None]))
        quota = put(quota, (rows, expert), xp.maximum(mine + change, 0.0))
        # an expert has given what it can when its surplus is gone, or when no chunk of it is worth a move
        open_ = put(open_, (rows, expert), open_[rows, expert] & ok & (chunk < surplus))
        return quota, load + change, used + here, sent, open_

    none = xp.zeros(load.shape, int)
    start = (quota, load, none, none, totals > 0)
    return loop(xp, step, start, devices + 2 * experts, lambda carry: (next_expert(carry)[0] > 0).any())[0]


def fitted_quotas(xp, totals, home, late: TransferShape, options: Llep):
    """Return the quotas of `spill_quotas` where experts whose replicas do not fit a transfer stay at home.

    Args:
      xp, totals, home, options: as there.

    Returns:
      (quotas [L, E, D]; bool [L, E], who stays; what `fit_replicas` returns of the others).
    """
    quota = spill_quotas(xp, totals, home, late.slots, late.devices, options)
    at_home = home[:, :, None] == xp.arange(late.devices)[None, None]
    wanted = (quota > 0) & ~at_home
    fit = fit_replicas(xp, wanted, falling(xp, totals), home, late)
    stays = (wanted & ~fit[0]).any(axis=2)
    return xp.where(stays[:, :, None], xp.where(at_home, totals[:, :, None], 0.0), quota), stays, fit


@register("llep")
class LlepPlanner(Planner):
    """Spill by predicted loads ahead, or by those of the step after the gate, when every replica comes late."""

    options: Llep = Llep()
    after_gate = True
    late_replicas = True
    rule = "shares"

    def refine(self, loads, placement, cost):
        """Spill for these loads, whatever was planned ahead; what does not fit a late transfer stays at home."""
        totals, late = loads.sum(axis=1).astype(np.float64), cost.late if self.config.when == "after_gate" else None
        bare = placement.replace(replicas=None, shares=None, rule=self.rule)
        if late is not None:
            quota, stays, _ = fitted_quotas(np, totals, bare.home, late, self.options)
            self.counters["late_cut"] += int(stays.sum())
        else:
            slots = cost.replica_slots if self.config.bounded else placement.experts
            quota = spill_quotas(np, totals, bare.home, slots, bare.devices, self.options)
        return with_quotas(bare, quota, loads)

    def late_rule(self, shape, cost, groups):
        return None if shape.late is None else self.options
