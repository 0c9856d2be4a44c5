"""A run's settings, chosen by measuring: the values of knobs, a search over them, and a journal of what was timed.

Inputs: a run's config and devices. Outputs: the fastest setting found, and a row for each that was tried. A setting is
{binding 'Name.field': value} of all tuned knobs; all compute the same training step, which first losses confirm.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.analysis.compile_ahead import memory_of
from moe_jax.analysis.replay_report import summarize
from moe_jax.analysis.simulate import least_lag, simulate
from moe_jax.analysis.timed import interleaved_seconds
from moe_jax.cluster.targets import device_named
from moe_jax.config.run_config import RunConfig, with_bindings
from moe_jax.errors import UserError
from moe_jax.kernels.grouped import HOPPER, choose_implementation, implementations
from moe_jax.models.config import CHOICES
from moe_jax.moe.routers import build_router
from moe_jax.moe.schedule import SCHEDULES, schedule_on
from moe_jax.observe.loads import read_loads
from moe_jax.observe.run_folder import RunFolder, disk_errors_named, environment_record
from moe_jax.parallel.exchange import TRANSPORTS
from moe_jax.parallel.mesh import Roles, build_mesh
from moe_jax.planning import NAMES, PlannerConfig
from moe_jax.training.compiling import find_target
from moe_jax.training.expert_check import KERNELS, device_answers, source_digest, verdict_of
from moe_jax.training.loop import memory_counts
from moe_jax.training.overlap import compare_halves, why_not_halves
from moe_jax.training.plan_cost import base_cost
from moe_jax.training.program import build_session
from moe_jax.training.rejit import build_engine
from moe_jax.training.segments import initial_placement, segment_runs
from moe_jax.training.stepper import Stepper
from moe_jax.training.teacher import mesh_experts

Setting = dict[str, Any]
Candidates = dict[str, list]  # {binding: its values}, the most promising binding first

MARGIN = 0.01  # of the seconds, that a candidate must save
NEAR = 1.25  # a value that took more times the best's seconds is not tried again beside other values
WARM_UP = 20  # steps before any is timed: early routing is more skewed than later
ROUNDS, MORE = 9, 12  # in turn, and more where noise could decide
# by which share first losses may differ: sums are taken in another order, below float32 of other roundings
LOSS_BOUND = {"float64": 1e-10, "float32": 2e-5}
LOSS_BOUND_BELOW = 4e-3


def text_of(setting: Setting, plain: Setting) -> str:
    """Return in what a setting differs from plain; settings with equal texts are equal."""
    return ", ".join(f"{name} = {value!r}" for name, value in setting.items() if value != plain[name]) or "plain"


def prepare(config: RunConfig, devices, trace: str = "") -> tuple[Setting, Candidates, dict[str, float]]:
    """Return plain, which is the run as it is, the candidates, and {binding: modelled seconds of a step saved}.

    Args:
      trace: run folder or file of loads to choose a planner by; '' leaves the planner as it is.
    """
    roles, gains = build_mesh(config.mesh, devices, mesh_experts(config, len(devices))), {}
    target = find_target(devices, roles.config.devices_per_node) if device_named(devices[0].device_kind) else None
    if target is not None and config.model.overlap == "none" and not why_not_halves(config, roles):
        for own, own_roles in segment_runs(config, roles).values():
            whole, halves = compare_halves(own, own_roles, target)
            saved = config.train.grad_accum_steps * own.model.moe_layers * (whole - halves)
            gains["ModelConfig.overlap"] = gains.get("ModelConfig.overlap", 0.0) + saved
    found = find_candidates(config, roles, devices[0])
    candidates = {"PlannerConfig.name": planners_by_trace(config, roles, trace)} if trace else {}
    candidates |= {name: found[name] for name in sorted(found, key=lambda name: -gains.get(name, 0.0))}
    parts = config.by_name()
    return {name: getattr(parts[name.split(".")[0]], name.split(".")[1]) for name in candidates}, candidates, gains


def find_candidates(config: RunConfig, roles: Roles, device) -> Candidates:
    """Return the values that this mesh, router, planner and device may have, of bindings with more than one."""
    moe, runs = config.moe, segment_runs(config, roles).values()
    alone = all(own.moe.dropless and build_router(own.moe).replays for own, _ in runs)  # no token competes with others
    parts, shards, members = (roles.size(axes) for axes in (roles.model, roles.expert_shard, roles.expert))
    same = {name: schedule_on(name, parts, shards).name for name in sorted(SCHEDULES)}
    orders = [name for name in same if same[name] == name != same.get(moe.schedule)]  # 'parm' is one of them
    dims = config.model.model_dim, config.model.hidden_dim // shards
    absent = {"reference", choose_implementation("auto", device, jnp.dtype(config.model.dtype), dims)}
    absent |= set() if str(getattr(device, "compute_capability", "")) == HOPPER else set(KERNELS)
    ways = zip(TRANSPORTS, (True, roles.members_per_node < members, shards > 1), strict=True)
    rows = config.train.batch_size // roles.size(roles.dense)
    found = {
        "MoEConfig.grouped_matmul": ["auto", *(name for name in implementations() if name not in absent)],
        "ModelConfig.overlap": ["none", "halves"] * alone,
        "MoEConfig.schedule": [moe.schedule, *orders],
        "MoEConfig.bucket_slack": [1.25, 1.5, 2.0, 3.0] * (moe.dropless and members > 1),
        "ModelConfig.remat": ["none", "dots", "block"],
        "train.optimistic": [False, True] * moe.dropless,
        "train.guide_scheduler": [False, True] * (device.platform != "cpu"),
        "ModelConfig.stack": CHOICES["stack"],
        "MoEConfig.overflow_chance": [0.0, 0.001] * (moe.dropless and members > 1),
        "ModelConfig.prefetch": CHOICES["prefetch"] * (config.planner.name != "none"),
        "MoEConfig.transport": [name for name, there in ways if there],
        "train.grad_accum_steps": [number for number in (1, 2, 4, 8) if rows % number == 0] * alone,
    }
    return {name: list(values) for name, values in found.items() if len(values) > 1}


def planners_by_trace(config: RunConfig, roles: Roles, trace: str) -> list[str]:
    """Return the run's planner, and the one of least modelled seconds over the loads of a run folder or file."""
    (own, own_roles), *others = segment_runs(config, roles).values()
    recorded = read_loads(RunFolder(trace, create=False).loads if Path(trace).is_dir() else trace)
    start, cost, records = initial_placement(own, own_roles), base_cost(own, own_roles), {}
    layers, experts = start.home.shape
    if others or recorded.loads.shape[1:] != (layers, start.devices, experts):
        found = list(recorded.loads.shape[1:])
        raise UserError(f"--trace={trace} has loads [L, S, E] = {found}; name a trace of this model and mesh")
    for name in NAMES:
        records[name] = simulate(name, recorded, config.planner, start, cost, least_lag(recorded.iterations), 1)
    seconds = {name: summarize(own, records["none"], cost)["layer_seconds"] for name, own in records.items()}
    return list(dict.fromkeys((config.planner.name, min(seconds, key=lambda name: seconds[name]))))


def journal_key(config_text: str, devices) -> dict[str, Any]:
    """Return all that a time depends on, as JSON data: machine, versions, commit and config."""
    found = environment_record(devices=[{"platform": one.platform, "kind": one.device_kind} for one in devices])
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.node())
    flags = os.environ.get("XLA_FLAGS", "")
    return {**found, "date": "", "cpu": cpu, "flags": flags, "source": source_digest(), "config": config_text}


class OutOfTimeError(Exception):
    """The budget ends before a question without an answer."""


class Journal:
    """Questions and answers as JSON lines; a question is written before it is asked, so one that kills shows.

    Attributes:
      spent: seconds that the answers given so far took, of earlier commands too; asked: how many are of this one.
    """

    def __init__(self, path: Path, key: dict, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        """Read the lines under this key; `say` hears of others."""
        self.path, self.clock, self.spent, self.asked = path, clock, 0.0, 0
        self.key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self.answers: dict[str, dict] = {}
        others, text = 0, path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in filter(None, text.splitlines()):
            try:
                key, question, answer = json.loads(line)
            except (ValueError, TypeError):
                key = "damaged"
            if key != self.key:
                others += 1
            elif answer == "interrupted":
                self.answers.pop(question, None)
            else:
                reason = "the process ended while it ran, at an earlier start"
                self.answers[question] = answer or {"status": "crashed", "reason": reason, "took": 0.0}
        if others:
            say(f"{path}: {others} lines of another machine, version, commit or config, or damaged, are left out")

    def ask(self, question: str, measure: Callable[[], dict], until: float = math.inf) -> dict:
        """Return the kept answer, else what `measure` returns; `OutOfTimeError` if `until` seconds were spent."""
        if question not in self.answers:
            if self.spent >= until:
                raise OutOfTimeError
            self._write(question, None)
            began = self.clock()
            try:
                answer = {**measure(), "took": self.clock() - began}
            except BaseException:
                self._write(question, "interrupted")
                raise
            self._write(question, answer)
            self.answers[question], self.asked = answer, self.asked + 1
        self.spent += self.answers[question]["took"]
        return self.answers[question]

    def _write(self, question: str, answer):
        with disk_errors_named(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps([self.key, question, answer])}\n")  # its own line, also after half a line
            os.fsync(file.fileno())


class Bench:
    """Devices with one trained state, which programs hand on: each takes its steps from where the last one ended.

    Two states are alive while a program takes its first step, one where memory does not hold two.
    """

    least_seconds = 0.3  # of steps in a row

    def __init__(self, config: RunConfig, devices, memory: int | None = None):
        """Take a run; memory: bytes of a device, None for what it says, or of a CPU its part of the machine's."""
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
        self.config, self.devices = config, devices
        self.memory = memory or min(memory_counts(devices, "bytes_limit"), default=whole)
        self.steppers: dict[str, Stepper] = {}
        self.warm: tuple[dict, int] | None = None  # a state with experts at first homes, and how many steps it took
        self.past: list = []  # loads of the last steps of the warm-up, from which planners plan
        self.first: Callable | None = None  # key -> the run's first state, compiled once

    def time(self, settings: Mapping[str, Setting], loss: float | None = None) -> dict:
        """Time {text: setting} in turn, the incumbent first; the programs of others are dropped.

        Args:
          loss: the first loss that each program must have; None takes that of the first.

        Returns:
          status 'timed', seconds {text: median of a step}, ratio of the last to the first, whether it wins, rounds,
          and loss.

        Raises:
          UserError, MemoryError, and what a compiler or device raises: a setting that does not run here.
        """
        self.steppers = {text: own for text, own in self.steppers.items() if text in settings}
        for text, setting in settings.items():
            loss = self.start(text, setting, loss)
        try:
            if self.warm is None:
                self._warm_up(self.steppers[next(iter(settings))])
            single = {text: self._turn(self.steppers[text], 1) for text in settings}
            steps = math.ceil(self.least_seconds / min(interleaved_seconds(single, 1).values())[0])
            turns = {text: self._turn(self.steppers[text], steps) for text in settings}
            taken = interleaved_seconds(turns, ROUNDS)
            first, last = (taken[list(taken)[place]] for place in (0, -1))
            ratio, error = compare(first, last)
            if len(taken) == 2 and abs(ratio - 1 + MARGIN) < 2 * error:
                for text, more in interleaved_seconds(turns, MORE).items():
                    taken[text] += more
                ratio, error = compare(first, last)
        except BaseException:
            self.steppers, self.warm = {}, None  # a step may have taken the state with it
            raise
        seconds = {text: statistics.median(own) / steps for text, own in taken.items()}
        wins = ratio < 1 - MARGIN and ratio + error < 1
        return {"status": "timed", "seconds": seconds, "ratio": ratio, "wins": wins, "rounds": len(first), "loss": loss}

    def start(self, text: str, setting: Setting, loss: float | None) -> float:
        """Compile a setting's program, unless it is there; return its first loss, which must be `loss` unless None."""
        if text not in self.steppers:
            stepper, found = self._compiled(with_bindings(self.config, setting))
            loss = found if loss is None else loss
            bound = LOSS_BOUND.get(self.config.model.dtype, LOSS_BOUND_BELOW) * abs(loss)
            if not abs(found - loss) <= bound:
                raise UserError(f"the first loss is {found:.8g}, not {loss:.8g} +- {bound:.1g}")
            self.steppers[text] = stepper
        return loss

    def _compiled(self, config: RunConfig) -> tuple[Stepper, float]:
        """Return the compiled program of a run, without a state, and the loss of the run's first step."""
        if config.planner.name != "none" and not self.past:
            model = dataclasses.replace(config.model, prefetch="none", refetch_replicas=False)
            self._warm_up(self._compiled(dataclasses.replace(config, model=model, planner=PlannerConfig()))[0])
        session = build_session(config, self.devices)
        engine = build_engine(session)
        if engine is not None:
            engine.warm_start(self.past)
            engine.frozen = True
        stepper = Stepper(session, {"step": 0}, engine)
        stepper.compile()
        programs = filter(None, (stepper.programs.common, stepper.programs.complete.result()))
        peak, arguments = max((held["peak"], held["arguments"]) for held in map(memory_of, programs))
        if peak > self.memory:
            raise MemoryError(f"{peak / 1e9:.3g} GB of a device, by the compiler, which has {self.memory / 1e9:.3g} GB")
        self.first = self.first or session.state_maker()
        warm = self.warm if peak + arguments <= self.memory else None
        self.warm = self.first(jax.random.key(config.train.seed)), 0
        (record,) = self._turn(stepper, 1)()
        self.warm = warm
        return stepper, float(record["loss"])

    def _warm_up(self, stepper: Stepper):
        """Train from the first state on; keep the state, and the loads that planners plan from."""
        self.warm = self.first(jax.random.key(self.config.train.seed)), 0
        self.past = [record["loads"] for record in self._turn(stepper, WARM_UP)()[-5:]]

    def _turn(self, stepper: Stepper, steps: int) -> Callable[[], list[dict]]:
        """Return what takes steps from the warm state on, and returns their records."""

        def turn():
            (state, stepper.step), self.warm = self.warm, None
            stepper.state = jax.device_put(state, stepper.session.state_shardings.state)
            records = stepper.run(steps)
            state, stepper.state = stepper.state, None
            self.warm = (state if stepper.engine is None else stepper.engine.at_first_homes(state)), stepper.step
            return records

        return turn


def compare(first: list[float], last: list[float]) -> tuple[float, float]:
    """Return the ratio of the medians, last over first, and its standard error from the rounds' own ratios."""
    ratios = [own / other for own, other in zip(last, first, strict=True)]
    spread = statistics.median(abs(ratio - statistics.median(ratios)) for ratio in ratios)
    return statistics.median(last) / statistics.median(first), 1.9 * spread / math.sqrt(len(ratios))


def search(
    plain: Setting, candidates: Candidates, bench, journal: Journal, budget: float,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Find the fastest setting, one binding after the other, and again while one that changed may change others.

    Args:
      bench: its `time` is that of `Bench`; budget: seconds of all commands that this journal serves.

    Returns:
      best, a setting; answer, of a last race between plain and it; rows, (text, seconds or None, ratio to plain or
      None, what else there is to say) of each setting in turn.

    Raises:
      UserError: plain does not run, takes the whole budget, or a candidate left the device unusable.
    """

    def ask(kind: str, settings: list[Setting], until: float = math.inf, loss: float | None = None) -> dict:
        named = {text_of(setting, plain): setting for setting in settings}

        def measure() -> dict:
            try:
                return bench.time(named, loss)
            except Exception as error:  # of a compiler or a device: the next one may run
                status, reason = ("refused", str(error)) if isinstance(error, UserError) else verdict_of(error)
                return {"status": status, "reason": reason[:300]}

        answer = journal.ask(f"{kind}: {' against '.join(reversed(named))}", measure, until)
        if answer["status"] == "fails" and not device_answers(jax.devices()[0]):
            raise UserError(f"the device does not answer after {list(named)[-1]}; give the same command again")
        return answer

    first = ask("plain", [plain])
    if first["status"] != "timed":
        raise UserError(f"plain does not run here ({first['status']}): {first['reason']}")
    if first["took"] >= budget:
        raise UserError(f"--budget_seconds ({budget:g}) is too short: plain alone took {first['took']:.0f} s")
    rows, ratios = [("plain", first["seconds"]["plain"], 1.0, "")], {"plain": 1.0}
    best, beside, far, total = plain, {}, set(), sum(len(values) - 1 for values in candidates.values())
    until = budget - 2 * first["took"]  # a candidate that has begun, and the last race, come after it
    try:
        while waiting := [name for name in candidates if beside.get(name) != best | {name: None}]:
            for name in waiting:
                beside[name] = best | {name: None}
                for value in candidates[name]:
                    rival = best | {name: value}
                    text = text_of(rival, plain)
                    if text in ratios or (name, value) in far:
                        continue
                    say(f"{len(rows)} of {max(total, len(rows))}: {text}, {max(0, until - journal.spent):.0f} s left")
                    answer = ask("race", [best, rival], until, first["loss"])
                    seconds, ratio, said = None, None, f"{answer['status']}: {answer.get('reason')}"
                    if answer["status"] == "timed":
                        ratio, said = ratios[text_of(best, plain)] * answer["ratio"], f"{answer['rounds']} rounds"
                        seconds = answer["seconds"][text]
                    if answer["status"] == "crashed" or answer.get("ratio", 0) > NEAR:
                        far.add((name, value))
                    rows.append((text, seconds, ratio, said))
                    ratios[text] = ratio
                    best = rival if answer.get("wins") else best
    except OutOfTimeError:
        say("the budget ends here; a larger --budget_seconds goes on")
    if best != plain:
        last = ask("last race", [plain, best], loss=first["loss"])
        best, first = (best, last) if last.get("wins") else (plain, first)
    return {"best": best, "answer": first, "rows": rows}
