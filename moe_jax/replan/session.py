"""What a planner of a run keeps between its plans: past loads, the newest proposal, when it planned last.

Inputs: the loads [L, S, E] of finished steps. Outputs: what `planning/plan.py` is asked before a step. A session holds
what a checkpoint must hold. Letters: docs/notation.md.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

import numpy as np

from moe_jax.errors import UserError
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.buckets import Buckets
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan import Asked, Proposal, enlarge, propose, with_rule
from moe_jax.planning.plan_shape import PlanShape, build_shape
from moe_jax.registry import PLANNERS


class Predictor:
    """Predict the next step's loads from past ones by `PlannerConfig.predictor`, and report the error of predictions.

    It keeps a window of arrays, nothing else, so that a checkpoint can hold it: the loads [L, S, E] of the last steps,
    and of as many predictions the relative errors [L].
    """

    def __init__(self, config):
        """Take a `PlannerConfig` whose defaults are filled in."""
        self.kind = config.predictor
        window = 1 if self.kind == "last" else config.window
        self.seen: collections.deque[np.ndarray] = collections.deque(maxlen=window)
        self.errors: collections.deque[np.ndarray] = collections.deque(maxlen=max(window, 5))

    def observe(self, loads: np.ndarray, apart: int = 1) -> None:
        """Take in the loads [L, S, E] of the newest step, `apart` steps after those before."""
        loads = np.asarray(loads)
        while len(self.seen) > max(0, self.seen.maxlen - apart) and apart > 1:  # what the window has left behind
            self.seen.popleft()
        if self.seen and apart == 1:
            guess = self.predict().sum(axis=1)
            true = loads.sum(axis=1)
            self.errors.append(np.abs(guess - true).sum(axis=1) / np.maximum(true.sum(axis=1), 1))
        self.seen.append(loads)

    def state(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint must hold."""
        layers = self.seen[-1].shape[0] if self.seen else 0
        return {
            "predictor_seen": np.stack(self.seen) if self.seen else np.zeros((0, 0, 0, 0), np.int64),
            "predictor_errors": np.stack(self.errors) if self.errors else np.zeros((0, layers)),
        }

    def restore(self, state: dict) -> None:
        """Continue from what `state` returned."""
        for kept, name in ((self.seen, "predictor_seen"), (self.errors, "predictor_errors")):
            kept.clear()
            kept.extend(np.asarray(state[name]))

    def error(self) -> np.ndarray:
        """Return [L], the mean of sum |predicted - true| / sum true over expert totals in the window; 1 before any."""
        if not self.errors:
            return np.ones(self.seen[-1].shape[0] if self.seen else 0)
        return np.mean(self.errors, axis=0)

    def predict(self) -> np.ndarray:
        """Return the expected loads [L, S, E] of the next step, whole or real numbers; needs one observation."""
        if self.kind == "last":
            return self.seen[-1]
        mean = self.seen[0].astype(np.float64)  # Hecate 4.2: w = 5; one sum: a stack could be larger than memory
        for loads in itertools.islice(self.seen, 1, None):
            mean += loads
        mean /= len(self.seen)
        return mean


class PlanSession:
    """One planner of a run, which goes on."""

    def __init__(
        self, config, placement: Placement, cost: Cost, exchanges_per_step: int = 1, buckets: Buckets | None = None,
        groups: int = 1,
    ):  # fmt: skip
        """Plan from `placement` on; its replicas are those that the planner goes on from, whether they run or not.

        Args:
          exchanges_per_step: microbatches times data-parallel groups, over which a step's loads are summed.
          buckets, groups: as `Asked` has them.
        """
        self.planner = build_planner(config)
        most = self.planner.most_devices
        if most is not None and placement.devices > most:
            fitting = ", ".join(name for name, planner in PLANNERS.items() if planner.most_devices is None)
            raise UserError(
                f"planner {config.name!r} plans for at most {most} devices, not {placement.devices}; use {fitting}"
            )
        self.config, self.cost, self.exchanges_per_step = self.planner.config, cost, exchanges_per_step
        self.start, self.buckets, self.groups, self.trial = placement, buckets, groups, build_planner(config)
        self.predictor, self.reshard_every = Predictor(self.config), self.planner.reshard_every
        self.proposal = Proposal(placement=placement)
        self.last_planned: int | None = None
        self.last_sharded = 0

    @property
    def placement(self) -> Placement:
        """The newest one, from which the planner goes on."""
        return self.proposal.placement

    def observe(self, loads: np.ndarray, apart: int = 1) -> None:
        """Take in the loads [L, S, E] of the newest step, `apart` steps after those before."""
        self.predictor.observe(loads, apart)

    def prepare(self, iteration: int) -> None:
        """Do what comes before `ask` for `iteration`: of a planner by itself, nothing."""

    def ask(self, iteration: int) -> Asked:
        """Return what to ask the planner before `iteration`, by what was observed so far; at least one step was."""
        every, shard = self.config.interval, self.reshard_every
        due = self.last_planned is None or iteration // every != self.last_planned // every
        reshard = bool(shard) and iteration // shard != self.last_sharded // shard
        return self.asked(due, reshard)

    def asked(self, due: bool = False, reshard: bool = False, loads: np.ndarray | None = None) -> Asked:
        """Return what a planner is asked, by default for nothing new; loads: of a step, None for those predicted."""
        return Asked(
            planner=self.planner,
            trial=self.trial,
            config=self.config,
            cost=self.cost,
            loads=self.predictor.predict() if loads is None else loads,
            exchanges=self.exchanges_per_step,
            error=self.predictor.error(),
            last=self.proposal,
            due=due or reshard,
            reshard=reshard,
            buckets=self.buckets,
            groups=self.groups,
        )

    def accept(self, asked: Asked, proposal: Proposal, iteration: int) -> None:
        """Go on from the proposal that was made for `iteration`."""
        if asked.reshard:
            self.last_sharded = iteration
        if asked.due:
            self.proposal, self.last_planned = proposal, iteration

    def propose(self, iteration: int) -> Placement:
        """Return the placement for `iteration`: the newest one before anything was observed."""
        if self.predictor.seen:
            self.prepare(iteration)
            asked = self.ask(iteration)
            self.accept(asked, propose(asked) if asked.due else self.proposal, iteration)
        return self.proposal.adopted

    @property
    def first_shape(self) -> PlanShape:
        """What a run's first step is compiled for: the first homes, and slots for what is decided after the gate."""
        return with_rule(self.planner, build_shape(self.start), self.cost, self.groups)

    def planned(self, past: Iterable[np.ndarray], step: int) -> tuple[PlanShape, Placement]:
        """Return the first shape and placement of a run that goes on from steps with these loads [L, S, E]."""
        for loads in past:
            self.observe(loads)
        placement = self.propose(step)
        return enlarge(self.asked(), placement, self.first_shape), placement

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
            "split": self.proposal.split,
            "pays": self.proposal.pays,
            **self.predictor.state(),
        }

    def restore(self, state: dict) -> None:
        """Continue from what `state` returned, on the same devices."""
        home = np.asarray(state["home"])
        if home.shape != self.placement.home.shape:
            raise UserError(
                f"the saved plan has [layers, experts] = {home.shape}, this run {self.placement.home.shape}"
            )
        placement = self.placement.replace(
            home=home,
            replicas=np.asarray(state["replicas"]),
            shares=np.asarray(state["shares"]),
            rule=tuple(state["rule"]),
        )
        self.proposal = Proposal(placement=placement, split=state["split"], pays=state.get("pays", True))
        self.last_planned = None if state["last_planned"] < 0 else int(state["last_planned"])
        self.last_sharded = int(state["last_sharded"])
        self.predictor.restore(state)
