"""Item 3: `inspect --profile` of the whole model's step, instruction by instruction, and the constants that fit."""

from __future__ import annotations

import gzip
import json

from gpu_day_items import configs, whole
from gpu_day_items.context import NotHere


def measure(context):
    """Compile the step of item 2 (from the cache, where that ran), record a trace, put it next to the model."""
    import jax

    from moe_jax.analysis import compile_ahead
    from moe_jax.analysis.measured import add_measured, read_spans, record_steps
    from moe_jax.analysis.program_report import ASSUMED, build_report
    from moe_jax.cluster.hlo import parse_module
    from moe_jax.cluster.prices import Prices
    from moe_jax.cluster.timeline import play

    choice = context.scratch / whole.CHOICE
    grouped_matmul = json.loads(choice.read_text(encoding="utf-8")) if choice.exists() else "auto"
    config, devices = whole.config_of(context, grouped_matmul), jax.devices()[:1]
    target, known = configs.target_here()
    if target is None:
        raise NotHere(f"the rates of {devices[0].device_kind} are not known; add moe_jax/cluster/devices/NAME.txt")
    config = compile_ahead.on_target(config, target)
    compiled = compile_ahead.compile_step(config, devices, skew=1.0, options={}, real=True)
    prices, module = Prices(target), parse_module(compiled.text, compiled.buckets)
    report = build_report(play(module, prices), prices, {"memory": compiled.memory})
    folder, steps = context.scratch / "profile", context.of_size(3, 2)
    seconds = record_steps(config, devices, compiled, folder, steps, 2 * steps)
    spans = read_spans(folder, module.name)
    report = add_measured(report, module, prices, spans, steps, seconds)
    measured, assumed = report["instructions"], ASSUMED if report["assumed_turns"] else ""
    # for the day's folder: a machine without a GPU can read report, schedule and trace again
    keep = context.scratch / "keep"
    keep.mkdir(exist_ok=True)
    (keep / "profile_report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (keep / "profile_schedule.hlo.gz").write_bytes(
        gzip.compress(compile_ahead.without_places(compiled.text).encode(), mtime=0)
    )
    for trace in folder.rglob("*.trace.json.gz"):
        (keep / "profile_trace.json.gz").write_bytes(trace.read_bytes())
    context.record(
        grouped_matmul=grouped_matmul,
        modelled_seconds=report["step"]["modelled_seconds"],
        rates_are_of_this_device=known,
        instructions=measured,
        constants=measured["constants"],
    )
    context.row(
        "step",
        f"{measured['step_seconds'] * 1e3:.1f} ms measured without the profiler, {measured['busy_seconds'] * 1e3:.1f} "
        f"ms of kernels, {report['step']['modelled_seconds'] * 1e3:.1f} ms modelled, {measured['launches']} launches"
        f"{assumed}",
    )
    for group in measured["groups"]:
        ratio = "-" if group["ratio"] is None else f"{group['ratio']:.2f}"
        context.row(
            group["group"],
            f"{group['measured_seconds'] * 1e3:.2f} ms measured, {group['modelled_seconds'] * 1e3:.2f} modelled: "
            f"{ratio} ({group['executions']} runs){assumed}",
        )
    for row in measured["worst"][: context.of_size(20, 5)]:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        context.row(
            f"{row['name']} {row['scope']}",
            f"{row['measured_seconds'] * 1e3:.3f} ms measured, {row['modelled_seconds'] * 1e3:.3f} modelled: {ratio}"
            f"{assumed}",
        )
    for name, fit in measured["fit"].items():
        fitted = f"fitted {fit['value']:.4g} ({fit['samples']} samples)"
        context.row(f"constant {name}", f"{fit['before']:.4g} before; {fitted}")
