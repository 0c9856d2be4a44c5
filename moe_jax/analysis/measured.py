"""What a recorded trace measured, in the report of its program: of the step, each collective and each instruction, and
the constants of the cost model that fit.

Trace and program share the instructions' names; how long a step takes comes from steps that were not profiled.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_jax.analysis.compile_ahead import Compiled
from moe_jax.cluster.costs import FREE, cost_of
from moe_jax.cluster.hlo import Module, scope_of
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.timeline import collective_of, instruction_seconds, launched_instructions, play
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError

MATMUL, FUSION, KERNEL, COPY, COLLECTIVE, LOOP = "matmul", "fusion", "kernel", "copy", "collective", "loop overhead"
COPIES = ("copy", "copy-start", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad")
WORST = 20
WARM_UP = 2
LEAST_SAMPLES = 3


# of each device in a trace its executions: (instruction, begin, end), in seconds
Spans = dict[str, list[tuple[str, float, float]]]


def add_measured(
    report: dict,
    module: Module,
    prices: Prices,
    spans: Spans,
    steps: int,
    step_seconds: float | None = None,
) -> dict:
    """Return the report with measured times.

    Args:
      report: from `build_report`, of the module.
      spans: of `steps` profiled steps (at least 1), on any number of devices.
      step_seconds: of a step that was not profiled, None where that was not measured.

    Returns:
      A new report; seconds are those of one step on the mean device. At its top measured: step_seconds (of the longest
      device), and seconds of compute, of collectives, exposed; instructions: see `compare_instructions`; constants:
      {name: value} for a file that `read_constants` takes, of those with samples enough. In each collective measured:
      executions, seconds, exposed_seconds, None where the trace has no execution of it.
    """
    names = {stem(record["name"]) for record in report["collectives"]}
    share = 1.0 / (max(len(spans), 1) * steps)
    sums: dict[str, dict] = {}  # of each collective, over all devices and steps
    compute = step = 0.0
    for of_device in spans.values():
        working = merge_spans([(begin, end) for name, begin, end in of_device if stem(name) not in names])
        compute += sum(end - begin for begin, end in working)
        step = max(step, max(end for *_, end in of_device) - min(begin for _, begin, _ in of_device))
        for instruction, begin, end in of_device:
            name, length = stem(instruction), end - begin
            if name in names:
                covered = (max(0.0, min(end, stop) - max(begin, start)) for start, stop in working)
                own = sums.setdefault(name, {"executions": 0, "seconds": 0.0, "exposed_seconds": 0.0})
                own["executions"] += 1
                own["seconds"] += length
                own["exposed_seconds"] += length - sum(covered)
    collectives = []
    for record in report["collectives"]:
        own = sums.get(stem(record["name"]))
        measured = None if own is None else {name: value * share for name, value in own.items()}
        collectives.append({**record, "measured": measured})
    total = {
        "steps": steps,
        "devices": len(spans),
        "step_seconds": step / steps,
        "compute_seconds": compute * share,
        "collective_seconds": sum(own["seconds"] for own in sums.values()) * share,
        "exposed_seconds": sum(own["exposed_seconds"] for own in sums.values()) * share,
    }
    found = compare_instructions(module, prices, spans, steps, step_seconds)
    return {
        **report,
        "measured": total,
        "collectives": collectives,
        "instructions": found,
        "constants": found["constants"],
    }


def stem(name: str) -> str:
    """Return the name that start, done and the kernel of one collective share."""
    head, dot, number = name.partition(".")
    return head.removesuffix("-start").removesuffix("-done") + dot + number


def merge_spans(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (begin, end) pairs as the fewest that cover the same time, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def modelled_instructions(module: Module, prices: Prices) -> dict[str, dict]:
    """Return {name: record} of every instruction that runs.

    A record has group ('kernel' for custom calls and everything else), scope, executions in one step, and of one
    execution seconds, matmul_seconds (its FLOPs at the device's peak) and memory_seconds (its bytes at full bandwidth).
    """
    timeline = play(module, prices)
    executions = Counter(name for row, name, *_ in timeline.events if row == "compute")
    executions.update({name: flight.executions for name, flight in timeline.flights.items()})
    executions.update({name: record["executions"] for name, record in timeline.skipped.items()})
    seconds = instruction_seconds(module, prices)
    found = {}
    for instruction, computation in launched_instructions(module, module.entry):
        name, opcode = instruction.name, instruction.opcode
        cost = cost_of(instruction, computation, module)
        if opcode in ("while", "conditional"):
            group = LOOP
        elif collective_of(instruction, module):
            group = COLLECTIVE
        elif opcode in FREE or opcode in ("call", "async-start") or opcode.endswith("-done"):
            continue
        elif cost.products and "fmha" not in instruction.attributes:
            group = KERNEL if "mosaic_gpu" in instruction.attributes else MATMUL
        elif opcode in COPIES:
            group = COPY
        else:
            group = FUSION if opcode.startswith("fusion") else KERNEL
        if group != LOOP and not executions[name]:
            continue
        alone = {"while": 0.0, "conditional": prices.assumed("conditional")}  # without what they run
        found[name] = {
            "group": group,
            "scope": scope_of(instruction.op_name),
            "executions": executions[name],
            "seconds": alone.get(opcode, seconds.get(instruction, (0.0, None))[0]),
            "matmul_seconds": sum(count / prices.target.flops(kind) for kind, count in cost.flops.items()),
            "memory_seconds": cost.bytes / prices.target.memory_bandwidth,
        }
    return found


def compare_instructions(
    module: Module,
    prices: Prices,
    spans: Spans,
    steps: int,
    step_seconds: float | None = None,
) -> dict:
    """Return a record of measured next to modelled seconds, of one step on the mean device; see `add_measured`."""
    modelled = modelled_instructions(module, prices)
    launched = [instruction for instruction, _ in launched_instructions(module, module.entry)]
    loops = (module.computations[own.attribute("condition")] for own in launched if own.opcode == "while")
    conditions = {own.name for computation in loops for own in computation.instructions}
    stems = {stem(n): n for n, record in modelled.items() if record["group"] == COLLECTIVE or "-start" in n}
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    share = 1.0 / (max(len(spans), 1) * steps)
    busy = length = 0.0
    for of_device in spans.values():
        for name, begin, end in of_device:
            name = name if name in modelled else stems.get(stem(name), name)
            seconds[name] += end - begin
            counts[name] += 1
        merged = merge_spans([(begin, end) for _, begin, end in of_device])
        busy += share * sum(end - begin for begin, end in merged)
        length = max(length, merged[-1][1] - merged[0][0])
    rows, samples, groups = [], [], {}
    for name in seconds:
        if name not in modelled and name not in conditions:
            continue
        own = modelled.get(name, {"group": LOOP, "scope": "", "executions": 0, "seconds": 0.0})
        row = {"name": name, "group": own["group"], "scope": own["scope"], "executions": own["executions"]}
        row["measured_executions"] = counts[name] * share
        row["modelled_seconds"] = own["seconds"] * own["executions"]
        row["measured_seconds"] = seconds[name] * share
        rows.append(row)
        if own["group"] not in (COLLECTIVE, LOOP) and own["executions"] and row["measured_seconds"] > 0:
            each = row["measured_seconds"] / own["executions"]
            samples.append((own["matmul_seconds"], own["memory_seconds"], each))
        total = groups.setdefault(own["group"], {"group": own["group"], "instructions": 0})
        total["instructions"] += 1
        for key in ("executions", "modelled_seconds", "measured_seconds"):
            total[key] = total.get(key, 0) + row[key]
    for record in (*rows, *groups.values()):
        slow = record["modelled_seconds"]
        record["ratio"] = record["measured_seconds"] / slow if slow > 0 else None
    unknown = {n: s * share for n, s in seconds.items() if n not in modelled and n not in conditions}
    missing = [record for n, record in modelled.items() if n not in seconds and record["group"] != LOOP]
    launches = sum(own["executions"] for own in modelled.values() if own["group"] not in (COLLECTIVE, LOOP))
    fit = fit_constants(samples, prices)
    return {
        "steps": steps,
        "devices": len(spans),
        "step_seconds": step_seconds,
        "profiled_step_seconds": length / steps,
        "busy_seconds": busy,  # at least one kernel runs
        "launches": launches,
        # instructions, executions, modelled and measured seconds and their ratio, of what the trace holds
        "groups": sorted(groups.values(), key=lambda total: -total["measured_seconds"]),
        "worst": sorted(rows, key=lambda r: -abs(r["measured_seconds"] - r["modelled_seconds"]))[:WORST],
        "not_in_trace": {
            "instructions": len(missing),
            "modelled_seconds": sum(record["seconds"] * record["executions"] for record in missing),
        },
        "not_in_program": {
            "instructions": len(unknown),
            "measured_seconds": sum(unknown.values()),
            "names": sorted(unknown, key=lambda name: -unknown[name])[:8],
        },
        "constants": {name: own["value"] for name, own in fit.items()},
        "fit": fit,
    }


def fit_constants(samples: Sequence[tuple[float, float, float]], prices: Prices) -> dict[str, dict]:
    """Fit the constants of the model to kernels, by medians: a few, slow for another reason, move them little.

    Args:
      samples: (matmul_seconds, memory_seconds, seconds) of the kernels of one program: of its FLOPs at the device's
        peak, of its bytes at the full bandwidth, and measured of one execution, above 0.
      prices: whose shares of the data sheet sort the samples.

    Returns:
      {name: {value, before, samples}} of those with at least `LEAST_SAMPLES`.
    """
    matmul_share, memory_share, launch = map(prices.assumed, ("matmul_share", "memory_share", "launch"))
    points = {"launch": [], "matmul_efficiency": [], "memory_efficiency": []}
    for matmul, memory, took in samples:
        if max(matmul, memory) < launch / 4:
            points["launch"].append(took)
        elif matmul / matmul_share >= memory / memory_share:  # bound by its FLOPs
            points["matmul_efficiency"] += [min(matmul / took, 1.0)] if matmul >= launch else []
        elif not matmul and memory >= 4 * launch:
            points["memory_efficiency"].append(min(memory / took, 1.0))
    before = {"launch": launch, "matmul_efficiency": matmul_share, "memory_efficiency": memory_share}
    return {
        name: {"value": statistics.median(known), "before": before[name], "samples": len(known)}
        for name, known in points.items()
        if len(known) >= LEAST_SAMPLES
    }


def record_steps(
    config: RunConfig, devices: list, compiled: Compiled, folder: Path, steps: int, plain_steps: int = 0
) -> float | None:
    """Run the compiled step on real data: to warm up, then without the profiler, then under it.

    Args:
      folder: the trace goes there.
      steps: under the profiler; plain_steps: without it, each waited for; their median seconds are returned.
    """
    import jax

    from moe_jax.parallel.mesh import to_devices
    from moe_jax.planning.plan_shape import table_shapes
    from moe_jax.training.program import build_session

    session = build_session(config, devices)
    state, tables, host_signals = session.fresh_state(), session.tables, session.host_signals(0)
    shape = compiled.plan
    if shape is not None:
        tables = {name: table_shapes(own) for name, own in shape.items()}
        tables = to_devices(tables, session.state_shardings.tables)
        host_signals = to_devices(
            np.zeros((session.roles.mesh.size, 3), np.int32), session.state_shardings.host_signals
        )
    total = WARM_UP + plain_steps + steps
    batches = [to_devices(session.feed.read(step), session.state_shardings.batch) for step in range(total)]
    step = compiled.executable
    if compiled.common:  # what a bucket that overflows costs here is the same: the step computes, and keeps nothing
        halted = to_devices(np.zeros((), np.bool_), session.state_shardings.replicated)

        def step(state, batch, tables, host_signals):
            return compiled.executable(state, halted, batch, tables, host_signals)

    seconds = []
    for place, batch in enumerate(batches[: WARM_UP + plain_steps]):
        started = time.perf_counter()
        state, metrics = step(state, batch, tables, host_signals)
        jax.block_until_ready((state, metrics))
        if place >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    # XLA then launches each kernel by itself, where it would launch command buffers of many: such a step takes longer
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its events would fill the trace, which holds a million
    with jax.profiler.trace(str(folder), profiler_options=options):
        for batch in batches[WARM_UP + plain_steps :]:
            state, metrics = step(state, batch, tables, host_signals)
        jax.block_until_ready((state, metrics))
    return statistics.median(seconds) if seconds else None


def read_spans(folder: Path, module: str) -> Spans:
    """Return every span of a program in the newest trace below a folder.

    On a GPU the kernels stand on threads named 'Stream #...'; other threads of the device repeat them joined, and are
    left out. `hlo_op` names the instruction, behind those that it runs inside of, joined by '::'.
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
    spans: Spans = defaultdict(list)
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
            spans[device].append((name, begin, begin + event.get("dur", 0.0) * 1e-6))
    if not spans:
        raise UserError(f"the trace in {folder} has no execution of {module}; was another program running?")
    return spans
