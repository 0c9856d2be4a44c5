"""Item 2: `training.run` of the whole model, and the step as inspect models it for this device, compiled here.

The run is that of `python -m moe_jax.train`; only its last checkpoint (22 GB) is not written, and no picture is drawn.
"""

from __future__ import annotations

import json
import statistics
from unittest import mock

from gpu_day_items import configs

STEPS, WARM_UP = 20, 5
CHOICE = "whole_choice.json"


def config_of(context, grouped_matmul: str):
    """Return the run's config."""
    steps = context.of_size(STEPS, 6)  # of item 7, whose programs are then these
    return configs.gpt_moe_s(
        context, batch=8, moe={"grouped_matmul": grouped_matmul}, steps=steps, checkpoint_every=0, loads_every=steps
    )


def train(context, grouped_matmul: str):
    """Train, then compile the same step again to read it."""
    import jax

    import moe_jax.training.run as training_run
    from moe_jax.analysis import compile_ahead
    from moe_jax.analysis.program_report import ASSUMED
    from moe_jax.cluster.hlo import parse_module
    from moe_jax.cluster.prices import Prices
    from moe_jax.cluster.timeline import play
    from moe_jax.config.run_config import config_text
    from moe_jax.jobs.hosts import Hosts
    from moe_jax.training.loop import Loop

    config = config_of(context, grouped_matmul)
    text = config_text(config)
    workdir = context.scratch / f"whole_{grouped_matmul}"
    with mock.patch.object(Loop, "save"), mock.patch.object(training_run, "report_run"):
        training_run.run(config, text, Hosts(), workdir=str(workdir))
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    resolved = json.loads((workdir / "environment.json").read_text(encoding="utf-8"))["resolved"]
    (context.scratch / CHOICE).write_text(json.dumps(grouped_matmul), encoding="utf-8")
    context.record(grouped_matmul=resolved["MoEConfig.grouped_matmul"])
    tokens = config.train.batch_size * config.data.sequence_length
    seconds = statistics.median(line["step_seconds"] for line in lines[WARM_UP:])
    flops = lines[0]["model_flops_per_second"] * lines[0]["step_seconds"]
    target, known = configs.target_here()
    mfu = flops / seconds / target.flops_bf16 if known else None
    context.record(
        steps=len(lines),
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        model_flops=flops,
        mfu=mfu,
        compile_seconds=lines[0].get("compile_seconds"),
        peak_device_bytes=lines[-1].get("peak_device_bytes"),
        losses=[line["loss"] for line in lines],
    )
    shown = "not known for this device" if mfu is None else f"{mfu:.1%}"
    context.row(
        f"{len(lines)} steps, grouped matmul {grouped_matmul!r}",
        f"{seconds * 1e3:.1f} ms a step, {tokens / seconds:,.0f} tokens/s, MFU {shown}",
    )
    context.row("loss", f"{lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}")
    if lines[-1].get("peak_device_bytes"):
        context.row("most bytes in use", f"{lines[-1]['peak_device_bytes'] / 1e9:.1f} GB")
    # what inspect says of this step, compiled on this device with the options of training
    if target is None:
        context.row("modelled step", "this device's rates are not known")
        return
    built = compile_ahead.on_target(config, target)
    compiled = compile_ahead.compile_step(built, jax.devices()[:1], skew=1.0, options={}, real=True)
    timeline = play(parse_module(compiled.text, compiled.buckets), Prices(target))
    launches = sum(row == "compute" for row, *_ in timeline.events)
    conditionals = sum(record["executions"] for record in timeline.skipped.values())
    context.record(
        modelled_seconds=timeline.seconds if known else None,
        modelled_launches=launches,
        modelled_conditionals=conditionals,
        memory=compiled.memory,
    )
    context.row(
        "modelled step" if known else f"modelled step, by the rates of {target.device_kind}",
        f"{timeline.seconds * 1e3:.1f} ms, {launches} launches, {conditionals} conditionals, "
        f"{compiled.memory.get('peak', 0) / 1e9:.1f} GB by the compiler{ASSUMED if timeline.assumed_turns else ''}",
    )
