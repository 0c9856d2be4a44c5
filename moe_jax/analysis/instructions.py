"""Measured times of a recorded trace beside the modelled ones, instruction by instruction, and constants fitted.

Trace and program share the instructions' names. A profiled step launches every kernel by itself, so how long a step
takes comes from steps that were not profiled.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from moe_jax.analysis.compile_ahead import Compiled
from moe_jax.analysis.program_report import Span, merge_spans, stem
from moe_jax.cluster.costs import FREE, cost_of
from moe_jax.cluster.hlo import Computation, Instruction, Module, scope_of
from moe_jax.cluster.targets import Target
from moe_jax.cluster.timeline import (
    Model,
    Sample,
    collective_kind,
    fit_constants,
    instruction_seconds,
    launched_computations,
    play,
)
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError

MATMUL, FUSION, KERNEL, COPY, COLLECTIVE, LOOP = "matmul", "fusion", "kernel", "copy", "collective", "loop overhead"
WORST = 20
COPIES = ("copy", "copy-start", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modelled:
    """The model's times of one instruction.

    Attributes:
      name, scope: see `scopes`.
      group: 'matmul', 'fusion', 'kernel' (custom calls and everything else), 'copy', 'collective', 'loop overhead'.
      executions: in one step.
      seconds: of one execution.
      matmul_seconds: of one execution's FLOPs at the device's peak; memory_seconds: of its bytes at full bandwidth.
    """

    name: str
    group: str
    scope: str
    executions: int
    seconds: float
    matmul_seconds: float
    memory_seconds: float


def modelled_instructions(module: Module, target: Target, model: Model) -> dict[str, Modelled]:
    """Return {name: `Modelled`} of every instruction that runs; loops and branches themselves have no seconds."""
    timeline = play(module, target, model)
    executions: dict[str, int] = defaultdict(int)
    for event in timeline.events:
        if event.row == "compute":
            executions[event.name] += 1
    for name, flight in timeline.flights.items():
        executions[name] = flight.executions
    for name, record in timeline.skipped.items():
        executions[name] = record["executions"]
    seconds = instruction_seconds(module, target, model)
    found = {}
    for computation in launched_computations(module):
        for instruction in computation.instructions:
            name = instruction.name
            group = group_of(instruction, computation, module)
            if group is None or (group != LOOP and not executions[name]):
                continue
            cost = cost_of(instruction, computation, module)
            own = 0.0 if group == LOOP else seconds.get(name, (0.0, ""))[0]
            if instruction.opcode == "conditional":
                own = model.conditional
            found[name] = Modelled(
                name=name,
                group=group,
                scope=scope_of(instruction.op_name),
                executions=executions[name],
                seconds=own,
                matmul_seconds=sum(count / target.peak(kind) for kind, count in cost.flops),
                memory_seconds=cost.bytes / target.memory_bandwidth,
            )
    return found


def group_of(instruction: Instruction, computation: Computation, module: Module) -> str | None:
    """Return the group of an instruction, None for one that runs nothing."""
    opcode = instruction.opcode
    if opcode in ("while", "conditional"):
        return LOOP
    if collective_kind(instruction, module):
        return COLLECTIVE
    if opcode in FREE or opcode in ("call", "async-start") or opcode.endswith("-done"):
        return None
    if cost_of(instruction, computation, module).flops and "fmha" not in instruction.attributes:
        return KERNEL if "mosaic_gpu" in instruction.attributes else MATMUL
    if opcode in COPIES:
        return COPY
    return FUSION if opcode.startswith("fusion") else KERNEL


def compare_instructions(
    module: Module, target: Target, model: Model, spans: Sequence[Span], steps: int, step_seconds: float | None = None
) -> dict:
    """Return measured beside modelled seconds.

    Args:
      spans: of `steps` profiled steps, on any number of devices.
      steps: at least 1.
      step_seconds: of a step that was not profiled, None where that was not measured.

    Returns:
      A record for JSON; seconds are those of one step on the mean device:
      step_seconds as given; profiled_step_seconds; busy_seconds (at least one kernel runs); launches of a step;
      groups: per group instructions, executions, modelled and measured seconds and their ratio, of the instructions
      that the trace holds; worst: the `WORST` instructions by difference; not_in_trace and not_in_program: instructions
      of one side only; constants and fit: see `fit_constants`.
    """
    modelled = modelled_instructions(module, target, model)
    launched = [own for computation in launched_computations(module) for own in computation.instructions]
    conditionals = {own.name for own in launched if own.opcode == "conditional"}
    conditions: set[str] = set()  # instructions of the conditions of loops
    for own in launched:
        if own.opcode == "while":
            conditions |= set(module.computations[own.attribute("condition")].by_name)
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    devices: dict[str, list[Span]] = defaultdict(list)
    stems = {stem(name): name for name, record in modelled.items() if record.group == COLLECTIVE or "-start" in name}
    for span in spans:
        name = span.instruction
        name = name if name in modelled else stems.get(stem(name), name)
        devices[span.device].append(dataclasses.replace(span, instruction=name))
        seconds[name] += span.end - span.begin
        counts[name] += 1
    share = 1.0 / (max(len(devices), 1) * steps)
    busy = share * sum(
        end - begin for own in devices.values() for begin, end in merge_spans([(s.begin, s.end) for s in own])
    )
    length = max((max(s.end for s in own) - min(s.begin for s in own) for own in devices.values()), default=0.0)
    rows = [_row(modelled[name], counts[name] * share, seconds[name] * share) for name in seconds if name in modelled]
    loops = [name for name in seconds if name in conditions and name not in modelled]
    empty = Modelled(name="", group=LOOP, scope="", executions=0, seconds=0.0, matmul_seconds=0.0, memory_seconds=0.0)
    rows += [_row(dataclasses.replace(empty, name=name), counts[name] * share, seconds[name] * share) for name in loops]
    unknown = {n: s * share for n, s in seconds.items() if n not in modelled and n not in conditions}
    missing = [r for n, r in modelled.items() if n not in seconds and r.group != LOOP]
    samples = [
        Sample(
            matmul_seconds=modelled[row["name"]].matmul_seconds,
            memory_seconds=modelled[row["name"]].memory_seconds,
            measured_seconds=row["measured_seconds"] / modelled[row["name"]].executions,
            executions=modelled[row["name"]].executions,
        )
        for row in rows
        if row["group"] not in (COLLECTIVE, LOOP) and modelled[row["name"]].executions
    ]
    launches = sum(record.executions for record in modelled.values() if record.group not in (COLLECTIVE, LOOP))
    pauses = _pauses(devices, conditionals)
    constants, fit = fit_constants(samples, model, pauses)
    idle = None if step_seconds is None or not launches else max(step_seconds - busy, 0.0) / launches
    return {
        "steps": steps,
        "devices": len(devices),
        "step_seconds": step_seconds,
        "profiled_step_seconds": length / steps,
        "busy_seconds": busy,
        "launches": launches,
        "idle_seconds_per_launch": idle,
        "groups": _groups(rows),
        "worst": sorted(rows, key=lambda r: -abs(r["measured_seconds"] - r["modelled_seconds"]))[:WORST],
        "not_in_trace": {
            "instructions": len(missing),
            "modelled_seconds": sum(r.seconds * r.executions for r in missing),
        },
        "not_in_program": {
            "instructions": len(unknown),
            "measured_seconds": sum(unknown.values()),
            "names": sorted(unknown, key=lambda name: -unknown[name])[:8],
        },
        "constants": constants,
        "fit": fit,
    }


def _row(record: Modelled, executions: float, measured: float) -> dict:
    modelled = record.seconds * record.executions
    return {
        "name": record.name,
        "group": record.group,
        "scope": record.scope,
        "executions": record.executions,
        "measured_executions": executions,
        "modelled_seconds": modelled,
        "measured_seconds": measured,
        "ratio": measured / modelled if modelled > 0 else None,
    }


def _groups(rows: list[dict]) -> list[dict]:
    """Return sums by group, the longest first."""
    sums: dict[str, dict] = {}
    for row in rows:
        total = sums.setdefault(
            row["group"],
            {
                "group": row["group"],
                "instructions": 0,
                "executions": 0,
                "modelled_seconds": 0.0,
                "measured_seconds": 0.0,
            },
        )
        total["instructions"] += 1
        for name in ("executions", "modelled_seconds", "measured_seconds"):
            total[name] += row[name]
    for total in sums.values():
        modelled = total["modelled_seconds"]
        total["ratio"] = total["measured_seconds"] / modelled if modelled > 0 else None
    return sorted(sums.values(), key=lambda total: -total["measured_seconds"])


def _pauses(devices: dict[str, list[Span]], conditionals: set[str]) -> list[float]:
    """Return, per execution of a conditional in the trace, seconds between the kernels before and after it."""
    found = []
    for own in devices.values():
        ordered = sorted(own, key=lambda span: span.begin)
        for place, span in enumerate(ordered[1:-1], 1):
            if span.instruction in conditionals and ordered[place + 1].instruction not in conditionals:
                found.append(max(ordered[place + 1].begin - ordered[place - 1].end, 0.0))
    return found


def instructions_text(record: dict) -> str:
    """Return the record as text: groups, worst instructions, fitted constants."""
    step = record["step_seconds"]
    lines = [
        "",
        f"{record['launches']} launches a step, busy {_ms(record['busy_seconds'])} of "
        + (f"{_ms(step)} without the profiler, " if step is not None else "")
        + f"{_ms(record['profiled_step_seconds'])} with it",
        _ROW.format("group", "runs", "modelled ms", "measured ms", "ratio"),
    ]
    lines += [_text_row(group["group"], group) for group in record["groups"]]
    lines += ["", _ROW.format("instructions that differ most", "runs", "modelled ms", "measured ms", "ratio")]
    lines += [_text_row(f"{row['name']} {row['scope']}", row) for row in record["worst"]]
    for key, side in (("not_in_trace", "modelled_seconds"), ("not_in_program", "measured_seconds")):
        known = record[key]
        if known["instructions"]:
            lines.append(f"{key.replace('_', ' ')}: {known['instructions']} instructions, {_ms(known[side])}")
    lines += ["", "constants that fit (--constants=FILE takes them)"]
    for name, fitted in record["fit"].items():
        lines.append(
            f"  {name} {fitted['before']:.4g} -> "
            + (f"{fitted['value']:.4g} ({fitted['samples']} samples)" if fitted["value"] is not None else "no sample")
        )
    return "\n".join(lines) + "\n"


_ROW = "{:<58} {:>7} {:>12} {:>12} {:>7}"


def _text_row(name: str, row: dict) -> str:
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    modelled, measured = (f"{row[f'{side}_seconds'] * 1e3:.3f}" for side in ("modelled", "measured"))
    return _ROW.format(name[:58], row["executions"], modelled, measured, ratio)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


WARM_UP = 2


def record_steps(
    config: RunConfig, devices: list, compiled: Compiled, folder: Path, steps: int, plain_steps: int = 0
) -> float | None:
    """Run the compiled step on real data: to warm up, then without the profiler, then under it.

    Args:
      compiled: the training step, for this config on these devices.
      folder: the trace goes there.
      steps: under the profiler.
      plain_steps: without it, each waited for.

    Returns:
      seconds of a step without the profiler, the median; None without such steps. Under the profiler XLA launches each
      kernel by itself, where it would launch command buffers of many, so a step takes longer there.
    """
    import jax
    import numpy as np

    from moe_jax.parallel.global_arrays import to_devices
    from moe_jax.training.program import build_session, empty_tables
    from moe_jax.training.step import of_each_table

    session = build_session(config, devices)
    state, tables, host_signals = session.fresh_state(), session.tables, session.host_signals(0)
    shape = compiled.plan
    if shape is not None:
        tables = empty_tables(shape)
        tables = to_devices(tables, of_each_table(session.state_shardings.tables, tables))
        host_signals = to_devices(
            np.zeros((session.roles.num_devices, 3), np.int32), session.state_shardings.host_signals
        )
    total = WARM_UP + plain_steps + steps
    batches = [to_devices(session.feed.read(step), session.state_shardings.batch) for step in range(total)]
    step = compiled.executable
    if compiled.common:  # what a bucket that overflows costs here is the same: the step computes, and keeps nothing
        halted = to_devices(np.zeros((), np.bool_), session.state_shardings.replicated)

        def step(state, *inputs):
            return compiled.executable(state, halted, *inputs)

    seconds = []
    for place, batch in enumerate(batches[: WARM_UP + plain_steps]):
        started = time.perf_counter()
        state, metrics = step(state, batch, tables, host_signals)
        jax.block_until_ready((state, metrics))
        if place >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its events would fill the trace, which holds a million
    with jax.profiler.trace(str(folder), profiler_options=options):
        for batch in batches[WARM_UP + plain_steps :]:
            state, metrics = step(state, batch, tables, host_signals)
        jax.block_until_ready((state, metrics))
    return statistics.median(seconds) if seconds else None


def read_spans(folder: Path, module: str) -> list[Span]:
    """Return every span of a program in the newest trace below a folder.

    On a GPU the kernels stand on threads named 'Stream #...'; other threads of the device repeat them joined, and are
    left out. `hlo_op` names the instruction, behind those that it runs inside of, joined by '::'.

    Args:
      module: name of the HLO module.

    Raises:
      UserError: no trace there, or none of this program.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UserError(f"{folder} holds no trace (*.trace.json.gz); record one with --profile")
    events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e.get("tid")): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    streams = {key for key, name in threads.items() if name.startswith("Stream #")}
    with_streams = {pid for pid, _ in streams}
    spans = []
    for event in events:
        fields = event.get("args") or {}
        if event.get("ph") != "X" or "hlo_op" not in fields:
            continue
        if event["pid"] in with_streams and (event["pid"], event.get("tid")) not in streams:
            continue
        if str(fields.get("hlo_module", "")).split("(")[0] == module:
            device = f"{processes.get(event['pid'], '')} {fields.get('device_ordinal', '')}".strip()
            begin = event["ts"] * 1e-6
            name = re.split(r"::|/", str(fields["hlo_op"]))[-1]
            spans.append(Span(device, name, begin, begin + event.get("dur", 0.0) * 1e-6))
    if not spans:
        raise UserError(f"the trace in {folder} has no execution of {module}; was another program running?")
    return spans
