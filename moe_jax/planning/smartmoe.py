"""SmartMoE's relocation: experts change homes so that heavy and light ones share devices.

Every device homes at most ceil(E / D) experts of a layer, without replicas; a layer keeps its homes unless the gain
until the next plan pays for moving parameters and optimizer state. Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.planning import routing
from moe_jax.planning.balancer import Planner, register
from moe_jax.planning.cost import home_seconds
from moe_jax.planning.eplb import pack
from moe_jax.planning.placement import TransferSizes


@register("smartmoe")
class SmartMoePlanner(Planner):
    """Pack experts by falling load onto the least-loaded device with a free place. Source: SmartMoE (ATC 2023)."""

    defaults = {"interval": 25}

    def propose(self, loads, placement, cost):
        devices = placement.devices
        bare = super().propose(loads, placement, cost)
        home = pack(loads.sum(axis=1), devices)[0].astype(np.int32)
        moved = bare.replace(home=home)
        none = TransferSizes(0, 0, 0)
        now = cost.layer(*routing.expected(bare, loads), none)
        then = cost.layer(*routing.expected(moved, loads), none)
        price = home_seconds(home, bare.home, devices, cost.prices)
        pays = (now - then) * cost.microbatches * self.config.interval > price
        return bare.replace(home=np.where(pays[:, None], home, bare.home))
