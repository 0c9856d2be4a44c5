"""FasterMoE's dynamic shadowing: hot experts go to every device for one step, which computes its own tokens of them.

Letters: docs/notation.md; B [L, D] tokens of each device's experts, r shadowed experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moe_jax.planning.arrays import falling, home_loads, loop, put
from moe_jax.planning.balancer import Planner, knob, register
from moe_jax.planning.cost import ASKED_BY, Cost
from moe_jax.planning.sizes import TransferSizes, late_price, late_room, sizes_everywhere


@register("fastermoe", after_gate=True)
class FasterMoePlanner(Planner):
    """Shadow experts while T(r) falls.

    B counts the tokens *of a device's experts*, from every source. By default both sides of the comparison count the
    all-to-all over what is received, as the authors' release does; with `residual` off it is counted before shadowing
    only, over all tokens, as equation 8 is printed. Source: FasterMoE, equations 7 and 8, algorithm 1.
    """

    residual: bool = knob(True, "count the all-to-all that is left after shadowing; off: T(r) as printed, without it")
    late_replicas = True
    any_holder = False  # a device computes its own tokens of a shadowed expert, all others go home

    def propose(self, loads, placement, cost):
        if self.config.when == "after_gate":
            return placement.replace(replicas=None, shares=None, rule="home")
        return self.refine(loads, placement, cost)

    def refine(self, loads, placement, cost):
        """Shadow for these loads, whatever was planned ahead.

        Ahead, the search ends at the first expert beyond the replica slots. After the gate one that does not fit the
        late transfer is skipped, and the search goes on.
        """
        after_gate = self.config.when == "after_gate"
        late = cost.late if after_gate else None  # what shadows must fit
        rates = shadow_rates(cost)
        limit = cost.replica_slots if self.config.bounded else placement.experts

        def price(offers):
            sizes = sizes_everywhere(offers, placement.devices_per_node if late is None else late.inside)
            count = offers.sum(axis=1)
            if after_gate:
                seconds = late_price(sizes, late, cost.late_seconds, count * rates.shadow)
            else:
                seconds = 2 * cost.trans(sizes, placement.devices)
            return seconds, count <= limit if late is None else late_room(sizes, late)

        skips = late is not None
        chosen, cut = shadow_search(np, loads, placement.home, rates, price, skips, self.config.residual)
        self.counters["shadow_cut" if late is None else "late_cut"] += int(cut.sum())
        return placement.replace(replicas=np.argwhere(chosen[:, :, None] & ~placement.homes), shares=None, rule="home")

    def late_rule(self, shape, cost, groups):
        if shape.late is None:
            return None
        rates = shadow_rates(cost)
        fields = {"compute": rates.compute / groups, "exchange": rates.exchange / groups, "shadow": rates.shadow}
        return "shadow", {**fields, "residual": self.config.residual, "late_seconds": cost.late_seconds}


class ShadowRates(NamedTuple):
    """Seconds that one more of each costs a step, back included."""

    compute: float  # token computed, 12 M F / P
    exchange: float  # token exchanged
    # expert shadowed: what one to every other device costs after the gate, where nothing hides it; in the papers' price
    # S / W each way
    shadow: float


def shadow_search(xp, loads, home, rates: ShadowRates, price: Callable, skips: bool, residual: bool):
    """Shadow experts by falling load until one does not pay.

    Args:
      xp: NumPy or jax.numpy.
      loads: float [L, S, E], S = D; home: int [L, E].
      rates: those of a token; what a shadow costs is in `price`.
      price: from offers int [L, D], shadowed experts by home, (seconds of their transfers [L], room for them bool [L]).
      skips: an expert without room is skipped; else it ends the search.
      residual: both sides count the exchange that is left.

    Returns:
      (bool [L, E], the shadowed experts; int [L], how many would have paid, had there been room).
    """
    layers, devices, experts = loads.shape
    rows, totals, device = xp.arange(layers), loads.sum(axis=1), xp.arange(devices)[None]
    away = totals - xp.take_along_axis(loads, home[:, None, :], axis=1)[:, 0]  # tokens whose source is not their home
    order = falling(xp, totals)

    def seconds(tokens, received):
        return rates.compute * tokens.max(axis=1) + (rates.exchange * received.max(axis=1) if residual else 0.0)

    def shadow(turn, carry):
        (tokens, received, offers, best), chosen, active, cut = carry
        expert = order[:, turn]
        here = home[rows, expert][:, None] == device
        more = offers + here
        trial = tokens + loads[rows, :, expert] - here * totals[rows, expert][:, None]
        left = received - here * away[rows, expert][:, None]
        moving, room = price(more)
        time = seconds(trial, left) + moving
        pays = active & (time < best)
        take = pays & room
        pairs = (trial, tokens), (left, received), (more, offers)
        kept = [xp.where(take[:, None], new, old) for new, old in pairs]
        active = take | (active & ~room) if skips else take
        return (*kept, xp.where(take, time, best)), put(chosen, (rows, expert), take), active, cut + (pays & ~room)

    tokens, received = (home_loads(xp, of, home, devices) for of in (totals, away))
    before = seconds(tokens, received) if residual else (rates.compute + rates.exchange) * tokens.max(axis=1)
    state = tokens, received, xp.zeros((layers, devices), int), before
    start = state, xp.zeros(home.shape, bool), xp.full(layers, True), xp.zeros(layers, int)
    found = loop(xp, shadow, start, experts, lambda carry: carry[2].any())
    return found[1], found[3]


def shadow_rates(cost: Cost) -> ShadowRates:
    """Return the rates by these prices."""
    compute, bandwidth = 3.0 / cost.tokens_per_second(), cost.bandwidth()
    if cost.price == "paper":
        shadow = cost.expert_bytes / bandwidth
    else:
        devices = cost.cluster.devices or cost.cluster.need("devices_per_node", ASKED_BY)
        shadow = float(cost.trans(TransferSizes(1, 1, 1, devices), devices))
    return ShadowRates(compute, 4.0 * cost.exchanged_bytes / bandwidth, 2.0 * shadow)
