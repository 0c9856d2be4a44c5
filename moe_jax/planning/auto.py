"""`auto`: the planner that is chosen from observed loads, among all others (`replan/auto.py`, which judges them)."""

from __future__ import annotations

import dataclasses

from moe_jax.errors import check_bounds
from moe_jax.planning.balancer import Planner, register


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto:
    """Options of the planner `auto`.

    Attributes:
      round_steps: steps that settings plan before they are judged, and in which they are judged.
    """

    round_steps: int = 32

    def __post_init__(self):
        check_bounds(self, {"round_steps": 2})


@register("auto")
class AutoPlanner(Planner):
    """By itself plain expert parallelism: to choose among the others takes steps, which a session of its own keeps."""

    options = Auto()
