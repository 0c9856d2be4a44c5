"""`auto`: the planner that is chosen from observed loads, among all others (`replan/auto.py`, which judges them)."""

from __future__ import annotations

import dataclasses

from moe_jax.errors import check_bounds
from moe_jax.planning.balancer import Planner, register
from moe_jax.registry import PLANNERS


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


def planners(devices: int) -> list[str]:
    """Return the names of the planners that plan for so many devices, without 'none' and 'auto', by the alphabet."""
    able = [name for name, own in PLANNERS.items() if own.most_devices is None or devices <= own.most_devices]
    return sorted(set(able) - {"none", "auto"})


def config_of(config, name: str, **fields):
    """Return a `PlannerConfig` of another planner that decides nothing after the gate."""
    return dataclasses.replace(PLANNERS[name].ahead_only(config), name=name, **fields)
