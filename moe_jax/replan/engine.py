"""The re-jit engine: which plan and which executable the next step runs with, chosen without delaying the step.

Inputs: the loads of finished steps. Outputs: for every step the placement's tables, the executable of its shape, and
the state with its experts at the placement's homes.

    planning     after each step a `Plan` (planning/plan.py); one that fits the step in force changes its tables
    compiling    another step is compiled in a thread, while training goes on with the newest plan that fits (`Pending`)
    agreed       every process has it, by what came back with the metrics
    swapped      it is in force, with the newest plan that it could run
"""

# All processes derive the same plans from the same loads, and must swap executables at the same step: each passes the
# number of its newest compiled shape into the step, whose metrics return the least over all processes (`ready`), and
# the host reads that when it reads the step's metrics. A hash of the running plan is passed with it; where processes
# disagree the run ends with an error instead of hanging.
#
# What step j runs with depends on the loads of steps up to j - 1 - lag, and on time only through the swap (with
# `PlannerConfig.swap_after` not at all), so a resumed run continues bit for bit.

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import logging
import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from moe_jax.config.run_config import RENAMED
from moe_jax.parallel.mesh import to_devices
from moe_jax.parallel.static_sizes import BucketRows, TransferShape
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.plan import Placements, look_back, make_plan, with_rule
from moe_jax.planning.plan_shape import PlanShape, Shapes, Tables, build_shape, fill_tables
from moe_jax.replan.segments import build_sessions
from moe_jax.replan.session import PlanSession
from moe_jax.storage.bank_order import reshard

_LOG = logging.getLogger(__name__)
_ARRAYS = ("home", "replicas", "shares")
_SIZES = ("layers", "experts", "devices", "devices_per_node", "bank_rows")  # that a mesh and a config fix
_OPTIONS = ("name", "when", "replica_slots", "bounded", "transfer")  # besides a planner's own options
EXECUTABLES = 4  # compiled steps that are kept, the running one included: loads drift back to shapes of a while ago


@dataclasses.dataclass
class Pending:
    """Shapes that are being compiled, and the newest placements that they could run."""

    number: int  # of all shapes requested, from 1
    step: int  # the first that might have run with them
    shape: Shapes
    placement: Placements


class RejitEngine:
    """Plan, compile and swap for one run; called by the `Stepper` around every step."""

    def __init__(self, session: Any, plans: dict[str, PlanSession]):
        """Take a run, as `Session` of training/program.py, and the session of each segment's planner."""
        self.session, self.config, self.lag, self.plans = session, session.config.planner, session.lag, plans
        self.remark = "; ".join(filter(None, (plans.planner.remark(plans.cost) for plans in self.plans.values())))
        # placement: what the next step runs with; stored: where the state's experts are now
        self.placement = self.stored = {name: own.start for name, own in plans.items()}
        self.first = self.shape = {name: own.first_shape for name, own in plans.items()}
        self.pending: Pending | None = None
        self.asked = 0  # shapes requested so far
        self.agreed = 0  # the newest that every process had compiled, as far as metrics were read
        self.waiting: dict[int, dict[str, np.ndarray]] = {}  # loads by step: read, and not yet given to the planner
        self.plan_id = 0
        self.next_planner_seconds = 0.0
        self.records: dict[int, tuple[Placements, dict, Shapes]] = {}
        self.executables: collections.OrderedDict[tuple, concurrent.futures.Future] = collections.OrderedDict()
        self.evaluations: dict[tuple[int, ...], object] = {}
        self.compared = functools.cache(lambda move: self.session.compared(move))
        self.thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="rejit")
        self.tables = self.filled = None  # of the placement: on the devices; on the host
        self.hash = 0
        self.frozen = False  # plan no more: what times steps of one plan sets it

    # Around a step.

    def start(self):
        """Compile what the next step runs with, and return it."""
        first = self._compile(self.shape)
        if self.pending is not None:
            self._compile(self.pending.shape)
        return first.result()

    def warm_start(self, past: list[np.ndarray]):
        """Plan the first step, before `start`, from loads [L, S, E] seen elsewhere, oldest first; for benchmarks.

        A predictor that has seen one step doubles the predicted buckets, and buckets never shrink.
        """
        past = [self.session.model.loads_by_segment(loads) for loads in past]
        planned = {name: own.planned([loads[name] for loads in past], 0) for name, own in self.plans.items()}
        self.shape = {name: shape for name, (shape, _) in planned.items()}
        self._adopt({name: placement for name, (_, placement) in planned.items()})

    def leave_teacher(self, session: Any):
        """Continue with a session without the teacher; compiled steps are forgotten, state and plans stay."""
        self.session = session
        self.executables.clear()

    def before_step(self, step: int, state: dict, flag: int, settle: Callable[[], dict] | None = None):
        """Return (programs, tables, host_signals, state) for step `step` (from 0).

        Args:
          state: donated if experts change their homes.
          flag: 1 where this process asks to stop, else 0.
          settle: () -> state once all steps before this one are done for good; called before experts change their
            homes, because a step that has to run again needs them where they were. None: `state` is that.
        """
        record = {"rejit_stall_seconds": 0.0, "planner_seconds": self.next_planner_seconds}
        if (pending := self.pending) is not None:  # which may still be compiling here
            due = self.agreed >= pending.number
            if self.config.swap_after is not None:
                due = step >= pending.step + self.config.swap_after - 1
            record |= self._swap(pending) if due else {}
        if any(own.moves(self.stored[name]) for name, own in self.placement.items()):
            began = time.perf_counter()
            state = self.move_homes(state if settle is None else settle(), self.placement)
            record["reshard_seconds"] = time.perf_counter() - began
        record["plan_id"] = self.plan_id
        if self.remark:
            record["plan_remark"] = self.remark
        self.records[step] = (self.placement, record, self.shape)
        return self._compile(self.shape).result(), *self._inputs(flag), state

    def after_dispatch(self, step: int):
        """Plan for step `step` + 1 while the devices work on `step`.

        It runs with the plan if that fits; the step that the plan asks for is compiled, one at a time.
        """
        if self.frozen:
            return
        began = time.perf_counter()
        for ready in sorted(at for at in self.waiting if at <= step - self.lag):
            for name, own in self.waiting.pop(ready).items():
                self.plans[name].observe(own)
        if all(plans.predictor.seen for plans in self.plans.values()):
            for plans in self.plans.values():
                plans.prepare(step + 1)
            asked = {name: plans.ask(step + 1) for name, plans in self.plans.items()}
            pending = None if self.pending is None else self.pending.shape
            plan = make_plan(asked, self.placement, self.shape, pending)
            for name, plans in self.plans.items():
                plans.accept(asked[name], plan.proposals[name], step + 1)
            if plan.fits_pending:
                self.pending.placement = plan.placement
            if plan.fits:
                self._adopt(plan.placement, plan.tables)
            if plan.shape != self.shape and self.pending is None:
                _LOG.info("step %d: another step is compiled: %s", step + 2, plan.why)
                self.asked += 1
                self.pending = Pending(number=self.asked, step=step + 1, shape=plan.shape, placement=plan.placement)
                self._compile(plan.shape)
        self.next_planner_seconds = time.perf_counter() - began

    def _adopt(self, placement: Placements, filled: dict[str, Tables] | None = None):
        """Run with a placement from the next step on; filled: its tables for the shape in force, if they are there."""
        if placement != self.placement:
            self.placement, self.tables, self.filled = placement, None, filled
            self.plan_id += 1

    def observe(self, step: int, metrics: dict):
        """Take in the metrics of a finished step (from 0), as NumPy."""
        if int(metrics["plan_hash_least"]) != int(metrics["plan_hash_most"]):
            raise RuntimeError(
                f"step {step + 1}: the processes ran different plans; each must see the same config, cluster file and "
                "loads"
            )
        if not metrics.get("skipped", False):  # where a step is not finite, its loads have no meaning
            self.waiting[step] = self.session.model.loads_by_segment(metrics["loads"])
        self.agreed = max(self.agreed, int(metrics["ready"]))

    def record(self, step: int, loads: np.ndarray) -> dict:
        """Return the plan's part of a finished step's record in metrics.jsonl (from 0)."""
        planned, record, shape = self.records.pop(step)
        loads = self.session.model.loads_by_segment(loads)
        asked = {name: plans.asked(loads=loads[name]) for name, plans in self.plans.items()}
        record.update(look_back(asked, planned, shape))
        for name in ("shadow_cut", "late_cut"):
            counted = [own.planner.counters[name] for own in self.plans.values() if name in own.planner.counters]
            if counted:
                record[name] = sum(counted)
        return record

    # Compiled steps.

    def _compile(self, shape: Shapes) -> concurrent.futures.Future:
        """Have a shape compiled in the thread, unless it is in the cache."""
        key = tuple(shape.values())
        if key not in self.executables:
            self.executables[key] = self.thread.submit(self.session.compile_programs, shape)
        return self.executables[key]

    def _inputs(self, flag: int) -> tuple[dict[str, Tables], Any]:
        """Return the step's tables and host signals int32 [devices, 3]: stop, newest shape ready here, hash of plan."""
        places, new = self.session.state_shardings, {}
        if self.tables is None:
            of = self.shape.items()
            new = {"tables": self.filled or {name: fill_tables(own, self.placement[name]) for name, own in of}}
            text = "".join(own.fingerprint() for own in self.placement.values()) + repr(shape_data(self.shape))
            self.hash = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) & 0x7FFFFFFF
        ready = 0
        if self.pending is not None and (future := self._compile(self.pending.shape)).done():
            future.result()  # a failed compilation ends the run now, not at a swap that others may never reach
            ready = self.pending.number
        rows = np.tile(np.array([flag, ready, self.hash], np.int32), (self.session.roles.mesh.size, 1))
        sent = {"host_signals": rows, **new}
        sent = to_devices(sent, {name: getattr(places, name) for name in sent})
        self.tables, self.filled = sent.get("tables", self.tables), None
        return self.tables, sent["host_signals"]

    def _swap(self, pending: Pending) -> dict:
        """Run with the pending shape from now on, once it is compiled; return what the step's record says of it."""
        began = time.perf_counter()
        programs = self._compile(pending.shape).result()
        record = {"compile_seconds": programs.seconds, "rejit_stall_seconds": time.perf_counter() - began}
        self.shape, self.tables, self.filled, self.pending = pending.shape, None, None, None
        self.executables.move_to_end(tuple(self.shape.values()))
        self._adopt(pending.placement)
        while len(self.executables) > EXECUTABLES:
            self.executables.popitem(last=False)
        return record

    def evaluation(self):
        """Return (evaluation step, tables) for the experts' current homes, without replicas."""
        bare = {name: own.bare() for name, own in self.stored.items()}
        shape = {name: build_shape(own) for name, own in bare.items()}
        slots = tuple(own.home_slots for own in shape.values())
        if slots not in self.evaluations:
            self.evaluations[slots] = self.session.evaluation_step(shape)
        tables = {name: fill_tables(own, bare[name]) for name, own in shape.items()}
        return self.evaluations[slots], to_devices(tables, self.session.state_shardings.tables)

    def close(self):
        """End the thread; a running compilation cannot be stopped, so this waits for it."""
        self.thread.shutdown(wait=True, cancel_futures=True)

    # Homes.

    @property
    def home(self) -> dict[str, np.ndarray]:
        """{segment: int32 [L, E]}, home device of every expert of the state."""
        return {name: stored.home for name, stored in self.stored.items()}

    def move_homes(self, state: dict, placement: Placements | None = None) -> dict:
        """Return the state, which is donated, with its experts where a placement has them.

        Args:
          placement: None is where a run starts, for another engine to go on.
        """
        placement = placement or {name: own.start for name, own in self.plans.items()}
        for name, old in self.stored.items():
            if old.moves(placement[name]):
                rows = self.shape[name].bank_rows
                state = reshard(state, old, placement[name], rows, name, self.compared)
        self.stored = placement
        return state

    # In a checkpoint.

    def state(self) -> dict:
        """Return what a checkpoint holds of the plan, as JSON data: lists instead of arrays."""
        pending = None
        if self.pending is not None:
            shape, placement = shape_data(self.pending.shape), placement_data(self.pending.placement)
            pending = {**vars(self.pending), "shape": shape, "placement": placement}
        held = {
            "session": {name: plans.state() for name, plans in self.plans.items()},
            "placement": placement_data(self.placement),
            "bank": placement_data(self.stored),
            "shape": shape_data(self.shape),
            "pending": pending,
            "options": self._options(),
            "asked": self.asked,
            "plan_id": self.plan_id,
            "waiting": {str(step): loads for step, loads in sorted(self.waiting.items())},
        }
        return json.loads(json.dumps(held, default=operator.methodcaller("tolist")))

    def restore(self, state: dict | None) -> str | None:
        """Continue from what `state` returned, if it was of this mesh and of these options; else from even homes.

        A step has the slots and the form of the planner that runs, not of an earlier one. Returns a line that says what
        differs; None where the state is used, and where there is none.
        """
        if state is None:
            return None
        changed = []
        for name, first in self.first.items():
            there = state["shape"][name]
            sizes = [(size, there[size], getattr(first, size)) for size in _SIZES]
            changed += [f"{size} was {before} and is {now}" for size, before, now in sizes if before != now]
        # of versions whose planners had all options in one class
        before = {name if "." in name else f"PlannerConfig.{name}": value for name, value in state["options"].items()}
        before, now = {RENAMED.get(name, name): value for name, value in before.items()}, self._options()
        names = [name for name in now if name in before and before[name] != now[name]]
        changed += [f"{name} was {before[name]} and is {now[name]}" for name in names]
        if changed:
            return f"plan: {', '.join(changed)}; experts start at even homes, and the planner sees new loads only"
        for name, plans in self.plans.items():
            plans.restore(state["session"][name])
        self.placement, self.stored = (read_placements(state[of], self.placement) for of in ("placement", "bank"))
        self.shape = self._read_shapes(state["shape"])
        if (pending := state["pending"]) is not None:
            shape, placement = self._read_shapes(pending["shape"]), read_placements(pending["placement"], self.stored)
            self.pending = Pending(number=pending["number"], step=pending["step"], shape=shape, placement=placement)
        self.asked, self.plan_id = state["asked"], state["plan_id"]
        for step, loads in state["waiting"].items():
            self.waiting[int(step)] = {name: np.asarray(own, np.int64) for name, own in loads.items()}
        return None

    def _options(self) -> dict[str, str]:
        """Return what decides which replicas there are and how they travel, {binding: value as text}."""
        config = next(iter(self.plans.values())).config
        own = build_planner(config).options
        found = {f"PlannerConfig.{name}": getattr(config, name) for name in _OPTIONS}
        if own is not None:
            found |= {f"{type(own).__name__}.{name}": value for name, value in dataclasses.asdict(own).items()}
        return {name: repr(value) for name, value in found.items()}

    def _read_shapes(self, data: dict) -> Shapes:
        """Return saved shapes, with this run's slots and rule for what is decided after the gate."""
        found = {}
        for name, first in self.first.items():
            own = data[name]
            parts = {part: own.get(part) and TransferShape(**own[part]) for part in ("ahead", "spare")}
            rows = own["bucket_rows"] and BucketRows(**own["bucket_rows"])
            shape = PlanShape(**{**own, **parts, "bucket_rows": rows, "late": first.late, "after_gate": None})
            plans = self.plans[name]
            found[name] = with_rule(plans.planner, shape, plans.cost, plans.groups)
        return found


def shape_data(shapes: Shapes) -> dict:
    """Return the sizes of shapes as data for JSON; the rule after the gate follows from the config."""
    return {name: dataclasses.asdict(dataclasses.replace(own, after_gate=None)) for name, own in shapes.items()}


def placement_data(placements: Placements) -> dict:
    """Return what distinguishes placements from others on the same devices."""
    fields = (*_ARRAYS, "rule", "program")
    return {name: {field: getattr(own, field) for field in fields} for name, own in placements.items()}


def read_placements(data: dict, like: Placements) -> Placements:
    """Return saved placements, on the devices of `like`."""
    return {
        name: own.replace(
            **{field: np.asarray(data[name][field], np.int32) for field in _ARRAYS},
            rule=tuple(data[name]["rule"]),
            program=data[name].get("program", ""),
        )
        for name, own in like.items()
    }


def build_engine(session: Any) -> RejitEngine | None:
    """Return the engine of a run, None where `PlannerConfig.name` is 'none'.

    Raises:
      UserError: a planner that this mesh, schedule or cluster file cannot serve.
    """
    if session.config.planner.name == "none":
        return None
    return RejitEngine(session, build_sessions(session.config, session.roles))
