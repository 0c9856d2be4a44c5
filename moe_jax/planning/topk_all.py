"""The heaviest experts replicated on all devices: the fixed policies that Pro-Prophet compares with (VI-C)."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.errors import check_bounds
from moe_jax.planning.arrays import falling
from moe_jax.planning.balancer import Planner, register


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKAll:
    """Options of the planner `topk_all`.

    Attributes:
      top_k: experts replicated on all devices.
    """

    top_k: int = 2

    def __post_init__(self):
        check_bounds(self, {"top_k": 1})


@register("topk_all")
class TopkAllPlanner(Planner):
    """Replicate the `top_k` heaviest experts of every layer on every device."""

    options: TopKAll = TopKAll()

    def propose(self, loads, placement, cost):
        count = min(self.options.top_k, placement.experts)
        if self.config.bounded:
            count = min(count, cost.replica_slots)
            self.counters["shadow_cut"] += placement.layers * (count < self.options.top_k)
        chosen = np.zeros(placement.home.shape, bool)
        np.put_along_axis(chosen, falling(np, loads.sum(axis=1))[:, :count], True, axis=1)
        return placement.replace(replicas=np.argwhere(chosen[:, :, None] & ~placement.homes), shares=None, rule="home")
