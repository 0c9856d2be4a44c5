"""The re-jit engine: which plan and which executable the next step runs with, chosen without delaying the step.

Inputs: the loads of finished steps. Outputs: for every step the placement's tables, the executable of its shape, and
the state with its experts at the placement's homes. A plan that fits the running shape is a change of tables. One
that does not gets a wider shape, compiled in a background thread while training goes on with the old plan.
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
import operator
import time
from collections.abc import Callable

import numpy as np

from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.parallel.mesh import to_devices
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning import routing
from moe_jax.planning.balancer import BALANCERS
from moe_jax.planning.cost import predicted_layer_seconds
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape, Shapes, build_shape, fill_tables, fits
from moe_jax.training.bank_order import reshard
from moe_jax.training.compiling import compared_function
from moe_jax.training.program import Programs, Session
from moe_jax.training.replanner import TOO_OFTEN, Replanner, build_replanners, is_idle

# {segment: part} of the segments with experts, first layers first: each has a planner of its own
Placements = dict[str, Placement]
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

    def __init__(self, session: Session, replanners: dict[str, Replanner]):
        self.session, self.config, self.lag = session, session.config.planner, session.lag
        self.replanner = replanners
        self.plans = {name: replanner.plans for name, replanner in self.replanner.items()}
        self.remark = "; ".join(filter(None, (plans.planner.remark(plans.cost) for plans in self.plans.values())))
        # placement: what the next step runs with; stored: where the state's experts are now
        self.placement = self.stored = {name: replanner.start for name, replanner in self.replanner.items()}
        self.shape = {name: replanner.first_shape() for name, replanner in self.replanner.items()}
        self.pending: Pending | None = None
        self.asked = 0  # shapes requested so far
        self.agreed = 0  # the newest that every process had compiled, as far as metrics were read
        self.waiting: dict[int, dict[str, np.ndarray]] = {}  # loads by step: read, and not yet given to the planner
        self.plan_id = 0
        self.next_planner_seconds = 0.0
        self.records: dict[int, tuple[Placements, dict, Shapes]] = {}
        self.executables: collections.OrderedDict[tuple, concurrent.futures.Future] = collections.OrderedDict()
        self.evaluations: dict[tuple[int, ...], object] = {}
        self.share = functools.cache(lambda move: compared_function(move, self.session.compiler_options()))
        self.thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="rejit")
        self.tables, self.hash = None, 0
        self.frozen = False  # plan no more: what times steps of one plan sets it

    # Around a step.

    def start(self) -> Programs:
        """Compile what the next step runs with."""
        first = self._compile(self.shape)
        if self.pending is not None:
            self._compile(self.pending.shape)
        return first.result()

    def warm_start(self, past: list[np.ndarray]):
        """Plan the first step, before `start`, from loads [L, S, E] seen elsewhere, oldest first; for benchmarks.

        A predictor that has seen one step doubles the predicted buckets, and buckets never shrink.
        """
        for loads in past:
            for name, own in self.session.model.loads_by_segment(loads).items():
                self.plans[name].observe(own)
        placement = {name: plans.propose(0) for name, plans in self.plans.items()}
        self.shape = self._grown(placement)
        self._adopt(placement)

    def leave_teacher(self, session: Session):
        """Go on, from `start`, with a session's step without the teacher: the same state, batches and plans."""
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
        if self.pending is not None and self._is_due(step, self.pending):
            record |= self._swap(self.pending)
        if homes_differ(self.placement, self.stored):
            began = time.perf_counter()
            state = self._move_homes(state if settle is None else settle(), self.placement)
            record["reshard_seconds"] = time.perf_counter() - began
        if self.tables is None:
            self.tables = self._on_devices(self.shape, self.placement)
            text = "".join(own.fingerprint() for own in self.placement.values()) + repr(self.shape)
            self.hash = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) & 0x7FFFFFFF
        record["plan_id"] = self.plan_id
        if self.remark:
            record["plan_remark"] = self.remark
        self.records[step] = (self.placement, record, self.shape)
        return self._compile(self.shape).result(), self.tables, self._host_signals(flag), state

    def _is_due(self, step: int, pending: Pending) -> bool:
        """Say whether step `step` is to run with the pending shape, which may still be compiling here."""
        if self.config.swap_after is None:
            return self.agreed >= pending.number
        return step >= pending.step + self.config.swap_after - 1

    def _swap(self, pending: Pending) -> dict:
        """Run with the pending shape from now on, once it is compiled; return what the step's record says of it."""
        began = time.perf_counter()
        programs = self._compile(pending.shape).result()
        record = {"compile_seconds": programs.seconds, "rejit_stall_seconds": time.perf_counter() - began}
        self.shape, self.tables, self.pending = pending.shape, None, None
        self.executables.move_to_end(tuple(self.shape.values()))
        self._adopt(pending.placement)
        while len(self.executables) > EXECUTABLES:
            self.executables.popitem(last=False)
        return record

    def at_first_homes(self, state: dict) -> dict:
        """Return the state, which is donated, with its experts where a run starts, for another engine to go on."""
        return self._move_homes(state, {name: own.start for name, own in self.replanner.items()})

    def _move_homes(self, state: dict, placement: Placements) -> dict:
        """Return the state, which is donated, with its experts where a placement has them."""
        for name, old in self.stored.items():
            if (old.home != placement[name].home).any():
                rows = self.shape[name].bank_rows
                state = reshard(state, old, placement[name], rows, name, self.share)
        self.stored = placement
        return state

    def _host_signals(self, flag: int):
        """Return the step's input int32 [devices, 3], of this process: stop, newest shape ready here, hash of plan."""
        ready = 0
        if self.pending is not None and (future := self._compile(self.pending.shape)).done():
            future.result()  # a failed compilation ends the run now, not at a swap that others may never reach
            ready = self.pending.number
        rows = np.tile(np.array([flag, ready, self.hash], np.int32), (self.session.roles.num_devices, 1))
        return to_devices(rows, self.session.state_shardings.host_signals)

    def after_dispatch(self, step: int):
        """Plan for step `step` + 1 while the devices work on `step`."""
        if self.frozen:
            return
        began = time.perf_counter()
        for ready in sorted(at for at in self.waiting if at <= step - self.lag):
            for name, own in self.waiting.pop(ready).items():
                self.plans[name].observe(own)
        if all(plans.predictor.seen for plans in self.plans.values()):
            self._take(step + 1, {name: plans.propose(step + 1) for name, plans in self.plans.items()})
        self.next_planner_seconds = time.perf_counter() - began

    def _take(self, step: int, placement: Placements):
        """Let step `step` run with a new placement if it fits; request another shape where that pays."""
        if self.pending is not None and _fit(self.pending.shape, placement):
            self.pending.placement = placement
        fitting = _fit(self.shape, placement)
        if fitting:
            self._adopt(placement)
        if self.pending is not None:
            return
        idle = any(is_idle(own, placement[name]) for name, own in self.shape.items())
        if fitting and not idle:  # do buckets need more rows by prediction than they have, or overflow much too often?
            wanted = False
            for name, replanner in self.replanner.items():
                rows = replanner.predicted_rows(self.shape[name], placement[name], TOO_OFTEN)
                there = replanner.sizes(self.shape[name]).bucket_rows(replanner.devices)
                wanted = wanted or (rows is not None and not rows.within(there))
        else:  # does the plan gain by prediction? A new shape costs no step: the old one runs while it compiles
            loads = {name: plans.predictor.predict() for name, plans in self.plans.items()}
            now = self._predicted(self.placement, loads, self.shape).sum()
            gain = now - self._predicted(placement, loads, self._grown(placement)).sum()
            # the planner has compared the gain of other homes, or of another program, with their cost
            moves = homes_differ(placement, self.placement)
            moves = moves or any(own.program != self.shape[name].program for name, own in placement.items())
            wanted = moves or gain > 0
        larger = self._grown(placement) if wanted else self.shape
        if larger != self.shape:  # else no bucket can be larger
            self.asked += 1
            self.pending = Pending(number=self.asked, step=step, shape=larger, placement=placement)
            self._compile(larger)

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
        planned, record, shapes = self.records.pop(step)
        loads = self.session.model.loads_by_segment(loads)
        placement = {
            name: replanner.refined(shapes[name], planned[name], loads[name])
            for name, replanner in self.replanner.items()
        }
        record["replicas"] = sum(len(own.replicas) for own in placement.values())
        computed = [routing.pair_loads(own, loads[name]).sum(axis=1) for name, own in placement.items()]
        balance = [own.max(axis=1) / np.maximum(own.mean(axis=1), 1e-9) for own in computed]
        record["device_load_max_over_mean"] = np.concatenate(balance)
        record["predicted_layer_seconds"] = self._predicted(placement, loads, shapes, planned)
        for name in ("shadow_cut", "late_cut"):
            counted = [own.planner.counters[name] for own in self.plans.values() if name in own.planner.counters]
            if counted:
                record[name] = sum(counted)
        return record

    def evaluation(self):
        """Return (evaluation step, tables) for the experts' current homes, without replicas."""
        bare = {name: own.bare() for name, own in self.stored.items()}
        shape = {name: build_shape(own) for name, own in bare.items()}
        slots = tuple(own.home_slots for own in shape.values())
        if slots not in self.evaluations:
            self.evaluations[slots] = self.session.evaluation_step(shape)
        return self.evaluations[slots], self._on_devices(shape, bare)

    def close(self):
        """End the thread; a running compilation cannot be stopped, so this waits for it."""
        self.thread.shutdown(wait=True, cancel_futures=True)

    @property
    def home(self) -> dict[str, np.ndarray]:
        """{segment: int32 [L, E]}, home device of every expert of the state."""
        return {name: stored.home for name, stored in self.stored.items()}

    def state(self) -> dict:
        """Return what a checkpoint holds of the plan, as JSON data."""
        pending = None
        if self.pending is not None:
            shape, placement = _shape_data(self.pending.shape), _placement_data(self.pending.placement)
            pending = {"number": self.pending.number, "step": self.pending.step, "shape": shape, "placement": placement}
        state = {
            "session": {name: plans.state() for name, plans in self.plans.items()},
            "placement": _placement_data(self.placement),
            "bank": _placement_data(self.stored),
            "shape": _shape_data(self.shape),
            "pending": pending,
            "options": self._options(),
            "asked": self.asked,
            "plan_id": self.plan_id,
            "waiting": {str(step): loads for step, loads in sorted(self.waiting.items())},
        }
        return json.loads(json.dumps(state, default=operator.methodcaller("tolist")))  # of NumPy's arrays and numbers

    def restore(self, state: dict | None) -> str | None:
        """Continue from what `state` returned, if it was on as many devices; else from even homes.

        Under other options of the planner homes and seen loads stay, and replicas start anew: a step has the slots and
        the form of the planner that runs, not of an earlier one. Returns a line that says what of the state is left
        out, and why; None where all of it is used.
        """
        if state is None:
            return None
        changed = [
            f"{size} was {state['shape'][name][size]} and is {getattr(now, size)}"
            for name, now in self.shape.items()
            for size in ("layers", "experts", "devices", "devices_per_node", "bank_rows")
            if state["shape"][name][size] != getattr(now, size)
        ]
        if changed:
            return (
                f"plan: the checkpoint's is of another mesh or planner ({', '.join(changed)}); experts start at even "
                "homes, and the planner sees new loads only"
            )
        for name, plans in self.plans.items():
            plans.restore(state["session"][name])
        self.placement, self.stored = self._read_placements(state["placement"]), self._read_placements(state["bank"])
        first, self.shape = self.shape, self._read_shapes(state["shape"], self.shape)
        if not _fit(self.shape, self.placement):  # another planner's replicas, this one decides on the device
            self.placement = self._homes_alone()
        if (held := state["pending"]) is not None:
            shape, placement = self._read_shapes(held["shape"], first), self._read_placements(held["placement"])
            self.pending = Pending(number=held["number"], step=held["step"], shape=shape, placement=placement)
        self.asked, self.plan_id = state["asked"], state["plan_id"]
        for step, loads in state["waiting"].items():
            self.waiting[int(step)] = {name: np.asarray(own, np.int64) for name, own in loads.items()}
        before, now = state["options"], self._options()
        changed = [name for name in now if name in before and before[name] != now[name]]
        replicated = any(own.ahead is not None or own.program for own in self.shape.values())
        if not changed or (not replicated and self.pending is None):
            return None
        # replicas and sizes of transfers that were planned under other options are left out
        self.placement, self.pending = self._homes_alone(), None
        for name, replanner in self.replanner.items():
            bare = dataclasses.replace(self.shape[name], ahead=None, spare=None, program="")
            self.shape[name] = replanner.with_rule(bare)
            replanner.plans.drop_replicas()
        words = ", ".join(f"PlannerConfig.{name} was {before[name]} and is {now[name]}" for name in changed)
        return f"plan: {words}; homes and seen loads stay, and replicas come anew with the next plan"

    def _homes_alone(self) -> Placements:
        bare = {"replicas": None, "shares": None, "rule": "home", "program": ""}
        return {name: stored.replace(**bare) for name, stored in self.stored.items()}

    def _read_placements(self, data: dict) -> Placements:
        found = {}
        for name, like in self.placement.items():
            arrays = {field: np.asarray(data[name][field], np.int32) for field in ("home", "replicas", "shares")}
            program = data[name].get("program", "")
            found[name] = like.replace(**arrays, rule=tuple(data[name]["rule"]), program=program)
        return found

    def _read_shapes(self, data: dict, first: Shapes) -> Shapes:
        """Return saved shapes with what this run decides after the gate, in slots of its `first` shapes."""
        found = {}
        for name, replanner in self.replanner.items():
            rows = data[name]["bucket_rows"]
            parts = {part: (own := data[name].get(part)) and TransferShape(**own) for part in ("ahead", "spare")}
            parts["bucket_rows"] = rows and BucketRows(**rows)
            found[name] = replanner.with_rule(PlanShape(**{**data[name], **parts, "late": first[name].late}))
        return found

    def _options(self) -> dict[str, str]:
        """Return what decides which replicas there are and how they travel, as text by field of `PlannerConfig`."""
        config = next(iter(self.plans.values())).config
        names = ("when", "replica_slots", "overlap_degree", "bounded", "transfer")
        names += tuple(BALANCERS[config.name].knobs)
        return {name: repr(getattr(config, name)) for name in ("name", *names)}

    def _grown(self, placement: Placements) -> Shapes:
        return {name: replanner.grow(self.shape[name], placement[name]) for name, replanner in self.replanner.items()}

    def _on_devices(self, shape: Shapes, placement: Placements):
        """Return the tables of a placement as the step takes them."""
        shardings = self.session.state_shardings.tables
        return {name: to_devices(fill_tables(own, placement[name]), shardings[name]) for name, own in shape.items()}

    def _adopt(self, placement: Placements):
        if placement != self.placement:
            self.placement, self.tables = placement, None
            self.plan_id += 1

    def _predicted(
        self, placement: Placements, loads: dict[str, np.ndarray], shape: Shapes, planned: Placements | None = None
    ) -> np.ndarray:
        """Return the predicted seconds of each layer in one microbatch, those of all segments in turn.

        Args:
          placement: what the step makes of `planned`; loads: of a step; shape: what it is compiled for.
        """
        seconds = []
        for name, plans in self.plans.items():
            seen, ahead = loads[name] / plans.exchanges_per_step, None if planned is None else planned[name]
            cost = plans.cost.under(shape[name].schedule)
            seconds.append(predicted_layer_seconds(placement[name], seen, cost, shape[name], ahead))
        return np.concatenate(seconds)

    def _compile(self, shape: Shapes) -> concurrent.futures.Future[Programs]:
        """Have a shape compiled in the thread, unless it is in the cache."""
        key = tuple(shape.values())
        if key not in self.executables:
            self.executables[key] = self.thread.submit(self.session.compile_programs, shape)
        return self.executables[key]


def homes_differ(placement: Placements, other: Placements) -> bool:
    """Say whether an expert's home in one is not its home in the other."""
    return any((own.home != other[name].home).any() for name, own in placement.items())


def _fit(shape: Shapes, placement: Placements) -> bool:
    return all(fits(own, placement[name]) for name, own in shape.items())


def _placement_data(placements: Placements) -> dict:
    """Return what distinguishes placements from others on the same devices."""
    fields = ("home", "replicas", "shares", "rule", "program")
    return {name: {field: getattr(own, field) for field in fields} for name, own in placements.items()}


def _shape_data(shapes: Shapes) -> dict:
    """Return the sizes of shapes; the rule after the gate follows from the config."""
    found = {name: dataclasses.asdict(own) for name, own in shapes.items()}
    for own in found.values():
        del own["after_gate"]
    return found


def build_engine(session: Session) -> RejitEngine | None:
    """Return the engine of a run, None where `PlannerConfig.name` is 'none'.

    Raises:
      UserError: a planner that this mesh, schedule or cluster file cannot serve.
    """
    if session.config.planner.name == "none":
        return None
    return RejitEngine(session, build_replanners(session.config, session.roles))
