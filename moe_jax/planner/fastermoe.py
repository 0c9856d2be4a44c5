"""FasterMoE's dynamic shadowing: hot experts go to every device for one step.

Inputs: loads, homes, cost. Outputs: the homes with some experts replicated everywhere, rule `home`. Experts are tried
by falling load and kept while the predicted time falls; the first that does not shorten it ends the search.

Letters: docs/notation.md; B [L, D] tokens of each device's experts, r shadowed experts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.placement.transfer_sizes import RunningSizes
from moe_jax.planner.contract import PlannerBase, falling, home_loads, own_tokens, replicated_everywhere
from moe_jax.planner.cost import Cost
from moe_jax.planner.registry import balancer, knob


@dataclasses.dataclass(frozen=True, kw_only=True)
class FasterMoeKnobs:
    """The knob of FasterMoE."""

    residual: bool = knob(True, "count the all-to-all that is left after shadowing; off: T(r) as printed, without it")


@balancer("fastermoe", aliases=("fastermoe_residual",), knobs=FasterMoeKnobs, after_gate=True)
class FasterMoePlanner(PlannerBase):
    """Shadow experts while T(r) falls.

    B counts the tokens *of a device's experts*, from every source; the tokens a device sends play no part. By default
    both sides of the comparison count the all-to-all over what is received, as the authors' release does; with
    `residual` off it is counted before shadowing only, over all tokens, as equation 8 is printed.
    Source: FasterMoE, equations 7 and 8, algorithm 1.
    """

    reference = True
    original = "broadcast and reduce of each shadowed expert, every step"

    def propose(self, loads, placement, cost):
        if self.config.when == "after_gate":
            return placement.replace(replicas=None, shares=None, rule="home")
        return self.refine(loads, placement, cost)

    def refine(self, loads, placement, cost):
        """Shadow for these loads, whatever was planned ahead."""
        limit = cost.replica_slots if self.config.bounded else placement.experts
        chosen, cut = _shadow(np.asarray(loads, np.float64), placement, cost, self.config, limit)
        self.increment("shadow_cut", cut)
        return placement.replace(replicas=replicated_everywhere(placement, chosen), shares=None, rule="home")


def shadow_rates(cost: Cost, requested_by: str) -> tuple[float, float, float]:
    """Return seconds of a token computed (12 M F / P), of one exchanged, and of an expert shadowed; back included.

    The last is what one expert to every other device costs after the gate; in the papers' price S / W each way.
    """
    return (
        3.0 / cost.tokens_per_second(requested_by),
        4.0 * cost.token_bytes / cost.bandwidth(requested_by),
        2.0 * cost.late_expert(requested_by),
    )


def _shadow(loads, placement, cost: Cost, config, limit: int) -> tuple[np.ndarray, int]:
    """Return (chosen bool [L, E], layers cut by `limit`)."""
    compute, exchange, shadow = shadow_rates(cost, config.name)
    residual = config.residual
    home, devices = placement.home, placement.devices
    layers = np.arange(len(home))
    totals = loads.sum(axis=1)
    own = own_tokens(loads, home)
    order = falling(totals)
    tokens = home_loads(totals, home, devices)
    received = home_loads(totals - own, home, devices)
    if residual:
        best = compute * tokens.max(axis=1) + exchange * received.max(axis=1)
    else:
        best = ((compute + exchange) * tokens).max(axis=1)
    chosen = np.zeros(home.shape, bool)
    active = np.ones(len(home), bool)
    needed = RunningSizes(len(home), devices, placement.devices_per_node)
    for r in range(1, placement.experts + 1):
        expert = order[:, r - 1]
        at = home[layers, expert]
        trial = tokens + loads[layers, :, expert]
        trial[layers, at] -= totals[layers, expert]
        left = received.copy()
        left[layers, at] -= totals[layers, expert] - own[layers, expert]
        needed.add(at, active[:, None] & (np.arange(devices) != at[:, None]))
        late = config.when == "after_gate"  # the rule on the device counts experts
        paid = r * shadow if late else 2 * cost.trans(needed.sizes(), devices, config.name)
        time = compute * trial.max(axis=1) + paid
        if residual:
            time = time + exchange * left.max(axis=1)
        active &= time < best
        if r > limit:
            return chosen, int(active.sum())
        if not active.any():
            break
        chosen[layers[active], expert[active]] = True
        tokens = np.where(active[:, None], trial, tokens)
        received = np.where(active[:, None], left, received)
        best = np.where(active, time, best)
    return chosen, 0
