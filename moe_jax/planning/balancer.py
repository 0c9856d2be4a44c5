"""The contract of every planner, the registry of their files, and the few array steps that several share.

A planner's file declares its class by the decorator `balancer`; nothing else names it. The package imports every file
in its folder, so a new file is a new balancer, and `PlannerConfig` takes its knobs from here (config.py). A planner
keeps no state between calls; its state is the placement or belongs to the session.

Letters: docs/notation.md; S = D here; n samples.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping

import numpy as np

from moe_jax.cluster import all_reduce_bytes
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.planning.transfer_sizes import TransferSizes


def for_one_step(moves, cost: Cost) -> tuple[np.ndarray, np.ndarray, float]:
    """Return what a system pays whose replicas last one step: parameters come, gradients go back, homes alone move.

    Args:
      moves: what plans did, sample by sample: expert_replicas [n, L, E], device_replicas [n, L, D], `moved` [n, L],
        experts whose home changed, and `arrived` [n, L], replicas that were not there a sample before.

    Returns:
      bytes of all receivers of a layer in each step [n, L], the same for moves, and bytes of optimizer state a device.
    """
    each_step = 2.0 * moves.expert_replicas.astype(np.int64).sum(axis=2) * cost.expert_bytes
    return each_step, moves.moved * float(cost.state_bytes), 0.0


def standing(moves, cost: Cost) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the same where replicas stand, with optimizer state of their own, which moves to every new replica.

    Gradients are summed by a ring over n = replicas + 1 members, with 2 (n - 1) / n Z on each of its n links.
    """
    replicas = moves.expert_replicas.astype(np.int64)
    each_step = (all_reduce_bytes(cost.expert_bytes, replicas + 1) * (replicas + 1)).sum(axis=2)
    held = moves.device_replicas.sum(axis=1).max() * float(cost.state_bytes - cost.expert_bytes)
    return each_step, moves.arrived * float(cost.state_bytes), held


class Planner:
    """Turn loads into placements, all layers at once; equal inputs give equal placements on every process.

    This base refines by planning again from the step's own loads, decides nothing after the gate, and never moves
    homes; a planner writes `propose` at least.

    Attributes:
      name, knobs, defaults, after_gate: see `balancer`.
      config: with every default filled in (`PlannerConfig.settled`), the planner's own knobs among them.
      counters: counts of what happened while planning (for example `shadow_cut`), accumulated until cleared.
      reference: whether the balance of all is also given as a ratio to this planner's (Pro-Prophet, figure 16).
      any_holder: whether a token may go to any holder after the gate, so that a step's lists have room for all devices.
      schedule: the block-wise schedule that the system runs with (block_schedule.py), by which replay hides transfers.
      late_by: the settings under which `decides_late` holds, for messages.
      reshard_every: steps between calls of `reshard`; 0 for never.
      original: what the system that this planner comes from pays, in words; original_costs: in bytes, by its own rules.
    """

    name: typing.ClassVar[str]
    knobs: typing.ClassVar[type | None]
    defaults: typing.ClassVar[Mapping[str, typing.Any]]
    after_gate: typing.ClassVar[bool]
    reference: typing.ClassVar[bool] = False
    any_holder: typing.ClassVar[bool] = True
    schedule: typing.ClassVar[str] = "none"
    late_by: typing.ClassVar[str] = "when = 'after_gate'"
    original: typing.ClassVar[str] = "Trans and Agg to the chosen devices, every step"
    original_costs = staticmethod(for_one_step)
    reshard_every: int = 0

    def __init__(self, config: typing.Any):
        self.config = config
        self.counters: dict[str, int] = {}

    @classmethod
    def decides_late(cls, config: typing.Any) -> bool:
        """Say whether something is decided again from the step's own loads; `config` has its defaults filled in."""
        return config.when == "after_gate"

    def propose(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement for loads [L, S, E] (whole or real numbers), starting from the one in force."""
        raise NotImplementedError

    def refine(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement refined for the step's own loads [L, S, E], from one planned ahead."""
        return self.propose(loads, placement, cost)

    def reshard(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement with other homes and without replicas where that pays, else the same placement."""
        return placement

    def ahead_most(self, placement: Placement, cost: Cost) -> TransferSizes | None:
        """Return the most offers, slots and crossings that any plan ahead needs, beyond which shapes need no room.

        None where that is not known: shapes then keep room for one more than each plan needs.
        """
        return None

    def late_needs(self, shape: PlanShape, cost: Cost) -> TransferSizes | None:
        """Return how many offers, slots and crossings a transfer after the gate may have; None for no such transfer.

        Args:
          shape: what the step is compiled for so far.
        """
        return None

    def late_rule(self, shape: PlanShape, cost: Cost, groups: int) -> tuple[str, dict[str, typing.Any]] | None:
        """Return the rule of a step of this shape: its name in `moe_jax.moe.after_gate_rules.RULES`, and its fields.

        None where the planner decides nothing after the gate, or the shape has no replica slots.

        Args:
          cost: with the prices of the late transfer (`with_late_prices`).
          groups: data-parallel groups, over which the rule's counts are sums; those of `refine` are of one.
        """
        return None

    def remark(self, cost: Cost) -> str | None:
        """Return what a user is told of every plan beside its figures, None for nothing."""
        return None

    def increment(self, name: str, count: int) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + int(count)


BALANCERS: dict[str, type[Planner]] = {}

Class = typing.TypeVar("Class", bound=type)


def balancer(
    name: str, knobs: type | None = None, defaults: Mapping[str, typing.Any] | None = None, after_gate: bool = False
) -> typing.Callable[[Class], Class]:
    """Declare the decorated planner class.

    Args:
      name: as in `PlannerConfig.name`.
      knobs: dataclass of the fields of `PlannerConfig` that this planner brings; planners may share one. All are fields
        of one `PlannerConfig`, so no other class of knobs may have a field of the same name.
      defaults: value of a field of `PlannerConfig` that was left at None, where this planner has one of its own.
      after_gate: whether `when = 'after_gate'` works.
    """

    def declare(planner: Class) -> Class:
        assert name not in BALANCERS, f"two planners are called {name}"
        for other in BALANCERS.values():
            both = set() if other.knobs is knobs else _fields(knobs) & _fields(other.knobs)
            assert not both, (
                f"planners {other.name!r} and {name!r} both have a knob {', '.join(sorted(both))}; rename one"
            )
        planner.name, planner.knobs, planner.defaults, planner.after_gate = name, knobs, defaults or {}, after_gate
        BALANCERS[name] = planner
        return planner

    return declare


def _fields(knobs: type | None) -> set[str]:
    return set() if knobs is None else {field.name for field in dataclasses.fields(knobs)}


def knob(default: typing.Any, doc: str) -> typing.Any:
    """Return a dataclass field with its meaning, for the knobs of a balancer; None: see `defaults` of `balancer`."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def names(after_gate: bool = False) -> tuple[str, ...]:
    """Return the names of all balancers, or of those that can decide after the gate: 'none', then by the alphabet."""
    found = [name for name, planner in BALANCERS.items() if planner.after_gate or not after_gate]
    return tuple(sorted(found, key=lambda name: (name != "none", name)))


def build_planner(config) -> Planner:
    """Return the planner that `config.name` names, with that planner's own defaults filled in."""
    return BALANCERS[config.name](config.settled())


@balancer("none")
class NonePlanner(Planner):
    """Plain expert parallelism: drop every replica and leave homes where they are."""

    original = "plain expert parallelism: nothing moves"

    def propose(self, loads, placement, cost):
        return placement.replace(replicas=None, shares=None, rule="nearest")


def with_late(planner: Planner, shape: PlanShape, cost: Cost) -> PlanShape:
    """Return the shape with slots and candidates for what the planner decides after the gate; `shape.late` is kept."""
    needs = planner.late_needs(shape, cost)
    if needs is not None and shape.late is None:
        shape = dataclasses.replace(shape, late=cost.transfer_shape(needs, shape.devices, shape.devices_per_node))
    if shape.replica_slots and planner.any_holder:
        shape = dataclasses.replace(shape, candidates=shape.devices)
    return shape


def falling(values: np.ndarray) -> np.ndarray:
    """Sort the last dim from large to small, ties by rising id: [..., n] -> ids [..., n]."""
    return np.argsort(-values, axis=-1, kind="stable")


def home_loads(totals: np.ndarray, home: np.ndarray, devices: int) -> np.ndarray:
    """Add expert totals at their homes: totals [L, E], home [L, E] -> [L, D]."""
    layers = len(home)
    key = np.arange(layers)[:, None] * devices + home
    return np.bincount(key.ravel(), totals.ravel(), layers * devices).reshape(layers, devices)


def own_tokens(loads: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Return the tokens of each expert whose source is its home: loads [L, S, E] -> [L, E]."""
    return np.take_along_axis(loads, home[:, None, :], axis=1)[:, 0]


def replicated_everywhere(placement: Placement, chosen: np.ndarray) -> np.ndarray:
    """Replicate chosen experts on all other devices: chosen bool [L, E] -> rows [n, 3]."""
    return np.argwhere(chosen[:, :, None] & ~placement.homes)
