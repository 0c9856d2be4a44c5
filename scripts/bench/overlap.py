"""Replicas of experts as the GPU compiler schedules the real step: what is overlapped, and what memory they take.

    python scripts/bench/overlap.py --gin_file=configs/model/hecate_gpt_moe_s.gin --target=h200:4x8 --target=h200:1x8

needs the CUDA wheels of this jax in the environment, and no GPU. Every device has replicas of one expert of each of its
next --replicas neighbours, in every layer: all offer one expert and all links are alike. One row for each target,
schedule and guidance of the scheduler, modelled from the program (`python -m moe_jax.inspect` says how): of the bytes
of Trans and Agg in the loops over layers, the steady state, those that have a kernel, and a matmul, between start and
done; modelled milliseconds and the share of them that is exposed, of all and in the loops; the same for the
all-to-alls; the arguments of the step (parameters and optimizer state) and its temporaries, GB a device; and memory
over EP: arguments, and what the temporaries have above those of `expert parallel`, over its arguments. Ceiling: 100% of
the bytes, 0% exposed. `flexmoe` is not compiled but computed, as its authors run it: standing replicas, each with
parameters, two moments and gradients in float32. Hecate's figure 13 has +64% without re-materialization, +11.6% with
it, and 83% more than Hecate for FlexMoE; it does not say how many replicas. The last line is one JSON object, which
--out keeps; programs are written next to it.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import pathlib
import time

import numpy as np
from absl import app, flags

SCHEDULES = {
    "expert parallel": (),
    "none": (),
    "hecate, kept": ("ModelConfig.prefetch = 'hecate'",),
    "hecate": ("ModelConfig.prefetch = 'hecate'", "ModelConfig.refetch_replicas = True"),
    "pro_prophet": ("ModelConfig.prefetch = 'pro_prophet'", "ModelConfig.refetch_replicas = True"),
    "flexmoe": (),
}
_GIN_FILES = flags.DEFINE_multi_string("gin_file", [], "Config file; may repeat.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding; may repeat.")
_TARGETS = flags.DEFINE_multi_string("target", ["h200:4x8"], "DEVICE:NODESxDEVICES; may repeat.")
_SCHEDULES = flags.DEFINE_multi_enum("schedule", list(SCHEDULES), list(SCHEDULES), "What is compiled; may repeat.")
_GUIDED = flags.DEFINE_bool("guided", True, "Compile again, the scheduler given modelled seconds.")
_OVERFLOW = flags.DEFINE_bool("overflow", True, "With the branch of later passes; else buckets of as many rows drop.")
_TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens of a device.")
_REPLICAS = flags.DEFINE_integer("replicas", 2, "Replicas on each device in each layer.")
_BY_NODE = flags.DEFINE_bool("by_node", False, "Whether replicas travel node by node.")
_OPTIONS = flags.DEFINE_multi_string("compiler_option", [], "Option for the compiler, NAME=VALUE; may repeat.")
_OUT = flags.DEFINE_string("out", "", "JSON file.")
ROW = "{:10} {:16} {:>6} | {:>7} {:>7} {:>8} {:>8} {:>8} | {:>8} {:>8} | {:>7} {:>6} {:>6} {:>7} {:>5}"


def ring_replicas(program, replicas: int):
    """Return the shape of a placement in which each device has replicas of one expert of each next neighbour."""
    from moe_jax.planning.plan_shape import build_shape
    from moe_jax.training.segments import initial_placement

    even = initial_placement(program.config, program.roles)
    if not replicas:
        return build_shape(even)
    devices, held = even.devices, even.experts // even.devices
    rows = [
        (layer, (device + shift) % devices * held, device)
        for layer, device, shift in itertools.product(range(even.layers), range(devices), range(1, replicas + 1))
    ]
    return build_shape(even.replace(replicas=np.array(sorted(rows), np.int32)), by_node=_BY_NODE.value)


def compile_case(name: str, schedule: str):
    """Yield (guided, record of the report, program's text) of a step: as the compiler schedules it, then guided."""
    from moe_jax.analysis import compile_ahead
    from moe_jax.analysis.program_report import build_report
    from moe_jax.cluster.hlo import parse_module
    from moe_jax.cluster.prices import Prices
    from moe_jax.cluster.targets import parse_target
    from moe_jax.cluster.timeline import play, scheduler_profile
    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.training.compiling import compile_with_profile
    from moe_jax.training.program import build_program

    target = parse_target(name)
    config = parse_run_config(_GIN_FILES.value, [*SCHEDULES[schedule], *_GIN_BINDINGS.value])[0]
    devices = target.nodes * target.per_node
    replicas = 0 if schedule == "expert parallel" else _REPLICAS.value
    train = dataclasses.replace(config.train, batch_size=devices * _TOKENS.value // config.data.sequence_length)
    config = compile_ahead.on_target(dataclasses.replace(config, train=train), target)
    if not _OVERFLOW.value:
        moe = config.moe
        groups = moe.num_experts // devices + replicas
        factor = moe.bucket_slack * moe.num_experts / (devices * groups)
        config = dataclasses.replace(config, moe=dataclasses.replace(moe, capacity_factor=factor))
    program = build_program(config, compile_ahead.described_devices(target))
    options = dict(text.split("=", 1) for text in _OPTIONS.value)
    options = {"xla_gpu_autotune_level": "0", **program.compiler_options(), **options}
    started, text, prices = time.monotonic(), None, Prices(target)
    lowered = program.trace_step({"segment_0": ring_replicas(program, replicas)}).lower()
    for guided in range(1 + _GUIDED.value):
        if guided:
            executable = compile_with_profile(lowered, options, scheduler_profile(parse_module(text), prices))
        else:
            executable = lowered.compile(compiler_options=options)
        text = executable.as_text()
        report = build_report(play(parse_module(text), prices), prices)
        yield (
            bool(guided),
            text,
            {
                "compile_seconds": time.monotonic() - started,
                "memory": compile_ahead.memory_of(executable),
                "step": report["step"],
                "all": {found["role"]: found for found in report["totals"]["by_role"]},
                "loops": {found["role"]: found for found in report["in_loops"]["by_role"]},
            },
        )


def row(record: dict) -> str:
    """Return a case as one line of the table."""

    def moved(rows):  # sums of Trans and Agg
        both = [rows[role] for role in ("Trans", "Agg") if role in rows]
        return {name: sum(r[name] for r in both) for name in both[0] if name != "role"} if both else {}

    def share(rows, name, of):
        return f"{rows[name] / rows[of]:.1%}" if rows and rows[of] else "-"

    both, loops, tokens = moved(record["all"]), moved(record["loops"]), record["all"].get("all-to-all")
    return ROW.format(
        record["target"],
        record["schedule"],
        "yes" if record["guided"] else "no",
        share(loops, "bytes_overlapping_kernels", "bytes"),
        share(loops, "bytes_overlapping_matmuls", "bytes"),
        f"{1e3 * both['seconds']:.2f}" if both else "-",
        share(both, "exposed_seconds", "seconds"),
        share(loops, "exposed_seconds", "seconds"),
        f"{1e3 * tokens['seconds']:.1f}" if tokens else "-",
        f"{1e3 * tokens['exposed_seconds']:.1f}" if tokens else "-",
        f"{1e3 * record['step']['modelled_seconds']:.1f}",
        f"{record['memory']['arguments'] / 1e9:.2f}",
        f"{record['memory']['temporaries'] / 1e9:.2f}",
        f"{record['memory_over_ep']:.3f}" if record["memory_over_ep"] else "-",
        f"{record['compile_seconds']:.0f}",
    )


def main(_):
    from moe_jax.config.gin_files import parse_run_config

    print(ROW.format("target", "schedule", "guided", "kernel", "matmul", "ms", "exposed", "loops", "a2a ms", "exposed",
                     "step ms", "args", "temp", "over EP", "s"))  # fmt: skip
    records, plain = [], {}
    for target, schedule in itertools.product(_TARGETS.value, _SCHEDULES.value):
        if schedule == "flexmoe":
            if target in plain:
                # standing replicas: parameters, two moments and gradients of each, in the master dtype
                model = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value)[0].model
                matrices, itemsize = (3 if model.activation == "swiglu" else 2), (8 if model.dtype == "float64" else 4)
                expert = 4 * itemsize * matrices * model.model_dim * model.hidden_dim
                ratio = 1 + expert * _REPLICAS.value * model.moe_layers / plain[target]["arguments"]
                print(f"{target:10} {schedule:16} computed: memory over EP {ratio:.3f}")
                records.append({"target": target, "schedule": schedule, "memory_over_ep": ratio})
            continue
        for guided, text, found in compile_case(target, schedule):
            memory = found["memory"]
            if schedule == "expert parallel":
                plain[target] = memory
            ratio = None
            if base := plain.get(target):
                ratio = (memory["arguments"] + memory["temporaries"] - base["temporaries"]) / base["arguments"]
            records.append({"target": target, "schedule": schedule, "guided": guided, **found, "memory_over_ep": ratio})
            print(row(records[-1]), flush=True)
            if _OUT.value:
                path = pathlib.Path(_OUT.value)
                path.write_text(json.dumps(records) + "\n", encoding="utf-8")
                name = f"{path.stem}-{target}-{schedule}-{'guided' if guided else 'plain'}.hlo.gz".replace(" ", "_")
                (path.parent / name).write_bytes(gzip.compress(text.encode()))
    print(json.dumps(records))


if __name__ == "__main__":
    app.run(main)
