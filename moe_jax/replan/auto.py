"""`auto`: which planner, replica slots, token split and schedule a run should have now, from its observed loads.

A chooser, on the host only. Inputs: the loads of finished steps, int [L, S, E], and the price list in `Cost`. Output:
before each step the placement of the setting in force, whose `program` ('SCHEDULE/SLOTS') says what step to compile.

    settings   schedule x planner x slots x split; each proposes by a `PlanSession` of its own, from the same past
    judged     by the one cost model, on the loads of the step after those that it had seen when it proposed: a setting
               that predicts badly is judged by what its plan cost, with the moves of homes that it made
    a round    all settings plan for `ROUND_STEPS` steps, since some need that long to reach what they can do, and
               are judged in as many again, up to `LONGEST` times as many while chance may still turn the answer (two
               standard errors of the difference); those that can no longer win stop early
    a change   where the best saved more than `MARGIN` of a step, and would save more than moving homes costs in
               as many steps again; the old program goes on while the new one compiles, so a change costs no more

Between rounds the setting in force alone plans. A round that changes nothing doubles the wait for the next one, up to
`MOST_WAITS` rounds; one begins at once when the step is further from even loads than it was, by five margins.
Everything follows from the loads: processes agree, and `state` lets a run that is resumed go on alike.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time

import numpy as np

from moe_jax.parallel.static_sizes import BucketRows, TransferShape
from moe_jax.planning import routing
from moe_jax.planning.buckets import BUCKET_LIMIT, Buckets, pairs_by_kind
from moe_jax.planning.cost import Cost, home_seconds
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan import Asked, grown
from moe_jax.planning.plan_shape import build_shape
from moe_jax.planning.routing import split_evenly
from moe_jax.registry import PLANNERS
from moe_jax.replan.session import PlanSession, Predictor

_LOG = logging.getLogger(__name__)
SPLITS = ("plan", "even")
MOST_WAITS = 256  # rounds between two rounds
MARGIN = 0.01  # part of a step's time in the MoE layers that a change must save: less would follow noise
ROUND_STEPS = 32  # in which settings plan before they are judged, and in which they are judged
LONGEST = 4  # times `ROUND_STEPS`, a round at most
EXACT_DEVICES = 1024  # up to which every pair of devices is counted
SHOWN = 8  # settings in the table of a decision


class Setting(PlanSession):
    """One planner with so many slots, under one schedule; its splits share the planner's work.

    Attributes:
      splits: of `PlannerConfig.split`, those that there are plans for; names: theirs, 'SCHEDULE PLANNER SLOTS SPLIT'.
      ahead: the transfer that its step is compiled for by now.
      moved: seconds of homes that moved with the newest plan, in one step.
      plans: the newest, of each split.
    """

    def __init__(self, config, start: Placement, cost: Cost, exchanges: int = 1):
        """Take a `PlannerConfig` with the planner's name and slots, and a cost with the schedule's name."""
        super().__init__(config, start, cost, exchanges)
        plain = not cost.replica_slots and cost.schedule in ("", *(line.name for line in cost.schedules[:1]))
        self.program = "" if plain else f"{cost.schedule}/{cost.replica_slots}"  # a run starts with ''
        title = f"{cost.schedule or 'as configured'} {config.name} {cost.replica_slots}"
        several = config.split == "auto" and cost.replica_slots
        self.splits = SPLITS if several else (config.split.replace("auto", "plan"),)
        self.names = tuple(f"{title} {split}" for split in self.splits)
        self.config = dataclasses.replace(self.config, split="plan", must_pay=False)
        self.ahead: TransferShape | None = None
        self.moved = 0.0
        self.plans: tuple[Placement, ...] = ()

    def make_plans(self, iteration: int) -> None:
        """Plan for a step, a plan for each split."""
        before, plan = self.placement, self.propose(iteration)
        self.moved = 0.0
        if plan is before and self.plans:
            return
        if self.plans and (plan.home != before.home).any():
            self.moved = float(home_seconds(plan.home, before.home, plan.devices, self.cost.prices).sum())
        plan = plan.replace(program=self.program)
        loads = self.predictor.predict() / self.exchanges_per_step
        self.plans = tuple(split_evenly(plan, loads) if split == "even" else plan for split in self.splits)
        shape = dataclasses.replace(build_shape(plan), ahead=self.ahead)
        self.ahead = grown(self.planner, shape, plan, self.cost).ahead

    def state(self) -> dict:
        """Return what a checkpoint must hold, but for the predictor."""
        own = {name: value for name, value in super().state().items() if not name.startswith("predictor_")}
        plans = [{"shares": plan.shares, "rule": list(plan.rule)} for plan in self.plans]
        ahead = None if self.ahead is None else dataclasses.asdict(self.ahead)
        return {"session": own, "plans": plans, "ahead": ahead, "moved": self.moved}

    def restore(self, state: dict) -> None:
        """Continue from what `state` returned; the predictor is restored."""
        super().restore({**state["session"], **self.predictor.state()})
        plan = self.placement.replace(program=self.program)
        self.plans = tuple(
            plan.replace(shares=np.asarray(own["shares"]), rule=tuple(own["rule"])) for own in state["plans"]
        )
        self.ahead, self.moved = state["ahead"] and TransferShape(**state["ahead"]), state["moved"]

    def seconds(self, loads: np.ndarray) -> list[float]:
        """Return what the layers take under each split's plan for one exchange's loads [L, S, E], moves included."""
        return [step_seconds(plan, loads, self.cost, self.ahead) + self.moved for plan in self.plans]


def step_seconds(plan: Placement, loads: np.ndarray, cost: Cost, ahead: TransferShape | None) -> float:
    """Return the seconds of all layers in one microbatch, under the transfer that the step is compiled for.

    Buckets are as long as the fullest pair of their kind in any layer, and those that travel at most `BUCKET_LIMIT`
    times what the fullest source sends to a device on average; a pair that is fuller takes more passes.

    Args:
      loads: int [L, S, E] of one exchange.
    """
    exchange = None
    if plan.devices <= EXACT_DEVICES and cost.prices.of_program:
        pairs = routing.pair_loads(plan, loads)
        computed = pairs.sum(axis=1)
        received = computed - np.einsum("ldd->ld", pairs)
        most = max(1, math.ceil(BUCKET_LIMIT * loads.sum(axis=2).max() / plan.devices))
        fullest = {kind: of.max(axis=-1, initial=0) for kind, of in pairs_by_kind(pairs, plan.devices_per_node).items()}
        rows = {kind: max(1, math.ceil(of.max())) for kind, of in fullest.items()}
        rows |= {kind: min(rows[kind], most) for kind in ("node", "far")}
        passes = np.max([np.maximum(1, np.ceil(fullest[kind] / rows[kind])) for kind in ("node", "far")], axis=0)
        exchange = cost.prices.padded_exchange(BucketRows(**rows), plan) * passes
    else:
        computed, received = routing.expected(plan, loads)
    trans = np.full(plan.layers, 0.0 if ahead is None else cost.prices.shape_seconds(ahead))
    parts = cost.parts(computed, received, plan.sizes, exchange=exchange, trans=trans)
    return float(sum(parts.values()).sum())


def even_seconds(loads: np.ndarray, cost: Cost) -> float:
    """Return the least that any setting could take: loads [L, S, E] evenly computed and sent, nothing moved."""
    layers, devices, _ = loads.shape
    computed = np.repeat(loads.sum(axis=(1, 2))[:, None] / devices, devices, axis=1)
    received = computed * (1 - 1 / devices)
    names = [line.name for line in cost.schedules] or [""]
    none = np.zeros(layers)
    costs = (dataclasses.replace(cost, schedule=name) for name in names)
    return min(float(sum(own.parts(computed, received, None, trans=none).values()).sum()) for own in costs)


def planners(devices: int) -> list[str]:
    """Return the names of the planners that plan for so many devices, without 'none' and 'auto', by the alphabet."""
    able = [name for name, own in PLANNERS.items() if own.most_devices is None or devices <= own.most_devices]
    return sorted(set(able) - {"none", "auto"})


def build_settings(config, start: Placement, cost: Cost, exchanges: int = 1) -> list[Setting]:
    """Return all settings, plain expert parallelism first: {none, half, all} of the slots, each planner and schedule.

    Without slots there are the planners that move homes; a planner whose figures the cluster lacks is an error there.
    None decides anything after the gate.
    """
    slots, found = cost.replica_slots, []
    for line in cost.schedules or (None,):
        schedule = "" if line is None else line.name
        for count in dict.fromkeys((0, slots // 2, slots)):
            own = dataclasses.replace(cost, replica_slots=count, schedule=schedule)
            names = planners(start.devices) if count else ["none", *HOME_MOVERS]
            for name in names if count or start.experts % start.devices == 0 else [n for n in names if n != "eplb"]:
                found.append(Setting(config.ahead_only(name, count), start, own, exchanges))
    return found


HOME_MOVERS = ("eplb", "hecate", "smartmoe")  # what plans anything without a replica slot


class AutoSession(PlanSession):
    """Keep the setting in force, and judge all settings now and then; used as the `PlanSession` of one planner.

    `cost`, `planner` and `placement` are those of the setting in force.
    """

    def __init__(
        self,
        config,
        placement: Placement,
        cost: Cost,
        exchanges_per_step: int = 1,
        buckets: Buckets | None = None,
        groups: int = 1,
    ):
        super().__init__(config, placement, cost, exchanges_per_step, buckets, groups)
        self.base_cost = cost
        self.settings = build_settings(config, placement, cost, exchanges_per_step)
        self.predictors: dict[tuple, Predictor] = {}  # settings that look back alike share one
        for setting in self.settings:
            key = (setting.config.predictor, setting.config.window)
            setting.predictor = self.predictors.setdefault(key, setting.predictor)
        self.current = (0, 0)  # places of the setting and the split in force
        self.judged: dict[int, list[list[float]]] = {}  # {place of a setting in a round: each step's seconds by split}
        self.even: list[float] = []  # of the same steps, the least that any setting could take
        self.settling = False  # in a round's first `ROUND_STEPS` steps, of which the setting in force alone counts
        self.wait, self.waits = 0, 1  # steps to the next round; rounds that the wait after it lasts
        self.recent: list[float] = []  # seconds over the least, of the last steps
        self.decided_at = 0.0  # what their mean was at the last decision
        self.spent = 0.0  # host seconds of planning and judging since then
        self._begin_round()

    @property
    def in_force(self) -> Setting:
        """The setting in force."""
        return self.settings[self.current[0]]

    def _begin_round(self) -> None:
        """Let all settings plan from the homes in force, without replicas, as a change to them would."""
        self.settling = True
        self.judged, self.even = {place: [] for place in range(len(self.settings))}, []
        bare = self.in_force.placement.replace(replicas=None, shares=None, rule="home")
        for place, setting in enumerate(self.settings):
            if place != self.current[0]:
                setting.proposal = dataclasses.replace(setting.proposal, placement=bare)
                setting.last_planned, setting.ahead, setting.plans = None, None, ()

    def observe(self, loads: np.ndarray, apart: int = 1) -> None:
        """Take in a step's loads [L, S, E]: what it took under the plans made before; then as the past of others.

        Plans that were made more than a step before (`apart`) are not judged.
        """
        began, seen = time.perf_counter(), np.asarray(loads) / self.exchanges_per_step
        if self.in_force.plans and apart == 1:
            even = even_seconds(seen, self.base_cost)
            places = self.current[:1] if self.settling or not self.judged else self.judged
            taken = {place: self.settings[place].seconds(seen) for place in places}
            ratio = taken[self.current[0]][self.current[1]] / max(even, 1e-30)
            self.recent = [*self.recent, ratio][-ROUND_STEPS:]
            if self.judged:
                self.even.append(even)
                for place, own in taken.items():
                    self.judged[place].append(own)
                if self.settling and len(self.even) == ROUND_STEPS:
                    self.settling, self.even, self.judged = False, [], {place: [] for place in self.judged}
        super().observe(loads, apart)
        for predictor in self.predictors.values():
            predictor.observe(loads, apart)
        self.spent += time.perf_counter() - began

    def prepare(self, iteration: int) -> None:
        """Plan all settings that are judged, and go on with the one in force; decide first, where a round has ended.

        It has where chance alone would not turn whether the best saves a margin, where it lasts long, or where the
        setting in force is judged alone.
        """
        began = time.perf_counter()
        if self.judged:
            self._drop_losers()
            has_ended, judged = len(self.judged) == 1, len(self.even)
            if not has_ended and judged >= ROUND_STEPS:
                taken = self._taken()
                gain = taken[self.current] - min(taken.values(), key=np.mean)
                is_clear = abs(gain.mean() - MARGIN * taken[self.current].mean()) > 2 * _error(gain)
                has_ended = is_clear or judged >= LONGEST * ROUND_STEPS
            if has_ended:
                self._decide(iteration)
        else:
            self.wait -= 1
            worse = np.mean(self.recent) > self.decided_at * (1 + 5 * MARGIN)
            if self.wait <= 0 or (worse and len(self.recent) == ROUND_STEPS):
                self._begin_round()
        for place in self.judged or self.current[:1]:
            self.settings[place].make_plans(iteration)
        self.proposal = dataclasses.replace(self.proposal, placement=self.in_force.plans[self.current[1]])
        self.cost, self.planner = self.in_force.cost, self.in_force.planner
        self.last_planned, self.spent = iteration, self.spent + time.perf_counter() - began

    def ask(self, iteration: int) -> Asked:
        """Ask for nothing new: `prepare` has planned."""
        return self.asked()

    def _taken(self) -> dict[tuple[int, int], np.ndarray]:
        """Return {places of a setting and a split: the seconds that it took in each step of the round}."""
        return {
            (place, split): np.array(own)
            for place, rows in self.judged.items()
            for split, own in enumerate(zip(*rows, strict=True))
        }

    def _drop_losers(self) -> None:
        """Every eight steps stop judging what is dearer than the best, beyond chance and two margins.

        Where nothing could save a margin of the setting in force, that is all of the others, also while they settle.
        """
        if not self.even or len(self.even) % 8:
            return
        taken = self._taken()
        if taken[self.current].mean() <= (1 + MARGIN) * np.mean(self.even):
            self.judged = {self.current[0]: self.judged[self.current[0]]}
        elif not self.settling:
            best = min(taken.values(), key=np.mean)
            for place in set(self.judged) - {self.current[0]}:
                own = min((seconds for at, seconds in taken.items() if at[0] == place), key=np.mean)
                if (own - best).mean() > 2 * MARGIN * best.mean() + 2 * _error(own - best):
                    del self.judged[place]

    def _decide(self, iteration: int) -> None:
        """End a round: change to the best setting where that pays, and log what each one took, cheapest first."""
        taken, steps = self._taken(), ROUND_STEPS
        now, best = taken[self.current], min(taken, key=lambda at: taken[at].mean())
        gain, new = now - taken[best], self.settings[best[0]]
        home, there = new.placement.home, self.in_force.placement.home
        moves = float(home_seconds(home, there, new.placement.devices, self.base_cost.prices).sum())
        ahead = self.base_cost.microbatches * steps * gain.mean()  # until the next round, which comes at once if later
        changes = gain.mean() > MARGIN * now.mean() and ahead > moves
        if changes or len(taken) > 1:
            chosen, order = best if changes else self.current, sorted(taken, key=lambda at: taken[at].mean())
            lines = [
                f"planner 'auto', step {iteration + 1}: seconds of the MoE layers in a microbatch, mean of "
                f"{len(self.even)} steps ({self.spent:.3g} s of planning)"
            ]
            for at in dict.fromkeys([*order[:SHOWN], self.current, chosen]):
                note = (" in force" if at == self.current else "") + (" chosen" if at == chosen else "")
                name = self.settings[at[0]].names[at[1]]
                lines.append(f"  {name:36}{taken[at].mean():12.6f} +- {_error(taken[at]):.6f}{note}")
            _LOG.warning("\n".join(lines))
        if changes:
            self.current, self.waits = best, 1
        else:
            self.waits = min(2 * self.waits, MOST_WAITS)
        self.wait, self.spent = self.waits * steps, 0.0
        ratio = float(np.mean(taken[self.current] / np.maximum(self.even, 1e-30)))
        worst = 0.0 if changes else max(self.decided_at, float(np.mean(self.recent)))  # which a round has looked into
        self.decided_at, self.recent = max(ratio, worst), []
        self.judged, self.even = {}, []

    def state(self) -> dict:
        """Return what a checkpoint must hold: arrays and numbers by name."""
        kept = sorted({*self.judged, self.current[0]})
        plain = ("judged", "even", "settling", "wait", "waits", "recent", "decided_at", "current")
        return {
            **super().state(),
            "predictors": [predictor.state() for predictor in self.predictors.values()],
            "settings": {str(place): self.settings[place].state() for place in kept},
            "auto": {name: getattr(self, name) for name in plain},
        }

    def restore(self, state: dict) -> None:
        """Continue from what `state` returned, on the same devices and with the same planners."""
        super().restore(state)
        for predictor, own in zip(self.predictors.values(), state["predictors"], strict=True):
            predictor.restore(own)
        for place, own in state["settings"].items():
            self.settings[int(place)].restore(own)
        for name, value in state["auto"].items():
            setattr(self, name, value)
        self.current = tuple(self.current)
        self.judged = {int(place): rows for place, rows in self.judged.items()}
        self.cost, self.planner = self.in_force.cost, self.in_force.planner


def _error(values: np.ndarray) -> float:
    """Return the standard error of a mean, 0 of one value."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


SESSIONS = {"auto": AutoSession}  # {name of a planner: its session}, of those that are no plain `PlanSession`
