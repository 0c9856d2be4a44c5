"""The contract of every planner.

A planner's file registers a class; nothing else names it. The package imports every file in its folder, so a new file
is a new planner. The two that plan nothing, `none` and `auto`, stand here.
Letters: docs/notation.md; S = D here.
"""

from __future__ import annotations

import collections
import dataclasses
import typing
from collections.abc import Mapping

import numpy as np

from moe_jax.planning.config import DEFAULTS, PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement, TransferSizes
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.registry import PLANNERS, options_in

register = PLANNERS.register


class Planner:
    """Turn loads into placements, all layers at once; equal inputs give equal placements on every process.

    This base is plain expert parallelism: it drops every replica and leaves homes where they are. It refines by
    planning again from the step's own loads, and decides nothing after the gate. A planner writes `propose` at least,
    or `refine` where all of its replicas can come late.
    It keeps no state but `counters`, counts of what happened while planning (for example `shadow_cut`), until cleared;
    `config` is what all planners read, with every default filled in.
    """

    name: typing.ClassVar[str]  # as in `PlannerConfig.name`
    # what it alone reads, a frozen dataclass of its file: as configured, of the class their defaults
    options: typing.Any = None
    # its own values for fields of `PlannerConfig` that were left at None
    defaults: typing.ClassVar[Mapping[str, typing.Any]] = {}
    after_gate: typing.ClassVar[bool] = False  # whether `when = 'after_gate'` works
    # whether a token may go to any holder after the gate, so that a step's lists have room for all devices
    any_holder: typing.ClassVar[bool] = True
    rule: typing.ClassVar[str] = "nearest"  # of homes alone, the token rule
    # the block-wise schedule that the system runs with (block_schedule.py), by which replay hides transfers
    schedule: str = "none"
    late_option: typing.ClassVar[str] = ""  # of its options, one by which it decides after the gate even with 'ahead'
    # whether all its replicas come after the gate where it decides after it; ahead it plans as `refine` does
    late_replicas: typing.ClassVar[bool] = False
    most_devices: typing.ClassVar[int | None] = None  # beyond which its search is too long; None for no limit
    reshard_every: int = 0  # steps between calls of `reshard`; 0 for never

    def __init__(self, config: PlannerConfig):
        own = {**DEFAULTS, **self.defaults}
        blank = {name: value for name, value in own.items() if getattr(config, name) is None}
        self.config = dataclasses.replace(config, **blank) if blank else config
        self.options = options_in(config, self.options)
        self.counters: collections.Counter[str] = collections.Counter()

    def propose(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement for loads [L, S, E] (whole or real numbers), starting from the one in force."""
        if self.late_replicas and self.config.when == "ahead":
            return self.refine(loads, placement, cost)
        return placement.replace(replicas=None, shares=None, rule=self.rule)

    def refine(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement refined for the step's own loads [L, S, E], from one planned ahead."""
        return self.propose(loads, placement, cost)

    def reshard(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement with other homes and without replicas where that pays, else the same placement."""
        return placement

    def ahead_most(self, plan: Placement, cost: Cost) -> TransferSizes | None:
        """Return the most offers, slots and crossings that plans like this one need ahead: shapes need no more room.

        None where that is not known: shapes then keep room for one more than each plan needs.
        """
        return None

    def slots_after_gate(self, cost: Cost) -> int:
        """Return the replica slots of a device that a transfer after the gate may fill; 0 for no such transfer."""
        return cost.replica_slots if self.late_replicas and self.config.when == "after_gate" else 0

    def late_rule(self, shape: PlanShape, cost: Cost, groups: int) -> typing.Any:
        """Return the rule of a step of this shape: a frozen dataclass of which `moe/after_gate.py` makes tables.

        None where the planner decides nothing after the gate, or the shape has no replica slots.

        Args:
          groups: data-parallel groups, over which the rule's counts are sums; those of `refine` are of one.
        """
        return None

    def remark(self, cost: Cost) -> str | None:
        """Return what a user is told of every plan besides its figures, None for nothing."""
        return None


def names(after_gate: bool = False) -> tuple[str, ...]:
    """Return the names of all planners, or of those that can decide after the gate: 'none', then by the alphabet."""
    found = [name for name, planner in PLANNERS.items() if planner.after_gate or not after_gate]
    return tuple(sorted(found, key=lambda name: (name != "none", name)))


def build_planner(config: PlannerConfig) -> Planner:
    """Return the planner that `config.name` names, with that planner's own defaults filled in."""
    return PLANNERS.find(config.name)(config)


@register("none")
class NonePlanner(Planner):
    """Plain expert parallelism."""


@register("auto")
class AutoPlanner(Planner):
    """Plain expert parallelism by itself: a session of its own chooses among the others (`replan/auto.py`)."""
