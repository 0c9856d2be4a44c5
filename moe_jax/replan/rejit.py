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
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from typing import Any, Protocol

import numpy as np

from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.mesh.global_arrays import to_devices
from moe_jax.mesh.roles import Roles
from moe_jax.placement import Placement, PlanShape, build_shape, fill_tables, fits, routing
from moe_jax.planner import BALANCERS, predicted_layer_seconds, worth_a_swap
from moe_jax.renames import plan_of_today
from moe_jax.replan import plan_state
from moe_jax.replan.replanner import Replanner, check_planner, plan_hash
from moe_jax.replan.reshard import reshard


class Session(Protocol):
    """What a run gives the engine; `training.session.Session` does."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def roles(self) -> Roles: ...

    @property
    def state_shardings(self) -> Any:
        """Shardings of a step's inputs, `tables` and `host_signals` among them."""

    def compile_train_step(self, shape: PlanShape | None = None) -> tuple[Any, float]:
        """Return (executable, seconds) of the training step for plans of this shape."""

    def evaluation_step(self, shape: PlanShape | None = None) -> Any:
        """Return the evaluation step."""


@dataclasses.dataclass
class Pending:
    """A shape that is being compiled: why, and the newest placement that it could run.

    Attributes:
      number: of all shapes requested, from 1; what processes send each other when it is ready.
      step: the first step that might have run with it.
    """

    number: int
    step: int
    shape: PlanShape
    placement: Placement


class RejitEngine:
    """Plan, compile and swap for one run; called by the loop around every step."""

    def __init__(self, session: Session, lag: int):
        config = session.config.planner
        self.session, self.config, self.lag = session, config, lag
        self.replanner = Replanner(session.config, session.roles)
        self.plans = self.replanner.plans
        # placement: what the next step runs with; bank: where the state's experts are now
        self.placement = self.bank = self.replanner.start
        self.shape = self.replanner.first_shape()
        self.pending: Pending | None = None
        self.asked = 0  # shapes requested so far
        self.agreed = 0  # the newest that every process had compiled, as far as metrics were read
        self.waiting: dict[int, np.ndarray] = {}  # loads by step: read, and not yet given to the planner
        self.plan_id = 0
        self.next_planner_seconds = 0.0
        self.records: dict[int, tuple[Placement, dict, PlanShape]] = {}
        self.executables: collections.OrderedDict[PlanShape, concurrent.futures.Future] = collections.OrderedDict()
        self.evaluations: dict[int, object] = {}
        self.thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="rejit")
        self.tables, self.hash = None, 0

    # Around a step.

    def start(self):
        """Compile what the first step runs with; return (executable, seconds)."""
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
        """Plan the first step from loads [L, S, E] seen elsewhere, oldest first; to be called before `start`."""
        for loads in past:
            self.plans.observe(self.replanner.step_loads(loads))
        placement = self.plans.propose(0).placement
        self.shape = self.replanner.grow(self.shape, placement)
        self._adopt(placement)

    def before_step(self, step: int, state: dict, flag: int):
        """Return (executable, tables, host_signals, state) for step `step` (from 0).

        Args:
          state: donated if experts change their homes.
          flag: 1 where this process asks to stop, else 0.
        """
        record = {"rejit_stall_seconds": 0.0, "planner_seconds": self.next_planner_seconds}
        if self.pending is not None and self._swap_is_due(step):
            self._swap(record)
        began = time.perf_counter()
        if (self.placement.home != self.bank.home).any():
            state = reshard(state, self.bank, self.placement, self.shape.bank_rows)
            self.bank, record["reshard_seconds"] = self.placement, time.perf_counter() - began
        if self.tables is None:
            tables = fill_tables(self.shape, self.placement)
            self.tables = to_devices(tables, self.session.state_shardings.tables)
            self.hash = plan_hash(self.shape, self.placement)
        record["plan_id"] = self.plan_id
        self.records[step] = (self.placement, record, self.shape)
        executable = self.executables[self.shape].result()[0]
        return executable, self.tables, self._host_signals(flag), state

    def after_dispatch(self, step: int):
        """Plan for step `step` + 1 while the devices work on `step`."""
        began = time.perf_counter()
        for ready in sorted(at for at in self.waiting if at <= step - self.lag):
            self.plans.observe(self.waiting.pop(ready))
        if self.plans.predictor.seen:
            self._take(step + 1, self.plans.propose(step + 1).placement)
        self.next_planner_seconds = time.perf_counter() - began

    def observe(self, step: int, metrics: dict):
        """Take in the metrics of a finished step (from 0), as NumPy."""
        if int(metrics["plan_hash_least"]) != int(metrics["plan_hash_most"]):
            raise RuntimeError(
                f"step {step + 1}: the processes ran different plans; each must see the same config, cluster file and "
                "loads"
            )
        if not metrics.get("skipped", False):  # where a step is not finite, its loads have no meaning
            self.waiting[step] = self.replanner.step_loads(metrics["loads"])
        self.agreed = max(self.agreed, int(metrics["ready"]))

    def record(self, step: int, loads: np.ndarray) -> dict:
        """Return the plan's part of a finished step's record in metrics.jsonl (from 0)."""
        planned, record, shape = self.records.pop(step)
        loads = self.replanner.step_loads(loads)
        placement = self.replanner.refined(shape, planned, loads)
        record["replicas"] = len(placement.replicas)
        computed = routing.device_loads(placement, loads)
        record["device_load_max_over_mean"] = computed.max(axis=1) / np.maximum(computed.mean(axis=1), 1e-9)
        seconds = self._predicted(placement, loads, shape, planned)
        if seconds is not None:
            record["predicted_layer_seconds"] = seconds
        for name in ("shadow_cut", "late_cut"):
            if name in self.plans.planner.counters:
                record[name] = self.plans.planner.counters[name]
        return record

    def evaluation(self):
        """Return (evaluation step, tables) for the experts' current homes, without replicas."""
        bare = self.bank.replace(replicas=None, shares=None, rule="nearest")
        shape = build_shape(bare)
        if shape.home_slots not in self.evaluations:
            self.evaluations[shape.home_slots] = self.session.evaluation_step(shape)
        tables = to_devices(fill_tables(shape, bare), self.session.state_shardings.tables)
        return self.evaluations[shape.home_slots], tables

    def close(self):
        """End the thread; a running compilation cannot be stopped, so this waits for it."""
        self.thread.shutdown(wait=True, cancel_futures=True)

    # Checkpoints.

    def state(self) -> dict:
        """Return what a checkpoint holds of the plan, as JSON data."""
        pending = self.pending
        return {
            "session": plan_state.to_lists(self.plans.state()),
            "placement": plan_state.placement_data(self.placement),
            "bank": plan_state.placement_data(self.bank),
            "shape": plan_state.shape_data(self.shape),
            "pending": None
            if pending is None
            else {
                "number": pending.number,
                "step": pending.step,
                "shape": plan_state.shape_data(pending.shape),
                "placement": plan_state.placement_data(pending.placement),
            },
            "options": self._options(),
            "asked": self.asked,
            "plan_id": self.plan_id,
            "waiting": {str(step): loads.tolist() for step, loads in sorted(self.waiting.items())},
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
        state = plan_of_today(state)
        saved = state["shape"]
        sizes = ("layers", "experts", "devices", "devices_per_node", "bank_rows")
        changed = [
            f"{name} was {saved[name]} and is {getattr(self.shape, name)}"
            for name in sizes
            if saved[name] != getattr(self.shape, name)
        ]
        if changed:
            return (
                f"plan: the checkpoint's is of another mesh or planner ({', '.join(changed)}); experts start at even "
                "homes, and the planner sees new loads only"
            )
        self.plans.restore(state["session"])
        self.placement = plan_state.read_placement(state["placement"], self.placement)
        self.bank = plan_state.read_placement(state["bank"], self.bank)
        late = self.shape.late  # this planner's own; the saved shape may be of another one
        self.shape = self._of_today(saved, self.placement, late)
        if not fits(self.shape, self.placement):  # another planner's replicas, and this one decides on the device
            self.placement = self.bank.replace(replicas=None, shares=None, rule="home")
        if (pending := state["pending"]) is not None:
            placement = plan_state.read_placement(pending["placement"], self.placement)
            self.pending = Pending(
                number=pending["number"],
                step=pending["step"],
                shape=self._of_today(pending["shape"], placement, late),
                placement=placement,
            )
        self.asked, self.plan_id = state["asked"], state["plan_id"]
        self.waiting = {int(step): np.asarray(loads, np.int64) for step, loads in state["waiting"].items()}
        return self._without_other_options(state.get("options"))

    # Internal.

    def _options(self) -> dict[str, str]:
        """Return what decides which replicas there are and how they travel, as text by field of `PlannerConfig`."""
        config = self.plans.config
        knobs = BALANCERS[config.name].knobs
        names = ("when", "replica_slots", "overlap_degree", "bounded", "transfer")
        names += tuple(field.name for field in dataclasses.fields(knobs)) if knobs else ()
        return {name: repr(getattr(config, name)) for name in ("name", *names)}

    def _without_other_options(self, saved: dict[str, str] | None) -> str | None:
        """Leave out replicas and sizes of transfers that were planned under other options; say which these were.

        Older states do not say theirs (`saved` None): then another form of the transfer is all that shows.
        """
        now, ahead = self._options(), self.shape.ahead
        if saved is None:
            form = "by_node" if ahead is not None and ahead.by_node else "flat"
            saved = now if ahead is None or self.config.transfer == "auto" else {**now, "transfer": repr(form)}
        changed = [name for name in now if name in saved and saved[name] != now[name]]
        if not changed or (ahead is None and self.pending is None):
            return None
        self.placement = self.bank.replace(replicas=None, shares=None, rule="home")
        self.shape, self.pending = self.replanner.with_rule(dataclasses.replace(self.shape, ahead=None)), None
        self.plans.forget_replicas()
        listed = ", ".join(f"PlannerConfig.{name} was {saved[name]} and is {now[name]}" for name in changed)
        return f"plan: {listed}; homes and seen loads stay, and replicas come anew with the next plan"

    def _of_today(self, saved: dict, placement: Placement, late: TransferShape | None) -> PlanShape:
        """Return a saved shape with what this run decides after the gate, in slots of these sizes."""
        return self.replanner.with_rule(dataclasses.replace(plan_state.read_shape(saved, placement), late=late))

    def _take(self, step: int, placement: Placement):
        """Let step `step` run with a new placement if it fits; else request a shape that it fits."""
        if self.pending is not None and fits(self.pending.shape, placement):
            self.pending.placement = placement
        fitting = fits(self.shape, placement)
        if fitting:
            self._adopt(placement)
        rows = self.replanner.predicted_rows(self.shape, placement)
        crowded = rows is not None and not rows.within(self.replanner.rows_of(self.shape))
        if self.pending is None and (crowded if fitting else self._pays(placement)):
            shape = self.replanner.grow(self.shape, placement)
            if shape == self.shape:  # no bucket can be larger
                return
            self.asked += 1
            self.pending = Pending(number=self.asked, step=step, shape=shape, placement=placement)
            self._compile(shape)

    def _adopt(self, placement: Placement):
        if placement != self.placement:
            self.placement, self.tables = placement, None
            self.plan_id += 1

    def _pays(self, placement: Placement) -> bool:
        """Hysteresis: say whether the predicted gain over the horizon exceeds what a new shape costs."""
        loads = self.plans.predictor.predict()
        now = self._predicted(self.placement, loads, self.shape)
        then = self._predicted(placement, loads, self.replanner.grow(self.shape, placement))
        if now is None or then is None or (placement.home != self.placement.home).any():
            return True  # nothing to compare, or a move of homes, whose gain the planner has compared with its cost
        horizon = self.config.horizon * self.plans.cost.microbatches
        return worth_a_swap(now.sum(), then.sum(), horizon, self.config.swap_seconds)

    def _predicted(
        self, placement: Placement, loads: np.ndarray, shape: PlanShape, planned: Placement | None = None
    ) -> np.ndarray | None:
        """Return predicted seconds [L] of each layer in one microbatch, None where the cluster file lacks a figure.

        Args:
          placement: what the step makes of `planned`; loads: of a step; shape: what it is compiled for.
        """
        loads = loads / self.replanner.exchanges_per_step
        try:
            return predicted_layer_seconds(placement, loads, self.plans.cost, shape, planned)
        except UserError:
            return None

    def _swap_is_due(self, step: int) -> bool:
        assert self.pending is not None
        if self.config.swap_after is not None:
            return step >= self.pending.step + self.config.swap_after - 1
        return self.agreed >= self.pending.number

    def _swap(self, record: dict):
        """Run with the pending shape from now on; wait for it only if its time has come before it is ready."""
        assert self.pending is not None
        began = time.perf_counter()
        _, record["compile_seconds"] = self.executables[self.pending.shape].result()
        record["rejit_stall_seconds"] = time.perf_counter() - began
        self.shape, placement, self.pending = self.pending.shape, self.pending.placement, None
        self.executables.move_to_end(self.shape)
        self.tables = None
        self._adopt(placement)
        while len(self.executables) > self.config.executables:
            self.executables.popitem(last=False)

    def _compile(self, shape: PlanShape, now: bool = False) -> concurrent.futures.Future:
        """Have a shape compiled, unless it is in the cache: in the thread, or `now` by the caller's thread."""
        if shape not in self.executables:
            if now:
                future: concurrent.futures.Future = concurrent.futures.Future()
                future.set_result(self.session.compile_train_step(shape))
            else:
                future = self.thread.submit(self.session.compile_train_step, shape)
            self.executables[shape] = future
        return self.executables[shape]

    def _host_signals(self, flag: int):
        """Return the step's input int32 [devices, 3]: stop, newest shape ready here, hash of the plan."""
        ready = 0
        if self.pending is not None and (future := self.executables[self.pending.shape]).done():
            future.result()  # a failed compilation ends the run now, not at a swap that others may never reach
            ready = self.pending.number
        row = np.array([flag, ready, self.hash], np.int32)
        return to_devices(np.tile(row, (self.session.roles.num_devices, 1)), self.session.state_shardings.host_signals)


def build_engine(session: Session, lag: int) -> RejitEngine | None:
    """Return the engine of a run, None where `PlannerConfig.name` is 'none'.

    Raises:
      UserError: a planner that this mesh, schedule or cluster file cannot serve.
    """
    if session.config.planner.name == "none":
        return None
    check_planner(session.config, session.roles)
    return RejitEngine(session, lag)
