"""One run's planning: predict, plan at the interval, reshard now and then, refine after the gate.

A session holds what a checkpoint must hold. Letters: docs/notation.md.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools

import numpy as np

from moe_jax.errors import UserError
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning.balancer import BALANCERS, build_planner, plan_seconds
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement
from moe_jax.planning.shares import choose_split, split_evenly

DECAY = 0.5  # 'exponential': how much less each step before the newest counts than the one after it


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
        count = len(self.seen)
        if self.kind == "last":
            return self.seen[-1]
        if self.kind == "window":  # Hecate 4.2: w = 5
            mean = self.seen[0].astype(np.float64)  # one sum: a stack of the steps could be larger than memory
            for loads in itertools.islice(self.seen, 1, None):
                mean += loads
            mean /= count
            return mean
        if self.kind == "exponential":
            weight = (1.0 - DECAY) ** np.arange(count)[::-1]
            return np.tensordot(weight / weight.sum(), np.stack(self.seen), axes=1)
        # 'trend': the straight line through the steps, at least 0, with the newest step's total
        seen = np.stack(self.seen).astype(np.float64)
        if count == 1:
            return seen[0]
        time_of = np.arange(count) - (count - 1) / 2
        slope = np.tensordot(time_of, seen, axes=1) / (time_of**2).sum()
        guess = np.maximum(seen.mean(axis=0) + slope * (count + 1) / 2, 0.0)
        total = guess.sum(axis=2, keepdims=True)
        return guess * np.where(total > 0, seen[-1].sum(axis=2, keepdims=True) / np.where(total > 0, total, 1.0), 1.0)


STAY = 1.05  # how much longer than homes alone replicas that run may take, so that programs seldom change


class PlanSession:
    """Keep one planner's placement up to date while a run goes on."""

    def __init__(self, config, placement: Placement, cost: Cost, exchanges_per_step: int = 1):
        """Plan from `placement` on; its replicas are those that the planner goes on from, whether they run or not.

        Args:
          exchanges_per_step: microbatches times data-parallel groups, over which a step's loads are summed; planners
            get the loads of one of them, as one gate counts them.
        """
        self.planner = build_planner(config)
        most = self.planner.most_devices
        if most is not None and placement.devices > most:
            fitting = ", ".join(name for name, planner in BALANCERS.items() if planner.most_devices is None)
            raise UserError(
                f"planner {config.name!r} plans for at most {most} devices, not {placement.devices}; use {fitting}"
            )
        self.config, self.placement, self.cost = self.planner.config, placement, cost
        self.predictor = Predictor(self.config)
        self.exchanges_per_step = exchanges_per_step
        self.last_planned: int | None = None
        self.last_sharded = 0
        self.split = ""  # in use, where it is chosen by price
        self.pays = True  # whether the replicas run, with which layers take less time than by their homes alone

    @property
    def adopted(self) -> Placement:
        """What runs of the newest plan."""
        return self.placement if self.pays else self.placement.bare()

    def drop_replicas(self):
        """Go on with the homes alone, and plan again as soon as asked."""
        self.placement = self.placement.replace(replicas=None, shares=None, rule="home")
        self.last_planned = None

    def observe(self, loads: np.ndarray, apart: int = 1) -> None:
        """Take in the loads [L, S, E] of the newest step, `apart` steps after those before."""
        self.predictor.observe(loads, apart)

    def propose(self, iteration: int) -> Placement:
        """Return the placement for `iteration`, planned from what the predictor has observed so far."""
        every, shard = self.config.interval, self.planner.reshard_every
        due = self.last_planned is None or iteration // every != self.last_planned // every
        shard_due = bool(shard) and iteration // shard != self.last_sharded // shard
        if (due or shard_due) and self.predictor.seen:
            loads, before = self.predictor.predict(), self.adopted
            if self.exchanges_per_step > 1:
                loads = loads / self.exchanges_per_step
            if shard_due:
                self.placement = self.planner.reshard(loads, before, self.cost)
                self.last_sharded = iteration
            homes = self.placement.bare()
            unsure = dataclasses.replace(self.cost, load_error=tuple(self.predictor.error().tolist()))
            self.placement = self.planner.propose(loads, self.placement, unsure)
            # the newest plan's token rule; what is decided late keeps its own
            if self.config.split == "even":
                self.placement = split_evenly(self.placement, loads)
            elif self.config.split == "auto" and not self.config.decides_late:
                self.placement, self.split = choose_split(self.placement, loads, self.cost, self.split)
            self.last_planned, self.pays = iteration, True
            if self.config.must_pay and self.cost.price == "executor" and len(self.placement.replicas):
                taken, alone = (plan_seconds(self.planner, own, loads, self.cost) for own in (self.placement, homes))
                self.pays = taken < alone * (STAY if len(before.replicas) else 1.0)
                if not self.pays and (self.placement.home != homes.home).any():
                    self.placement = homes
        return self.adopted

    def refine(
        self, loads: np.ndarray, placement: Placement | None = None, late: TransferShape | None = None
    ) -> Placement:
        """Return a step's placement from its own loads [L, S, E]; later steps start from the plan ahead.

        `placement` is what was planned ahead (None: the newest plan), `late` the largest transfer after the gate.
        """
        cost = dataclasses.replace(self.cost, late=late)
        return self.planner.refine(loads, self.adopted if placement is None else placement, cost)

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
            "pays": self.pays,
            **self.predictor.state(),
        }

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
        self.split, self.pays = state["split"], state.get("pays", True)
        self.predictor.restore(state)
