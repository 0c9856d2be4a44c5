"""FasterMoE's dynamic shadowing: hot experts go to every device for one step, which computes its own tokens of them.

Letters: docs/notation.md; B [L, D] tokens of each device's experts, r shadowed experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning.arrays import falling, home_loads, loop, put
from moe_jax.planning.balancer import Planner, register
from moe_jax.planning.placement import TransferSizes, late_price, late_room


@register("fastermoe")
class FasterMoePlanner(Planner):
    """Shadow experts while T(r) falls.

    B counts the tokens *of a device's experts*, from every source. Both sides of the comparison count the all-to-all
    over what is received, as the authors' release does; equation 8 as printed has it before shadowing only, over all
    tokens, so that the search would stop early or pay too much. Source: FasterMoE, equations 7 and 8, algorithm 1.
    """

    after_gate = True
    late_replicas = True
    rule = "home"
    any_holder = False  # a device computes its own tokens of a shadowed expert, all others go home

    def refine(self, loads, placement, cost):
        """Shadow for these loads, whatever was planned ahead.

        Ahead, the search ends at the first expert beyond the replica slots. After the gate one that does not fit the
        late transfer is skipped, and the search goes on.
        """
        rates = cost.prices.rates(placement.devices, cost.late)
        rule, after_gate = Shadowing(**rates), self.config.when == "after_gate"
        limit = cost.replica_slots if self.config.bounded else placement.experts

        def price(offers):
            count, sizes = offers.sum(axis=1), sizes_everywhere(offers, placement.devices_per_node)
            return count * rule.shadow if after_gate else 2 * cost.prices.transfer(
                sizes, placement.devices
            ), count <= limit

        if after_gate and cost.late is not None:
            chosen, cut = rule.fitting(np, loads, placement.home, cost.late)
            self.counters["late_cut"] += int(cut.sum())
        else:
            chosen, cut = rule.search(np, loads, placement.home, price, skips=False)
            self.counters["shadow_cut"] += int(cut.sum())
        return placement.replace(replicas=np.argwhere(chosen[:, :, None] & ~placement.homes), shares=None, rule="home")

    def late_rule(self, shape, cost, groups):
        return None if shape.late is None else Shadowing(**cost.prices.rates(shape.devices, shape.late, groups))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shadowing:
    """Shadow experts by falling load until one does not pay. Source: FasterMoE, equations 7 and 8, algorithm 1.

    Attributes:
      compute, exchange: seconds of one token, computed forward and backward, and carried there and back both ways.
      shadow: seconds to broadcast an expert and to reduce its gradient, as the paper has it; counted where
        `late_seconds` is empty.
      late_seconds: seconds of the late transfer and its way back in each of its sizes, 0 for none first.
      residual: whether both sides of the comparison count the all-to-all that is left; as printed equation 8 does not.
    """

    compute: float
    exchange: float
    shadow: float = 0.0
    late_seconds: tuple[float, ...] = ()
    residual: bool = True

    def fitting(self, xp, loads, home, late: TransferShape):
        """Search after the gate, where an expert that does not fit the late transfer is skipped; as `search`."""

        def price(offers):
            sizes = sizes_everywhere(offers, late.inside)
            seconds = late_price(sizes, late, self.late_seconds, offers.sum(axis=1) * self.shadow, xp)
            return seconds, late_room(sizes, late)

        return self.search(xp, loads, home, price, skips=True)

    def search(self, xp, loads, home, price: Callable, skips: bool):
        """Return (bool [L, E], the shadowed experts; int [L], how many would have paid, had there been room).

        Args:
          xp: NumPy or jax.numpy.
          loads: [L, S, E], S = D; home: int [L, E].
          price: from offers int [L, D], shadowed experts by home, (seconds of their transfers [L], room for them bool
            [L]).
          skips: an expert without room is skipped; else it ends the search.
        """
        layers, devices, experts = loads.shape
        rows, totals, device = xp.arange(layers), loads.sum(axis=1), xp.arange(devices)[None]
        away = totals - xp.take_along_axis(loads, home[:, None, :], axis=1)[:, 0]  # tokens that come from elsewhere
        order = falling(xp, totals)

        def seconds(tokens, received):
            return self.compute * tokens.max(axis=1) + (self.exchange * received.max(axis=1) if self.residual else 0.0)

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
        before = seconds(tokens, received) if self.residual else (self.compute + self.exchange) * tokens.max(axis=1)
        state = tokens, received, xp.zeros((layers, devices), int), before
        start = state, xp.zeros(home.shape, bool), xp.full(layers, True), xp.zeros(layers, int)
        ended = loop(xp, shadow, start, experts, lambda carry: carry[2].any())
        return ended[1], ended[3]


def sizes_everywhere(offers, devices_per_node: int) -> TransferSizes:
    """Return the sizes where every expert that travels goes to all devices: offers int [L, D], their number by home."""
    count, devices = offers.sum(axis=1), offers.shape[1]
    of_node = offers.reshape(len(offers), -1, devices_per_node).sum(axis=2).max(axis=1)
    crossing = of_node if devices_per_node < devices else 0 * of_node
    return TransferSizes(offers.max(axis=1), (count[:, None] - offers).max(axis=1), crossing, count * devices)
