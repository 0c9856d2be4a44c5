"""The re-jit engine: which plan and which executable the next step runs with, chosen without delaying the step.

Inputs: the loads of finished steps. Outputs: for every step the placement's tables, the executable of its shape, and
the state with its experts at the placement's homes. A plan that fits the running shape is a change of tables. One
that does not gets a wider shape, compiled in a background thread while training goes on with the old plan.

All processes derive the same plans from the same loads, and must swap executables at the same step: each passes the
number of its newest compiled shape into the step, whose metrics return the least over all processes (`ready`), and
the host reads that when it reads the step's metrics. A hash of the running plan is passed with it; where processes
disagree the run ends with an error instead of hanging.

What step j runs with depends on the loads of steps up to j - 1 - lag, and on time only through the swap (with
`PlannerConfig.swap_after` not at all), so a resumed run continues bit for bit.

Each segment with experts has a planner of its own; placements, shapes and loads are {segment: ...}, and an executable
is for the shapes of all.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from moe_jax.errors import UserError
from moe_jax.parallel.global_arrays import to_devices
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning import routing
from moe_jax.planning.balancer import BALANCERS
from moe_jax.planning.cost import predicted_layer_seconds
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape, build_shape, fill_tables, fits
from moe_jax.training import plan_state
from moe_jax.training.bank_order import reshard
from moe_jax.training.plan_cost import segment_runs
from moe_jax.training.plan_state import each, homes_differ, own_loads
from moe_jax.training.program import Session
from moe_jax.training.replanner import Replanner, check_planner, plan_hash

Placements = dict[str, Placement]
Shapes = dict[str, PlanShape]


@dataclasses.dataclass
class Pending:
    """A shape that is being compiled: why, and the newest placement that it could run.

    Attributes:
      number: of all shapes requested, from 1; what processes send each other when it is ready.
      step: the first step that might have run with it.
    """

    number: int
    step: int
    shape: Shapes
    placement: Placements


class RejitEngine:
    """Plan, compile and swap for one run; called by the loop around every step."""

    def __init__(self, session: Session, lag: int):
        config = session.config.planner
        self.session, self.config, self.lag = session, config, lag
        runs = segment_runs(session.config, session.roles)
        self.replanner = {name: Replanner(session.config, session.roles, name) for name in runs}
        self.plans = each(lambda replanner: replanner.plans, self.replanner)
        self.remark = "; ".join(filter(None, (own.planner.remark(own.cost) for own in self.plans.values())))
        # placement: what the next step runs with; bank: where the state's experts are now
        self.placement = self.bank = each(lambda replanner: replanner.start, self.replanner)
        self.shape = each(Replanner.first_shape, self.replanner)
        self.pending: Pending | None = None
        self.asked = 0  # shapes requested so far
        self.agreed = 0  # the newest that every process had compiled, as far as metrics were read
        self.waiting: dict[int, Any] = {}  # loads by step: read, and not yet given to the planner
        self.plan_id = 0
        self.next_planner_seconds = 0.0
        self.records: dict[int, tuple[Placements, dict, Shapes]] = {}
        self.executables: collections.OrderedDict[tuple[PlanShape, ...], concurrent.futures.Future] = (
            collections.OrderedDict()
        )
        self.evaluations: dict[tuple[int, ...], object] = {}
        self.share = functools.cache(lambda move: self.session.shared(move))
        self.thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="rejit")
        self.tables, self.hash = None, 0

    # Around a step.

    def start(self):
        """Compile what the first step runs with; return (programs, seconds)."""
        if self.pending is not None:
            self._compile(self.pending.shape)
        return self._compile(self.shape, now=True).result()

    def change_step(self, session: Session):
        """From the next step on run another training step under the same plans; `start` compiles it.

        Args:
          session: of the other step, with the same state, batches and plans.
        """
        self.session = session
        self.executables.clear()

    def warm_start(self, past: list[np.ndarray]):
        """Plan the first step from loads [L, S, E] seen elsewhere, oldest first; to be called before `start`.

        A predictor that has seen one step doubles the predicted buckets, and buckets never shrink: so benchmarks start.
        """
        for loads in past:
            self._show(own_loads(loads, self.bank))
        placement = self._proposed(0)
        self.shape = each(Replanner.grow, self.replanner, self.shape, placement)
        self._adopt(placement)

    def before_step(self, step: int, state: dict, flag: int, settle: Callable[[], dict] | None = None):
        """Return (programs, tables, host_signals, state) for step `step` (from 0).

        Args:
          state: donated if experts change their homes.
          flag: 1 where this process asks to stop, else 0.
          settle: () -> state once all steps before this one are done for good; called before experts change their
            homes, because a step that has to run again needs them where they were. None: `state` is that.
        """
        record = {"rejit_stall_seconds": 0.0, "planner_seconds": self.next_planner_seconds}
        if self.pending is not None:
            due = self.agreed >= self.pending.number
            if self.config.swap_after is not None:
                due = step >= self.pending.step + self.config.swap_after - 1
            if due:
                self._swap(record)
        began = time.perf_counter()
        if homes_differ(self.placement, self.bank):
            state = self._reshard(state if settle is None else settle())
            self.bank, record["reshard_seconds"] = self.placement, time.perf_counter() - began
        if self.tables is None:
            self.tables = self._on_devices(self.shape, self.placement)
            self.hash = plan_hash(self.shape, self.placement)
        record["plan_id"] = self.plan_id
        if self.remark:
            record["plan_remark"] = self.remark
        self.records[step] = (self.placement, record, self.shape)
        ready = 0
        if self.pending is not None and (future := self.executables[_key(self.pending.shape)]).done():
            future.result()  # a failed compilation ends the run now, not at a swap that others may never reach
            ready = self.pending.number
        # each process' row of the step's input int32 [devices, 3]: stop, newest shape ready here, hash of the plan
        rows = np.tile(np.array([flag, ready, self.hash], np.int32), (self.session.roles.num_devices, 1))
        host_signals = to_devices(rows, self.session.state_shardings.host_signals)
        return self.executables[_key(self.shape)].result()[0], self.tables, host_signals, state

    def after_dispatch(self, step: int):
        """Plan for step `step` + 1 while the devices work on `step`."""
        began = time.perf_counter()
        for ready in sorted(at for at in self.waiting if at <= step - self.lag):
            self._show(self.waiting.pop(ready))
        if next(iter(self.plans.values())).predictor.seen:
            self._take(step + 1, self._proposed(step + 1))
        self.next_planner_seconds = time.perf_counter() - began

    def observe(self, step: int, metrics: dict):
        """Take in the metrics of a finished step (from 0), as NumPy."""
        if int(metrics["plan_hash_least"]) != int(metrics["plan_hash_most"]):
            raise RuntimeError(
                f"step {step + 1}: the processes ran different plans; each must see the same config, cluster file and "
                "loads"
            )
        if not metrics.get("skipped", False):  # where a step is not finite, its loads have no meaning
            self.waiting[step] = own_loads(metrics["loads"], self.bank)
        self.agreed = max(self.agreed, int(metrics["ready"]))

    def record(self, step: int, loads: np.ndarray) -> dict:
        """Return the plan's part of a finished step's record in metrics.jsonl (from 0)."""
        planned, record, shape = self.records.pop(step)
        loads = own_loads(loads, planned)
        placement = each(Replanner.refined, self.replanner, shape, planned, loads)
        record["replicas"] = sum(len(own.replicas) for own in placement.values())
        computed = [pairs.sum(axis=1) for pairs in each(routing.pair_loads, placement, loads).values()]
        balance = [own.max(axis=1) / np.maximum(own.mean(axis=1), 1e-9) for own in computed]
        record["device_load_max_over_mean"] = np.concatenate(balance)
        seconds = list(each(self._predicted, self.replanner, placement, loads, shape, planned).values())
        if all(own is not None for own in seconds):
            record["predicted_layer_seconds"] = np.concatenate(seconds)
        for name in ("shadow_cut", "late_cut"):
            counted = [own.planner.counters[name] for own in self.plans.values() if name in own.planner.counters]
            if counted:
                record[name] = sum(counted)
        return record

    def evaluation(self):
        """Return (evaluation step, tables) for the experts' current homes, without replicas."""
        bare = each(lambda bank: bank.replace(replicas=None, shares=None, rule="nearest"), self.bank)
        shape = each(build_shape, bare)
        slots = tuple(own.home_slots for own in shape.values())
        if slots not in self.evaluations:
            self.evaluations[slots] = self.session.evaluation_step(shape)
        return self.evaluations[slots], self._on_devices(shape, bare)

    def close(self):
        """End the thread; a running compilation cannot be stopped, so this waits for it."""
        self.thread.shutdown(wait=True, cancel_futures=True)

    # Checkpoints.

    @property
    def home(self):
        """{segment: int32 [L, E]}, home device of every expert of the state."""
        return each(lambda bank: bank.home, self.bank)

    def state(self) -> dict:
        """Return what a checkpoint holds of the plan, as JSON data."""
        pending = self.pending
        return {
            "session": each(lambda plans: plan_state.to_lists(plans.state()), self.plans),
            "placement": each(plan_state.placement_data, self.placement),
            "bank": each(plan_state.placement_data, self.bank),
            "shape": each(plan_state.shape_data, self.shape),
            "pending": None
            if pending is None
            else {
                "number": pending.number,
                "step": pending.step,
                "shape": each(plan_state.shape_data, pending.shape),
                "placement": each(plan_state.placement_data, pending.placement),
            },
            "options": self._options(),
            "asked": self.asked,
            "plan_id": self.plan_id,
            "waiting": {str(step): each(np.ndarray.tolist, loads) for step, loads in sorted(self.waiting.items())},
        }

    def restore(self, state: dict | None) -> str | None:
        """Continue from what `state` returned, if it was on as many devices; else from even homes.

        Under other options of the planner homes and seen loads stay, and replicas start anew: a step has the slots and
        the form of the planner that runs, not of an earlier one.

        Returns:
          a line that says what of the state is left out, and why; None where all of it is used.
        """
        if state is None:
            return None
        saved = state["shape"]
        sizes = ("layers", "experts", "devices", "devices_per_node", "bank_rows")
        changed = [
            f"{name} was {then[name]} and is {getattr(now, name)}"
            for segment, now in self.shape.items()
            for name in sizes
            if (then := saved[segment])[name] != getattr(now, name)
        ]
        if changed:
            return (
                f"plan: the checkpoint's is of another mesh or planner ({', '.join(changed)}); experts start at even "
                "homes, and the planner sees new loads only"
            )
        each(lambda plans, own: plans.restore(own), self.plans, state["session"])
        self.placement = each(plan_state.read_placement, self.placement, state["placement"])
        self.bank = each(plan_state.read_placement, self.bank, state["bank"])
        late = each(lambda shape: shape.late, self.shape)  # this planner's own; the saved shape may be of another one
        self.shape = each(self._read_shape, self.replanner, saved, late)
        if not self._fits(self.shape, self.placement):  # another planner's replicas, this one decides on the device
            self.placement = each(lambda bank: bank.replace(replicas=None, shares=None, rule="home"), self.bank)
        if (pending := state["pending"]) is not None:
            placement = each(plan_state.read_placement, self.placement, pending["placement"])
            self.pending = Pending(
                number=pending["number"],
                step=pending["step"],
                shape=each(self._read_shape, self.replanner, pending["shape"], late),
                placement=placement,
            )
        self.asked, self.plan_id = state["asked"], state["plan_id"]
        waiting = state["waiting"].items()
        self.waiting = {int(step): each(lambda own: np.asarray(own, np.int64), loads) for step, loads in waiting}
        return self._without_other_options(state["options"])

    # Internal.

    def _options(self) -> dict[str, str]:
        """Return what decides which replicas there are and how they travel, as text by field of `PlannerConfig`."""
        config = next(iter(self.plans.values())).config
        names = ("when", "replica_slots", "overlap_degree", "bounded", "transfer")
        names += tuple(BALANCERS[config.name].knobs)
        return {name: repr(getattr(config, name)) for name in ("name", *names)}

    def _without_other_options(self, saved: dict[str, str]) -> str | None:
        """Leave out replicas and sizes of transfers that were planned under other options; say which these were."""
        now = self._options()
        changed = [name for name in now if name in saved and saved[name] != now[name]]
        replicated = any(own.ahead is not None for own in self.shape.values())
        if not changed or (not replicated and self.pending is None):
            return None
        self.placement = each(lambda bank: bank.replace(replicas=None, shares=None, rule="home"), self.bank)
        bare = each(lambda own: dataclasses.replace(own, ahead=None), self.shape)
        self.shape, self.pending = each(Replanner.with_rule, self.replanner, bare), None
        for plans in self.plans.values():  # go on with the homes alone, and plan again as soon as asked
            plans.placement, plans.last_planned = plans.placement.replace(replicas=None, shares=None, rule="home"), None
        words = ", ".join(f"PlannerConfig.{name} was {saved[name]} and is {now[name]}" for name in changed)
        return f"plan: {words}; homes and seen loads stay, and replicas come anew with the next plan"

    @staticmethod
    def _read_shape(replanner: Replanner, saved: dict, late: TransferShape | None) -> PlanShape:
        """Return a saved shape with what this run decides after the gate, in slots of these sizes."""
        return replanner.with_rule(dataclasses.replace(plan_state.read_shape(saved), late=late))

    def _show(self, loads):
        """Let the planners see the loads of a step."""
        each(lambda plans, own: plans.predictor.observe(own), self.plans, loads)

    def _proposed(self, step: int) -> Placements:
        return each(lambda plans: plans.propose(step), self.plans)

    def _reshard(self, state: dict) -> dict:
        """Return the state with each segment's experts at the placement's homes."""
        for name, old in self.bank.items():
            new = self.placement[name]
            if (old.home != new.home).any():
                state = reshard(state, old, new, self.shape[name].bank_rows, name, self.share)
        return state

    def _on_devices(self, shape: Shapes, placement: Placements):
        """Return the tables of a placement as the step takes them."""
        return each(to_devices, each(fill_tables, shape, placement), self.session.state_shardings.tables)

    def _fits(self, shape: Shapes, placement: Placements) -> bool:
        return all(each(fits, shape, placement).values())

    def _take(self, step: int, placement: Placements):
        """Let step `step` run with a new placement if it fits; else request a shape that it fits."""
        if self.pending is not None and self._fits(self.pending.shape, placement):
            self.pending.placement = placement
        fitting = self._fits(self.shape, placement)
        if fitting:
            self._adopt(placement)
        crowded = any(each(Replanner.is_crowded, self.replanner, self.shape, placement).values())
        if self.pending is None and (crowded if fitting else self._pays(placement)):
            shape = each(Replanner.grow, self.replanner, self.shape, placement)
            if shape == self.shape:  # no bucket can be larger
                return
            self.asked += 1
            self.pending = Pending(number=self.asked, step=step, shape=shape, placement=placement)
            self._compile(shape)

    def _adopt(self, placement: Placements):
        if placement != self.placement:
            self.placement, self.tables = placement, None
            self.plan_id += 1

    def _pays(self, placement: Placements) -> bool:
        """Hysteresis: say whether the predicted gain over the horizon exceeds what a new shape costs."""
        loads = each(lambda plans: plans.predictor.predict(), self.plans)
        larger = each(Replanner.grow, self.replanner, self.shape, placement)
        now = each(self._predicted, self.replanner, self.placement, loads, self.shape).values()
        then = each(self._predicted, self.replanner, placement, loads, larger).values()
        if any(seconds is None for seconds in (*now, *then)) or homes_differ(placement, self.placement):
            return True  # nothing to compare, or a move of homes, whose gain the planner has compared with its cost
        horizon = self.config.horizon * next(iter(self.plans.values())).cost.microbatches
        now, then = (sum(float(seconds.sum()) for seconds in layers) for layers in (now, then))
        return (now - then) * horizon > self.config.swap_seconds

    @staticmethod
    def _predicted(
        replanner: Replanner,
        placement: Placement,
        loads: np.ndarray,
        shape: PlanShape,
        planned: Placement | None = None,
    ) -> np.ndarray | None:
        """Return predicted seconds [L] of each layer in one microbatch, None where the cluster file lacks a figure.

        Args:
          placement: what the step makes of `planned`; loads: of a step; shape: what it is compiled for.
        """
        loads = loads / replanner.exchanges_per_step
        try:
            return predicted_layer_seconds(placement, loads, replanner.plans.cost, shape, planned)
        except UserError:
            return None

    def _swap(self, record: dict):
        """Run with the pending shape from now on; wait for it only if its time has come before it is ready."""
        assert self.pending is not None
        began = time.perf_counter()
        _, record["compile_seconds"] = self.executables[_key(self.pending.shape)].result()
        record["rejit_stall_seconds"] = time.perf_counter() - began
        self.shape, placement, self.pending = self.pending.shape, self.pending.placement, None
        self.executables.move_to_end(_key(self.shape))
        self.tables = None
        self._adopt(placement)
        while len(self.executables) > self.config.executables:
            self.executables.popitem(last=False)

    def _compile(self, shape: Shapes, now: bool = False) -> concurrent.futures.Future:
        """Have a shape compiled, unless it is in the cache: in the thread, or `now` by the caller's thread."""
        key = _key(shape)
        if key not in self.executables:
            if now:
                future: concurrent.futures.Future = concurrent.futures.Future()
                future.set_result(self.session.compile_programs(shape))
            else:
                future = self.thread.submit(self.session.compile_programs, shape)
            self.executables[key] = future
        return self.executables[key]


def _key(shape: Shapes) -> tuple[PlanShape, ...]:
    return tuple(shape.values())


def build_engine(session: Session, lag: int) -> RejitEngine | None:
    """Return the engine of a run, None where `PlannerConfig.name` is 'none'.

    Raises:
      UserError: a planner that this mesh, schedule or cluster file cannot serve.
    """
    if session.config.planner.name == "none":
        return None
    check_planner(session.config, session.roles)
    return RejitEngine(session, lag)
