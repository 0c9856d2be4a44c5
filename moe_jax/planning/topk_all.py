"""The heaviest experts replicated on all devices: the fixed policies that Pro-Prophet compares with (VI-C)."""

from __future__ import annotations

import numpy as np

from moe_jax.planning.arrays import falling
from moe_jax.planning.balancer import Planner, knob, register


@register("topk_all")
class TopkAllPlanner(Planner):
    """Replicate the `top_k` heaviest experts of every layer on every device."""

    top_k: int = knob(2, "experts replicated on all devices", least=1)

    def propose(self, loads, placement, cost):
        count = min(self.config.top_k, placement.experts)
        if self.config.bounded:
            count = min(count, cost.replica_slots)
            self.counters["shadow_cut"] += placement.layers * (count < self.config.top_k)
        chosen = np.zeros(placement.home.shape, bool)
        np.put_along_axis(chosen, falling(np, loads.sum(axis=1))[:, :count], True, axis=1)
        return placement.replace(replicas=np.argwhere(chosen[:, :, None] & ~placement.homes), shares=None, rule="home")
