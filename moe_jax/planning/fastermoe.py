"""FasterMoE's dynamic shadowing: hot experts go to every device for one step.

Experts are tried by falling load and kept while the predicted time falls; the first that does not shorten it ends the
search. Rule `home`: a device computes its own tokens of a shadowed expert.

Letters: docs/notation.md; B [L, D] tokens of each device's experts, r shadowed experts.
"""

from __future__ import annotations

import numpy as np

from moe_jax.planning.balancer import (
    Planner,
    falling,
    home_loads,
    knob,
    register,
)
from moe_jax.planning.cost import Cost
from moe_jax.planning.sizes import RunningSizes, TransferSizes, late_room


@register("fastermoe", after_gate=True)
class FasterMoePlanner(Planner):
    """Shadow experts while T(r) falls.

    B counts the tokens *of a device's experts*, from every source. By default both sides of the comparison count the
    all-to-all over what is received, as the authors' release does; with `residual` off it is counted before shadowing
    only, over all tokens, as equation 8 is printed. Source: FasterMoE, equations 7 and 8, algorithm 1.
    """

    residual: bool = knob(True, "count the all-to-all that is left after shadowing; off: T(r) as printed, without it")
    reference = True
    late_replicas = True
    any_holder = False  # a device computes its own tokens of a shadowed expert, all others go home
    original = "broadcast and reduce of each shadowed expert, every step"

    def propose(self, loads, placement, cost):
        if self.config.when == "after_gate":
            return placement.replace(replicas=None, shares=None, rule="home")
        return self.refine(loads, placement, cost)

    def refine(self, loads, placement, cost):
        """Shadow for these loads, whatever was planned ahead.

        Ahead, the search ends at the first expert beyond the replica slots. After the gate one that does not fit the
        late transfer is skipped, and the search goes on: `moe_jax.moe.after_gate_shadow` does the same.
        """
        name, residual, after_gate = self.config.name, self.config.residual, self.config.when == "after_gate"
        late = cost.late if after_gate else None  # what shadows must fit
        compute, exchange, shadow = shadow_rates(cost, name)
        loads, home, devices = np.asarray(loads, np.float64), placement.home, placement.devices
        limit = cost.replica_slots if self.config.bounded else placement.experts
        layers = np.arange(len(home))
        totals = loads.sum(axis=1)
        own = np.take_along_axis(loads, home[:, None, :], axis=1)[:, 0]  # tokens whose source is their home
        order = falling(totals)
        tokens = home_loads(totals, home, devices)
        received = home_loads(totals - own, home, devices)
        if residual:
            best = compute * tokens.max(axis=1) + exchange * received.max(axis=1)
        else:
            best = ((compute + exchange) * tokens).max(axis=1)
        chosen, cut = np.zeros(home.shape, bool), 0
        active = np.ones(len(home), bool)
        needed = RunningSizes(len(home), devices, placement.devices_per_node if late is None else late.inside)
        for r in range(1, placement.experts + 1):
            expert = order[:, r - 1]
            at = home[layers, expert]
            trial = tokens + loads[layers, :, expert]
            trial[layers, at] -= totals[layers, expert]
            left = received.copy()
            left[layers, at] -= totals[layers, expert] - own[layers, expert]
            targets = active[:, None] & (np.arange(devices) != at[:, None])
            needed.add(at, targets)
            time = compute * trial.max(axis=1)
            if residual:
                time = time + exchange * left.max(axis=1)
            sizes = needed.sizes()
            if after_gate:
                time = time + cost.late_price(sizes, needed.offers.sum(axis=1) * shadow)
            else:
                time = time + 2 * cost.trans(sizes, devices, name)
            room = np.full(len(home), r <= limit) if late is None else late_room(sizes, late)
            pays = active & (time < best)
            cut += int((pays & ~room).sum())
            take = pays & room
            active = pays if late is None else pays | (active & ~room)
            if not active.any() or (late is None and r > limit):
                break
            needed.add(at, targets & ~take[:, None], -1)
            chosen[layers[take], expert[take]] = True
            tokens = np.where(take[:, None], trial, tokens)
            received = np.where(take[:, None], left, received)
            best = np.where(take, time, best)
        self.counters["shadow_cut" if late is None else "late_cut"] += cut
        return placement.replace(replicas=np.argwhere(chosen[:, :, None] & ~placement.homes), shares=None, rule="home")

    def late_rule(self, shape, cost, groups):
        if shape.late is None:
            return None
        compute, exchange, shadow = shadow_rates(cost, self.config.name)
        fields = {"compute": compute / groups, "exchange": exchange / groups, "shadow": shadow}
        return "shadow", {**fields, "residual": self.config.residual, "late_seconds": cost.late_seconds}


def shadow_rates(cost: Cost, requested_by: str) -> tuple[float, float, float]:
    """Return seconds of a token computed (12 M F / P), of one exchanged, and of an expert shadowed; back included.

    The last is what one expert to every other device costs after the gate, where nothing hides it; in the papers' price
    S / W each way.
    """
    compute, bandwidth = 3.0 / cost.tokens_per_second(requested_by), cost.bandwidth(requested_by)
    if cost.price == "paper":
        shadow = cost.expert_bytes / bandwidth
    else:
        devices = cost.cluster.devices or cost.cluster.need("devices_per_node", f"planner {requested_by!r}")
        shadow = float(cost.trans(TransferSizes(1, 1, 1, devices), devices, requested_by))
    return compute, 4.0 * cost.exchanged_bytes / bandwidth, 2.0 * shadow
