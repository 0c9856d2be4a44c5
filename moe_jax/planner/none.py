"""Plain expert parallelism: homes only."""

from __future__ import annotations

from moe_jax.planner.contract import PlannerBase
from moe_jax.planner.registry import balancer


@balancer("none")
class NonePlanner(PlannerBase):
    """Drop every replica and leave homes where they are."""

    original = "plain expert parallelism: nothing moves"

    def propose(self, loads, placement, cost):
        return placement.replace(replicas=None, shares=None, rule="nearest")
