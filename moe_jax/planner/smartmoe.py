"""SmartMoE's relocation: experts change homes so that heavy and light ones share devices.

Inputs: loads, homes, cost. Outputs: E / D homes of a layer on every device, no replicas; a layer keeps its homes unless
the gain until the next plan pays for moving parameters and optimizer state.

Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.errors import UserError
from moe_jax.placement import routing
from moe_jax.placement.transfer_sizes import no_transfer
from moe_jax.planner.contract import PlannerBase
from moe_jax.planner.eplb import pack
from moe_jax.planner.registry import balancer


@balancer("smartmoe", defaults={"interval": 25})
class SmartMoePlanner(PlannerBase):
    """Pack experts by falling load onto the least-loaded device with a free place. Source: SmartMoE (ATC 2023)."""

    original = "parameters and optimizer state move when homes change"

    def propose(self, loads, placement, cost):
        name, devices = self.config.name, placement.devices
        if placement.experts % devices:
            raise UserError(
                f"planner {name!r} needs experts ({placement.experts}) to be a multiple of devices ({devices})"
            )
        loads = np.asarray(loads, np.float64)
        bare = placement.replace(replicas=None, shares=None, rule="nearest")
        home = pack(loads.sum(axis=1), devices)[0].astype(np.int32)
        moved = bare.replace(home=home)
        none = no_transfer((placement.layers,))
        now = cost.layer(*routing.expected(bare, loads), none, name)
        then = cost.layer(*routing.expected(moved, loads), none, name)
        price = move_seconds(bare.home, home, devices, cost.state_bytes, cost.bandwidth(name))
        pays = (now - then) * cost.microbatches * self.config.steps_between_plans > price
        return bare.replace(home=np.where(pays[:, None], home, bare.home))


def move_seconds(old: np.ndarray, new: np.ndarray, devices: int, state_bytes: float, bandwidth: float) -> np.ndarray:
    """Return the time to move experts between homes [L, E], all links at once: seconds [L]."""
    layer, expert = np.nonzero(old != new)
    shape = (len(old), devices)
    sent, got = np.zeros(shape), np.zeros(shape)
    np.add.at(sent, (layer, old[layer, expert]), 1)
    np.add.at(got, (layer, new[layer, expert]), 1)
    return np.maximum(sent.max(axis=1), got.max(axis=1)) * state_bytes / bandwidth
