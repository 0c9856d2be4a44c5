"""One run's planning: predict, plan at the interval, reshard now and then, refine after the gate.

Inputs: loads by iteration. Outputs: the placement for an iteration. It holds what a checkpoint must hold: the
placement, the predictor's window, and when it last planned. It neither compiles nor swaps anything.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.errors import UserError
from moe_jax.placement import Placement
from moe_jax.planner.contract import Planner
from moe_jax.planner.cost import Cost
from moe_jax.planner.late import with_late_prices
from moe_jax.planner.predictor import build_predictor
from moe_jax.planner.registry import build_planner
from moe_jax.planner.shares import split_evenly
from moe_jax.planner.token_split import choose_split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """A placement with what led to it.

    Attributes:
      planned, resharded: whether the planner ran, and whether homes changed.
      seconds: host time spent.
      error: [L], relative error of the prediction behind it.
    """

    placement: Placement
    planned: bool
    resharded: bool
    seconds: float
    error: np.ndarray


class PlanSession:
    """Keep one planner's placement up to date while a run goes on."""

    def __init__(self, config, placement: Placement, cost: Cost, exchanges_per_step: int = 1):
        """Plan from `placement` on.

        Args:
          exchanges_per_step: microbatches times data-parallel groups, over which a step's loads are summed; planners
            get the loads of one of them, as one gate counts them.
        """
        self.planner: Planner = build_planner(config)
        self.config, self.placement, self.cost = self.planner.config, placement, cost
        self.predictor = build_predictor(self.config)
        self.exchanges_per_step = exchanges_per_step
        self.last_planned: int | None = None
        self.last_sharded = 0
        self.split = ""  # in use, where it is chosen by price

    def observe(self, loads: np.ndarray) -> None:
        """Take in the loads [L, S, E] of the newest finished step."""
        self.predictor.observe(loads)

    def propose(self, iteration: int) -> Proposal:
        """Return the placement for `iteration`, planned from what has been observed so far."""
        began = time.perf_counter()
        every, before = self.config.interval, self.placement
        due = self.last_planned is None or iteration // every != self.last_planned // every
        shard = self.planner.reshard_every
        shard_due = bool(shard) and iteration // shard != self.last_sharded // shard
        if (due or shard_due) and self.predictor.seen:
            loads = self.predictor.predict() / self.exchanges_per_step
            if shard_due:
                self.placement = self.planner.reshard(loads, self.placement, self.cost)
                self.last_sharded = iteration
            unsure = dataclasses.replace(self.cost, load_error=tuple(self.predictor.error().tolist()))
            self.placement = self.planner.propose(loads, self.placement, unsure)
            self._split(loads)
            self.last_planned = iteration
        return Proposal(
            placement=self.placement,
            planned=due or shard_due,
            resharded=bool((self.placement.home != before.home).any()),
            seconds=time.perf_counter() - began,
            error=self.predictor.error(),
        )

    def _split(self, loads: np.ndarray) -> None:
        """Give the newest plan the token rule of `PlannerConfig.split`; what is decided late keeps its own."""
        if self.config.split == "even":
            self.placement = split_evenly(self.placement, loads)
        elif self.config.split == "auto" and self.cost.padded and not self.decides_late:
            self.placement, self.split = choose_split(self.placement, loads, self.cost, self.split)

    def refine(
        self, loads: np.ndarray, placement: Placement | None = None, late: TransferShape | None = None
    ) -> Placement:
        """Return a step's placement from its own loads [L, S, E]; later steps start from the plan ahead.

        Args:
          placement: what was planned ahead; the newest plan where not given.
          late: the largest transfer after the gate.
        """
        cost = with_late_prices(self.cost, late)
        return self.planner.refine(loads, self.placement if placement is None else placement, cost)

    @property
    def decides_late(self) -> bool:
        """Whether the planner decides again from the step's own loads."""
        return self.planner.decides_late(self.config)

    def state(self) -> dict:
        """Return what a checkpoint must hold: arrays and numbers by name."""
        placement = self.placement
        return {
            "home": placement.home,
            "replicas": placement.replicas,
            "shares": placement.shares,
            "rule": list(placement.rule),
            "last_planned": -1 if self.last_planned is None else self.last_planned,
            "last_sharded": self.last_sharded,
            "split": self.split,
            **{f"predictor_{name}": value for name, value in self.predictor.state().items()},
        }

    def forget_replicas(self) -> None:
        """Go on with the homes alone, and plan again as soon as asked."""
        self.placement = self.placement.replace(replicas=None, shares=None, rule="home")
        self.last_planned = None

    def restore(self, state: dict) -> None:
        """Continue from what `state` returned, on the same devices."""
        home = np.asarray(state["home"])
        if home.shape != self.placement.home.shape:
            raise UserError(
                f"the saved plan has [layers, experts] = {home.shape}, this run {self.placement.home.shape}"
            )
        self.placement = self.placement.replace(
            home=home,
            replicas=np.asarray(state["replicas"]),
            shares=np.asarray(state["shares"]),
            rule=tuple(state["rule"]),
        )
        self.last_planned = None if state["last_planned"] < 0 else int(state["last_planned"])
        self.last_sharded = int(state["last_sharded"])
        self.split = state.get("split", "")  # runs up to commit 54b32df chose none
        self.predictor.restore({"seen": state["predictor_seen"], "errors": state["predictor_errors"]})
