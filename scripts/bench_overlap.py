"""What of Trans and Agg a block-wise schedule hides, as the GPU compiler schedules the real training step.

    JAX_PLATFORMS=cpu python scripts/bench_overlap.py --gin_file=configs/model/hecate_gpt_moe_s.gin \\
        --gin_bindings="ModelConfig.attention = 'cudnn'" --gin_bindings="ModelConfig.prefetch = 'hecate'" \\
        --target=h200:4x8 --tokens=16384 --guests=2

needs the CUDA wheels of this jax in the environment, and no GPU. Every device has copies of one expert of each of its
next --guests neighbours, in every layer: as many full rounds of one expert each, with all links alike. What is printed
is modelled from the compiled program (`python -m moe_jax.inspect` says how): bytes of each transfer, how many have a
kernel, and a matmul, between start and done, modelled seconds, and those that somebody waits for. The ceiling is 100%
of the bytes and 0 s. 'in loops' is the steady state. The last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from moe_jax import compile_ahead, inspection

_GIN_FILES = flags.DEFINE_multi_string("gin_file", [], "Config file; may repeat.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding; may repeat.")
_TARGET = flags.DEFINE_string("target", "h200:4x8", "DEVICE:NODESxDEVICES.")
_TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens of a device.")
_GUESTS = flags.DEFINE_integer("guests", 2, "Copies on each device in each layer; 0 is plain expert parallelism.")
_METHOD = flags.DEFINE_string("method", "shift", "How they travel.")
_OPTIONS = flags.DEFINE_multi_string("compiler_option", [], "Option for the compiler, NAME=VALUE; may repeat.")


def ring_copies(program, guests: int):
    """Return the skeleton of a placement in which each device copies an expert of each of its next neighbours."""
    from moe_jax.placement import build_skeleton
    from moe_jax.training.planning import initial_placement

    even = initial_placement(program)
    if not guests:
        return build_skeleton(even, method="none")
    devices, held = even.devices, program.config.moe.num_experts // even.devices
    layers = program.config.model.moe_layers
    copies = [
        (layer, (device + shift) % devices * held, device)
        for layer in range(layers)
        for device in range(devices)
        for shift in range(1, guests + 1)
    ]
    return build_skeleton(even.replace(copies=np.array(sorted(copies), np.int32)), method=_METHOD.value)


def main(argv: list[str]) -> None:
    from moe_jax.config import parse_run_config
    from moe_jax.training.program import build_program

    target = inspection.parse_target(_TARGET.value)
    config, _, _ = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value)
    devices = target.nodes * target.per_node
    sequences = devices * _TOKENS.value // config.data.sequence_length
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=sequences))
    config = compile_ahead.on_target(config, target)
    program = build_program(config, compile_ahead.described_devices(target))
    skeleton = ring_copies(program, _GUESTS.value)
    options = {**program.compiler_options(), **dict(text.split("=", 1) for text in _OPTIONS.value)}
    started = time.monotonic()
    lowered = program.lower_train_step(skeleton)
    lowered_at = time.monotonic()
    executable = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0", **options})
    compiled_at = time.monotonic()
    timeline = inspection.play(inspection.parse_module(executable.as_text()), target, inspection.Model())
    report = inspection.build_report(timeline, target, inspection.Model())
    record = {
        "target": _TARGET.value,
        "bindings": _GIN_BINDINGS.value,
        "guests": _GUESTS.value,
        "options": options,
        "lower_seconds": round(lowered_at - started, 1),
        "compile_seconds": round(compiled_at - lowered_at, 1),
        "memory": compile_ahead.memory_of(executable),
        "step_seconds": report["step"]["modelled_seconds"],
        "step_exposed_seconds": report["step"]["exposed_seconds"],
        "all": chosen(report["totals"]["by_role"]),
        "in_loops": chosen(report["in_loops"]["by_role"]),
    }
    for place in ("all", "in_loops"):
        for row in record[place]:
            print(
                f"{place:8} {row['role']:10} {row['bytes'] / 1e6:9.1f} MB, beside kernels "
                f"{share(row, 'bytes_beside_kernels'):4.0%}, beside matmuls {share(row, 'bytes_beside_matmuls'):4.0%}; "
                f"{1e3 * row['seconds']:8.3f} ms, exposed {1e3 * row['exposed_seconds']:8.3f} ms"
            )
    print(json.dumps(record))


def chosen(rows: list[dict]) -> list[dict]:
    """Return the totals of Trans, Agg and the all-to-alls."""
    return [row for row in rows if row["role"] in ("Trans", "Agg", "all-to-all")]


def share(row: dict, name: str) -> float:
    """Return a part of the row's bytes."""
    return row[name] / row["bytes"] if row["bytes"] else 1.0


if __name__ == "__main__":
    compile_ahead.prepare_process()
    sys.argv[0] = "bench_overlap"
    app.run(main)
