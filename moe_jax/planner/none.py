"""Plain expert parallelism: homes only."""

from __future__ import annotations

from moe_jax.planner.contract import PlannerBase


class NonePlanner(PlannerBase):
    """Drop every replica and leave homes where they are."""

    def propose(self, loads, placement, cost):
        return placement.replace(replicas=None, shares=None, rule="nearest")
