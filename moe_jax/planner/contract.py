"""The contract of every planner, and the few array steps that several share.

Inputs: loads of all layers (predicted or true), the placement in force, and the cost model. Outputs: the placement of
the next step. A planner keeps no state between calls; its state is the placement or belongs to the session.

Letters: docs/notation.md; S = D here.
"""

from __future__ import annotations

import typing

import numpy as np

from moe_jax.placement import Placement, PlanShape, TransferSizes
from moe_jax.planner.cost import Cost
from moe_jax.planner.options import PlannerOptions
from moe_jax.planner.original import for_one_step


class Planner(typing.Protocol):
    """Turn loads into placements, all layers at once; equal inputs give equal placements on every process."""

    config: PlannerOptions
    counters: dict[str, int]
    """Counts of what happened while planning (for example `shadow_cut`), accumulated until cleared."""

    def propose(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement for loads [L, S, E] (whole or real numbers), starting from the one in force."""
        ...

    def refine(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement refined for the step's own loads [L, S, E], from one planned ahead."""
        ...

    any_holder: bool
    """Whether a token may go to any holder after the gate."""

    def ahead_most(self, placement: Placement, cost: Cost) -> TransferSizes | None:
        """Return the largest transfer that any plan ahead needs, None where that is not known."""
        ...

    def late_needs(self, shape: PlanShape, cost: Cost) -> TransferSizes | None:
        """Return how large a transfer after the gate may be, None for none."""
        ...

    def late_rule(self, shape: PlanShape, cost: Cost, groups: int) -> tuple[str, dict[str, typing.Any]] | None:
        """Return the name and the fields of the rule after the gate, None for none."""
        ...

    def reshard(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        """Return the placement with other homes and without replicas where that pays, else the same placement."""
        ...


class PlannerBase:
    """Hold the configuration; refine by planning again from the step's own loads; never move homes.

    Attributes:
      config: with every default filled in (`PlannerConfig.settled`), the planner's own knobs among them.
      counters: see `Planner`.
      reference: whether the balance of all is also given as a ratio to this planner's (Pro-Prophet, figure 16).
      any_holder: whether a token may go to any holder after the gate, so that a step's lists have room for all devices.
      schedule: the block-wise schedule that the system runs with (overlap/blocks.py), by which replay hides transfers.
      late_by: the settings under which `decides_late` holds, for messages.
      original: what the system that this planner comes from pays, in words; original_costs: in bytes (original.py).
    """

    reference: typing.ClassVar[bool] = False
    any_holder: typing.ClassVar[bool] = True
    schedule: typing.ClassVar[str] = "none"
    late_by: typing.ClassVar[str] = "when = 'after_gate'"
    original: typing.ClassVar[str] = "Trans and Agg to the chosen devices, every step"
    original_costs = staticmethod(for_one_step)

    def __init__(self, config: typing.Any):
        self.config = config
        self.counters: dict[str, int] = {}

    @classmethod
    def decides_late(cls, config: typing.Any) -> bool:
        """Say whether something is decided again from the step's own loads; `config` has its defaults filled in."""
        return config.when == "after_gate"

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
        """Return the rule of a step of this shape: its name in `moe_jax.after_gate.RULES`, and its fields.

        None where the planner decides nothing after the gate, or the shape has no replica slots.

        Args:
          cost: with the prices of the late transfer (`with_late_prices`).
          groups: data-parallel groups, over which the rule's counts are sums; those of `refine` are of one.
        """
        return None

    @property
    def reshard_every(self) -> int:
        """Steps between calls of `reshard`; 0 for never."""
        return 0

    def propose(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        raise NotImplementedError

    def refine(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        return self.propose(loads, placement, cost)

    def reshard(self, loads: np.ndarray, placement: Placement, cost: Cost) -> Placement:
        return placement

    def increment(self, name: str, count: int) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + int(count)


def few(offers: int, slots: int, crossing: int) -> TransferSizes:
    """Return the sizes of one transfer from plain numbers."""
    return TransferSizes(*(np.array(size) for size in (offers, slots, crossing)))


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


def rows_of(mask: np.ndarray) -> np.ndarray:
    """Turn bool [L, E, D] into sorted rows (layer, expert, device) [n, 3]."""
    return np.argwhere(mask).astype(np.int32)


def replicated_everywhere(placement: Placement, chosen: np.ndarray) -> np.ndarray:
    """Replicate chosen experts on all other devices: chosen bool [L, E] -> rows [n, 3]."""
    layer, expert = np.nonzero(chosen)
    devices = placement.devices
    rows = np.empty((len(layer), devices, 3), np.int32)
    rows[:, :, 0], rows[:, :, 1], rows[:, :, 2] = layer[:, None], expert[:, None], np.arange(devices)
    away = rows[:, :, 2] != placement.home[layer, expert][:, None]
    return rows[away]
