"""The contract of every planner, and the registry of their files.

A planner's file registers a class; nothing else names it. The package imports every file in its folder, so a new file
is a new balancer, and `PlannerConfig` takes its knobs from here (config.py).
Letters: docs/notation.md; S = D here.
"""

from __future__ import annotations

import collections
import dataclasses
import typing
from collections.abc import Callable, Mapping

import numpy as np

from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.planning.sizes import TransferSizes

BALANCERS: dict[str, type[Planner]] = {}


class Planner:
    """Turn loads into placements, all layers at once; equal inputs give equal placements on every process.

    This base is plain expert parallelism: it drops every replica and leaves homes where they are. It refines by
    planning again from the step's own loads, and decides nothing after the gate. A planner writes `propose` at least.
    It keeps no state but `counters`, counts of what happened while planning (for example `shadow_cut`), until cleared;
    `config` is a `PlannerConfig` with every default filled in (`settled`).

    What the body of a subclass annotates with `knob(...)` becomes fields of `PlannerConfig` (`register`).
    """

    name: typing.ClassVar[str]  # as in `PlannerConfig.name`
    # {field: (type, dataclass field)} of the fields of `PlannerConfig` that this planner brings (`knob`)
    knobs: typing.ClassVar[Mapping[str, tuple[typing.Any, dataclasses.Field]]]
    # its own values for fields of `PlannerConfig` that were left at None
    defaults: typing.ClassVar[Mapping[str, typing.Any]]
    after_gate: typing.ClassVar[bool]  # whether `when = 'after_gate'` works
    # whether a token may go to any holder after the gate, so that a step's lists have room for all devices
    any_holder: typing.ClassVar[bool] = True
    # the block-wise schedule that the system runs with (block_schedule.py), by which replay hides transfers
    schedule: typing.ClassVar[str] = "none"
    # the knob that decides again after the gate what was planned ahead; None for no such knob
    decides_again: typing.ClassVar[str | None] = None
    # whether all its replicas come after the gate where it decides after it
    late_replicas: typing.ClassVar[bool] = False
    most_devices: typing.ClassVar[int | None] = None  # beyond which its search is too long; None for no limit
    reshard_every: int = 0  # steps between calls of `reshard`; 0 for never

    def __init__(self, config: typing.Any):
        self.config = config
        self.counters: collections.Counter[str] = collections.Counter()

    def propose(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement for loads [L, S, E] (whole or real numbers), starting from the one in force."""
        return placement.bare()

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

    def late_rule(self, shape: PlanShape, cost: Cost, groups: int) -> tuple[str, dict[str, typing.Any]] | None:
        """Return the rule of a step of this shape: its name in `moe_jax.moe.after_gate.RULES`, and its fields.

        None where the planner decides nothing after the gate, or the shape has no replica slots.

        Args:
          cost: with the late transfer.
          groups: data-parallel groups, over which the rule's counts are sums; those of `refine` are of one.
        """
        return None

    def remark(self, cost: Cost) -> str | None:
        """Return what a user is told of every plan besides its figures, None for nothing."""
        return None


def register(
    name: str, defaults: Mapping[str, typing.Any] | None = None, after_gate: bool = False
) -> Callable[[type[Planner]], type[Planner]]:
    """Declare the decorated class as the planner `name` of `PlannerConfig.name`; arguments as `Planner` has them."""

    def declare(cls):
        hints = typing.get_type_hints(cls)
        own = {field: value for field, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        assert name not in BALANCERS, f"planner {name!r} is registered twice"
        for other in BALANCERS.values():
            both = own.keys() & other.knobs.keys()
            assert not both, (
                f"planners {other.name!r} and {name!r} both have a knob {', '.join(sorted(both))}; rename one"
            )
        for field in own:
            delattr(cls, field)  # its value is in `config`
        cls.name, cls.defaults, cls.after_gate = name, defaults or {}, after_gate
        cls.knobs = {field: (hints[field], value) for field, value in own.items()}
        BALANCERS[name] = cls
        return cls

    return declare


def knob(
    default: typing.Any,
    doc: str = "",
    least: float | None = None,
    above: float | None = None,
    values: tuple = (),
    word: str | None = None,
) -> typing.Any:
    """Return a field of `PlannerConfig` with its meaning; None: see `defaults` of `Planner`.

    Args:
      least: the smallest value, of a whole number where it is an int; above: what it must exceed.
      values: all that there are; word: what may stand instead of a number.
    """
    bounds = {"least": least, "above": above, "values": values, "word": word}
    return dataclasses.field(default=default, metadata={"doc": doc, **bounds} if doc else bounds)


def names(after_gate: bool = False) -> tuple[str, ...]:
    """Return the names of all balancers, or of those that can decide after the gate: 'none', then by the alphabet."""
    found = [name for name, planner in BALANCERS.items() if planner.after_gate or not after_gate]
    return tuple(sorted(found, key=lambda name: (name != "none", name)))


def build_planner(config) -> Planner:
    """Return the planner that `config.name` names, with that planner's own defaults filled in."""
    return BALANCERS[config.name](config.settled())


@register("none")
class NonePlanner(Planner):
    """Plain expert parallelism."""
