"""A run's settings, chosen by measuring: candidates, a search over them knob by knob, a journal of what was timed.

Inputs: a run's config and devices. Outputs: the fastest setting found, and a row for each that was tried. A setting is
{binding 'Name.field': value} of all tuned knobs. All compute the same training step, which their first losses show.
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

from moe_jax import __version__
from moe_jax.analysis.replay_report import summarize
from moe_jax.analysis.simulate import simulate
from moe_jax.cluster import AbsentFigureError, cluster_of
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import Target
from moe_jax.config.run_config import CONFIG_CLASSES, RunConfig
from moe_jax.errors import UserError
from moe_jax.kernels.grouped import HOPPER, choose_implementation, implementations
from moe_jax.models.config import CHOICES
from moe_jax.models.counts import flops_per_token
from moe_jax.moe.routers import build_router
from moe_jax.moe.schedule import find_schedule, schedules
from moe_jax.observe import RunFolder, disk_errors_named, environment_record, read_loads
from moe_jax.parallel.mesh import Roles, build_mesh
from moe_jax.planning import NAMES
from moe_jax.planning.config import PlannerConfig
from moe_jax.training.compiling import find_target
from moe_jax.training.expert_check import KERNELS, device_answers, source_digest, verdict_of
from moe_jax.training.overlap import compare_halves, why_not_halves
from moe_jax.training.plan_cost import base_cost
from moe_jax.training.program import build_session
from moe_jax.training.rejit import build_engine
from moe_jax.training.segments import USUAL_VOCABULARY, initial_placement, segment_runs
from moe_jax.training.stepper import Stepper
from moe_jax.training.teacher import mesh_experts

Setting = dict[str, Any]  # {binding: value}

SLACKS, CHANCE = (1.25, 1.5, 2.0, 3.0), 0.001
MARGIN = 0.01  # of the seconds that a candidate must save
NEAR = 1.25  # what took more times the best's seconds is not tried again beside other settings
WARM_UP = 30  # steps before any is timed, and at most 2 s each: early routing is more skewed than later
FEWEST, ENOUGH, MOST = 5, 9, 21  # rounds: where one is far ahead, usually, and where noise could decide
# by which share first losses may differ: sums are taken in another order, in dtypes below float32 of other roundings
LOSS_BOUND = {"float64": 1e-10, "float32": 2e-5}
LOSS_BOUND_BELOW = 4e-3
TIMED, CRASHED = "timed", "crashed"  # besides these an answer's status is 'refused', 'another loss', or a verdict's


def with_bindings(config: RunConfig, setting: Setting) -> RunConfig:
    """Return the config with these bindings; a UserError where they do not fit together."""
    fields = dict(zip(CONFIG_CLASSES, (field.name for field in dataclasses.fields(config)), strict=True))
    parts: dict[str, dict] = {}
    for binding, value in setting.items():
        name, field = binding.split(".")
        parts.setdefault(fields[name], {})[field] = value
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **own) for name, own in parts.items()}
    )


def text_of(setting: Setting, plain: Setting) -> str:
    """Return in what a setting differs from plain; settings with equal texts are equal."""
    return ", ".join(f"{name} = {value!r}" for name, value in setting.items() if value != plain[name]) or "plain"


def prepare(
    config: RunConfig, devices, trace: str = "", say: Callable[[str], None] = print
) -> tuple[Setting, dict[str, list[Setting]]]:
    """Return plain, which is the run as it is, and {knob: values}, the most promising knob first.

    Args:
      trace: run folder or file of loads to choose a planner by; '' leaves the planner as it is.
    """
    roles = build_mesh(config.mesh, devices, mesh_experts(config, len(devices)))
    gains = modelled_gains(config, roles, find_target(devices, roles.config.devices_per_node))
    candidates = {"PlannerConfig.name": planners_by_trace(config, roles, trace)} if trace else {}
    found = find_candidates(config, roles, devices[0])
    candidates |= {knob: found[knob] for knob in sorted(found, key=lambda knob: -gains.get(knob, 0.0))}
    parts, names = config.by_name(), [name for values in candidates.values() for name in values[0]]
    priced = (f"{knob} (modelled: {1e3 * gains[knob]:.3g} ms)" if knob in gains else knob for knob in candidates)
    say(f"in this order: {', '.join(priced)}")
    return {name: getattr(parts[name.split(".")[0]], name.split(".")[1]) for name in names}, candidates


def find_candidates(config: RunConfig, roles: Roles, device) -> dict[str, list[Setting]]:
    """Return {knob: its values, as bindings}, those that this mesh, router, planner and device may have."""
    moe, runs = config.moe, segment_runs(config, roles).values()
    alone = all(own.moe.dropless and build_router(own.moe).replays for own, _ in runs)  # no token competes with others
    parts, shards, members = (roles.size(axes) for axes in (roles.model, roles.expert_shard, roles.expert))
    names = [name for name in schedules() if name != "parm"]  # which is one of the others
    different = {find_schedule(name).on_mesh(parts, shards).name: name for name in (*names, moe.schedule)}
    dims = config.model.model_dim, config.model.hidden_dim // shards
    absent = {"reference", choose_implementation("auto", device, jnp.dtype(config.model.dtype), dims)}  # by 'auto'
    absent |= set() if str(getattr(device, "compute_capability", "")) == HOPPER else set(KERNELS)
    rows = config.train.batch_size // roles.size(roles.dense)
    values = {
        "MoEConfig.grouped_matmul": ["auto", *(name for name in implementations() if name not in absent)],
        "ModelConfig.overlap": ["none", "halves"] * alone,
        "MoEConfig.schedule": [*different.values()],
        "ModelConfig.remat": ["none", "dots", "block"],
        "train.optimistic": [False, True] * moe.dropless,
        "train.guide_scheduler": [False, True] * (device.platform != "cpu"),
        "ModelConfig.stack": [*CHOICES["stack"]],
        "ModelConfig.prefetch": [*CHOICES["prefetch"]] * (config.planner.name != "none"),
        "MoEConfig.transport": ["all_to_all"]
        + ["two_level"] * (roles.members_per_node < members)
        + ["coordinated"] * (shards > 1),
        "train.grad_accum_steps": [number for number in (1, 2, 4, 8) if rows % number == 0] * alone,
    }
    found = {name: [{name: value} for value in own] for name, own in values.items() if len(own) > 1}
    if moe.dropless and members > 1:
        pairs = [*((slack, 0.0) for slack in SLACKS), (moe.bucket_slack, CHANCE)]
        names = ("MoEConfig.bucket_slack", "MoEConfig.overflow_chance")
        found["rows of buckets"] = [dict(zip(names, pair, strict=True)) for pair in pairs]
    return found


def modelled_gains(config: RunConfig, roles: Roles, target: Target | None) -> dict[str, float]:
    """Return {knob: modelled seconds of a step that it may save}, where it has a price; {} where rates are unknown."""
    if target is None:
        return {}
    model, length, gains = config.model, config.data.sequence_length, {}
    tokens = config.train.batch_size * length / roles.num_devices
    forward, _ = flops_per_token(model, config.moe, model.vocab_size or USUAL_VOCABULARY, length)
    gains["ModelConfig.remat"] = model.recomputes * tokens * forward / cluster_of(Prices(target)).flops
    if not why_not_halves(config, roles):
        saved = 0.0
        for own, own_roles in segment_runs(config, roles).values():
            whole, halves = compare_halves(own, own_roles, target)
            saved += config.train.grad_accum_steps * own.model.moe_layers * (whole - halves)
        gains["ModelConfig.overlap"] = -saved if model.overlap == "halves" else saved
    return {knob: gain for knob, gain in gains.items() if gain > 0}


def planners_by_trace(config: RunConfig, roles: Roles, trace: str) -> list[Setting]:
    """Return the run's planner and the one of least modelled seconds over a run folder's loads, as bindings."""
    (own, own_roles), *others = segment_runs(config, roles).values()
    recorded = read_loads(RunFolder(trace, create=False).loads if Path(trace).is_dir() else trace)
    start, cost = initial_placement(own, own_roles), base_cost(own, own_roles)
    found, base, seconds = recorded.loads.shape[1:], None, {}
    if others or recorded.sources is not None or found != (*start.home.shape[:1], start.devices, start.home.shape[1]):
        raise UserError(f"--trace={trace} has loads [L, S, E] = {list(found)}; name a trace of this model and mesh")
    for name in NAMES:  # 'none' comes first
        try:
            records = simulate(name, recorded, config.planner, start, cost, 1, 1)
            base = base or records
            seconds[name] = summarize(records, base, cost)["layer_seconds"] or math.inf
        except AbsentFigureError:
            continue
    best = min(seconds, key=lambda name: seconds[name])
    return [{"PlannerConfig.name": name} for name in dict.fromkeys((config.planner.name, best))]


def journal_key(config_text: str, devices) -> dict[str, Any]:
    """Return all that a time depends on, as JSON data: machine, versions, commit, and the config with what is plain."""
    found = environment_record(devices=[{"platform": one.platform, "kind": one.device_kind} for one in devices])
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.node())
    more = {"moe_jax": __version__, "source": source_digest(), "flags": os.environ.get("XLA_FLAGS", "")}
    return {**found, "date": None, "cpu": cpu, **more, "config": config_text}


class OutOfTimeError(Exception):
    """The budget ends before a question without an answer."""


class Journal:
    """Questions and answers as JSON lines; a question is written before it is asked, so one that kills shows.

    Attributes:
      spent: seconds that the answers given so far took, by earlier commands too; asked: those of this one.
    """

    def __init__(self, path: Path, key: dict, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        """Read the lines under this key; `say` hears of others, and of damaged ones."""
        self.path, self.clock, self.spent, self.asked = path, clock, 0.0, 0
        self.key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self.answers: dict[str, dict] = {}
        text, others, damaged = path.read_text(encoding="utf-8", errors="replace") if path.exists() else "", 0, 0
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                question, answer, own = entry["question"], entry["answer"], entry["key"] == self.key
            except (ValueError, TypeError, KeyError):
                damaged += bool(line)
                continue
            others += not own
            if own and answer == "interrupted":
                self.answers.pop(question, None)
            elif own:
                reason = "the process ended while it ran, at an earlier start"
                self.answers[question] = answer or {"status": CRASHED, "reason": reason, "took": 0.0}
        what = "of another machine, version, commit or config"
        for count, kind in ((others, what), (damaged, "that are damaged")):
            if count:
                say(f"{path}: {count} lines {kind} are left out")
        self.answers.pop("key", None)
        self._write("\n" * bool(text and text[-1] != "\n"), question="key", answer=key)

    def ask(self, question: str, measure: Callable[[], dict], until: float = math.inf) -> dict:
        """Return the kept answer, else what `measure` returns; `OutOfTimeError` if `until` seconds were spent."""
        if question not in self.answers:
            if self.spent >= until:
                raise OutOfTimeError
            self._write(question=question, answer=None)
            began = self.clock()
            try:
                answer = {**measure(), "took": self.clock() - began}
            except BaseException:
                self._write(question=question, answer="interrupted")
                raise
            self._write(question=question, answer=answer)
            self.answers[question], self.asked = answer, self.asked + 1
        self.spent += self.answers[question]["took"]
        return self.answers[question]

    def _write(self, before: str = "", **entry):
        with disk_errors_named(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{before}{json.dumps({'key': self.key, **entry})}\n")
            os.fsync(file.fileno())


def race(turns: Mapping[str, Callable[[], float]], fewest: int = FEWEST) -> dict[str, list[float]]:
    """Return {name: seconds of each of its turns}, in rounds; of two, more where noise could decide between them."""
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for done in range(1, MOST + 1):
        for name in list(turns)[:: 1 if done % 2 else -1]:
            taken[name].append(turns[name]())
        logs = [math.log(own[-1] / own[0]) for own in zip(*taken.values(), strict=True)]
        middle = statistics.median(logs)
        error = 1.9 * statistics.median(abs(log - middle) for log in logs) / math.sqrt(done)  # of the median
        ahead = abs(middle - math.log(1 - MARGIN))
        if (done >= fewest and ahead > 3 * error + 0.05) or (done >= ENOUGH and (ahead > 2 * error or len(turns) > 2)):
            break
    return taken


class Bench:
    """Devices with one trained state, which programs hand on: each takes its steps from where the last one ended.

    Two states are alive while a program takes its first step, one where memory does not hold two.
    """

    least_seconds = 0.3  # of steps in a row

    def __init__(self, config: RunConfig, devices, memory: int | None = None):
        """Take a run; memory: bytes of a device, None for what it says, of a CPU its part of the machine's."""
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
        self.config, self.devices = config, devices
        self.memory = memory or (devices[0].memory_stats() or {}).get("bytes_limit", whole)
        self.steppers: dict[str, Stepper] = {}
        self.warm: tuple[dict, int] | None = None  # a state whose experts are at even homes, and its number of steps
        self.past: list = []  # loads of the last steps of the warm-up, from which planners plan
        self.first_state: Callable | None = None

    def time(self, settings: Mapping[str, Setting], loss: float | None = None, fewest: int = FEWEST) -> dict:
        """Time {text: setting} in turn, the incumbent first; other programs are dropped.

        Args:
          loss: the first loss that each program must have; None takes that of the first.

        Returns:
          status; where it is TIMED also seconds {text: median of a step}, ratio of the last to the first, whether it
          wins, rounds, loss; else reason.
        """
        self.steppers = {text: own for text, own in self.steppers.items() if text in settings}
        for text in [text for text in settings if text not in self.steppers]:
            stepper, found = self._start(settings[text])
            loss = found if loss is None else loss
            bound = LOSS_BOUND.get(self.config.model.dtype, LOSS_BOUND_BELOW) * abs(loss)
            if not abs(found - loss) <= bound:
                return {"status": "another loss", "reason": f"{found:.8g} in step 1, not {loss:.8g} +- {bound:.1g}"}
            self.steppers[text] = stepper
        try:
            if self.warm is None:
                self._warm_up(self.steppers[next(iter(settings))])
            steps = max(1, math.ceil(self.least_seconds / min(self._turn(own, 1) for own in self.steppers.values())))
            taken = race({text: lambda own=self.steppers[text]: self._turn(own, steps) for text in settings}, fewest)
        except BaseException:
            self.steppers, self.warm = {}, None  # a step may have taken the state with it
            raise
        seconds = {text: statistics.median(own) for text, own in taken.items()}
        first, last = list(taken)[0], list(taken)[-1]
        ahead = sum(mine > own for mine, own in zip(taken[first], taken[last], strict=True)) / len(taken[first])
        ratio = seconds[last] / seconds[first]
        answer = {"ratio": ratio, "wins": ratio < 1 - MARGIN and ahead > 0.6, "rounds": len(taken[first])}
        return {"status": TIMED, "seconds": seconds, "loss": loss, **answer}

    def _start(self, setting: Setting, planned: bool = True) -> tuple[Stepper, float]:
        """Return the compiled program of a setting, without a state, and the loss of the run's first step."""
        config = with_bindings(self.config, setting)
        if not planned:
            model = dataclasses.replace(config.model, prefetch="none", refetch_replicas=False)
            config = dataclasses.replace(config, model=model, planner=PlannerConfig())
        elif config.planner.name != "none" and not self.past:
            self._warm_up(self._start(setting, planned=False)[0])
        session = build_session(config, self.devices)
        engine = build_engine(session)
        if engine is not None:
            engine.warm_start(self.past)
            engine.frozen = True
        stepper = Stepper(session, {"step": 0}, engine)
        stepper.compile()
        most = 0
        for program in filter(None, (stepper.programs.common, stepper.programs.complete.result())):
            if (found := program.memory_analysis()) is not None:
                new = found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
                most = max(most, found.argument_size_in_bytes + new)
                if most + found.argument_size_in_bytes > self.memory:
                    self.warm = None
        if most > self.memory:
            raise MemoryError(f"{most / 1e9:.3g} GB of a device by the compiler, which has {self.memory / 1e9:.3g} GB")
        self.first_state = self.first_state or session.state_maker()
        self._give(stepper, self.first_state(jax.random.key(config.train.seed)), 0)
        loss = float(stepper.run(1)[0]["loss"])
        stepper.state = None
        return stepper, loss

    def _warm_up(self, stepper: Stepper):
        """Train from the first state on, and keep the state, and the loads that planners plan from."""
        self._give(stepper, self.first_state(jax.random.key(self.config.train.seed)), 0)
        records, began = [], time.monotonic()
        while len(records) < WARM_UP and time.monotonic() - began < 2 * WARM_UP:
            records += stepper.run(1)
        self.past = [record["loads"] for record in records[-5:]]
        self._take(stepper)

    def _turn(self, stepper: Stepper, steps: int) -> float:
        """Take steps from the warm state on; return the seconds of one."""
        (state, step), self.warm = self.warm, None
        self._give(stepper, state, step)
        del state
        if stepper.engine is not None:  # experts move to where its plan has them
            stepper.run(1)
        began = time.perf_counter()
        stepper.run(steps)
        seconds = (time.perf_counter() - began) / steps
        self._take(stepper)
        return seconds

    def _give(self, stepper: Stepper, state: dict, step: int):
        stepper.state, stepper.step = jax.device_put(state, stepper.session.state_shardings.state), step

    def _take(self, stepper: Stepper):
        state, stepper.state = stepper.state, None
        self.warm = (state if stepper.engine is None else stepper.engine.at_first_homes(state)), stepper.step


def search(
    plain: Setting, candidates: Mapping[str, list[Setting]], bench, journal: Journal, budget: float,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Find the fastest setting, one knob after the other, and again while one that changed may change others.

    Args:
      candidates: {knob: values as bindings}, most promising first; plain binds all of them.
      bench: its `time` is that of `Bench`; budget: seconds of all commands that this journal serves.

    Returns:
      best, a setting; answer, of a last race between plain and it; rows, (text, seconds or None, ratio to plain or
      None, what else there is to say) of each setting in turn.

    Raises:
      UserError: plain does not run, takes the whole budget, or a candidate left the device unusable.
    """

    def ask(kind: str, settings: list[Setting], until: float = math.inf, **options) -> dict:
        named = {text_of(setting, plain): setting for setting in settings}

        def measure() -> dict:
            try:
                return bench.time(named, **options)
            except Exception as error:  # of a compiler or a device: the next one may run
                status, reason = ("refused", str(error)) if isinstance(error, UserError) else verdict_of(error)
                return {"status": status, "reason": reason[:300]}

        answer = journal.ask(f"{kind}: {' against '.join(reversed(named))}", measure, until)
        if answer["status"] == "fails" and not device_answers(jax.devices()[0]):
            raise UserError(f"the device does not answer after {list(named)[-1]}; give the same command again")
        return answer

    first = ask("plain", [plain])
    if first["status"] != TIMED:
        raise UserError(f"plain does not run here ({first['status']}): {first['reason']}")
    if first["took"] >= budget:
        raise UserError(f"--budget_seconds ({budget:g}) is too short: plain alone took {first['took']:.0f} s")
    rows, ratios = [("plain", first["seconds"]["plain"], 1.0, "")], {"plain": 1.0}
    best, beside, far, total = plain, {}, set(), sum(map(len, candidates.values())) - len(candidates)
    until = budget - 2 * first["took"]  # a candidate that has begun, and the last race, come after it
    try:
        while any(beside.get(knob) != _without(best, values[0]) for knob, values in candidates.items()):
            for knob, values in candidates.items():
                if beside.get(knob) == _without(best, values[0]):
                    continue
                beside[knob] = _without(best, values[0])
                for value in values:
                    rival, key = {**best, **value}, json.dumps(value)
                    text = text_of(rival, plain)
                    if text in ratios or key in far:
                        continue
                    say(f"{len(rows)} of {max(total, len(rows))}: {text}, {until - journal.spent:.0f} s left")
                    answer = ask("race", [best, rival], until, loss=first["loss"])
                    timed = answer["status"] == TIMED
                    ratio = ratios[text_of(best, plain)] * answer["ratio"] if timed else None
                    said = f"{answer['rounds']} rounds" if timed else f"{answer['status']}: {answer['reason']}"
                    rows.append((text, answer["seconds"][text] if timed else None, ratio, said))
                    ratios[text] = ratio
                    if answer["status"] == CRASHED or timed and answer["ratio"] > NEAR:
                        far.add(key)
                    if timed and answer["wins"]:
                        best = rival
    except OutOfTimeError:
        say("the budget ends here; a larger --budget_seconds goes on")
    if best != plain:
        last = ask("last race", [plain, best], loss=first["loss"], fewest=ENOUGH)
        best, first = (best, last) if last.get("wins") else (plain, first)
    return {"best": best, "answer": first, "rows": rows}


def _without(setting: Setting, value: Setting) -> Setting:
    return {name: own for name, own in setting.items() if name not in value}
