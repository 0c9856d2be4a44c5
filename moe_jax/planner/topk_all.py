"""The heaviest experts replicated on all devices: the fixed policies that Pro-Prophet compares with (VI-C)."""

from __future__ import annotations

import numpy as np

from moe_jax.planner.contract import PlannerBase, falling, replicated_everywhere


class TopkAllPlanner(PlannerBase):
    """Replicate the `top_k` heaviest experts of every layer on every device."""

    def propose(self, loads, placement, cost):
        count = min(self.config.top_k, placement.experts)
        if self.config.bounded:
            count = min(count, cost.replica_slots)
            self.increment("shadow_cut", placement.layers * (count < self.config.top_k))
        chosen = np.zeros(placement.home.shape, bool)
        np.put_along_axis(chosen, falling(loads.sum(axis=1))[:, :count], True, axis=1)
        return placement.replace(replicas=replicated_everywhere(placement, chosen), shares=None, rule="home")
