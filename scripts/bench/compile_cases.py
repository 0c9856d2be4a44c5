"""Training steps compiled ahead of time for GPUs, with replicas of experts in a ring: for benchmarks of the compiler.

Inputs: config files, bindings, a target, and how many replicas each device holds. Outputs: the compiled programs and
their reports. Needs the CUDA wheels of this jax in the environment, and no GPU.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from moe_jax.analysis import compile_ahead
from moe_jax.analysis.program_report import build_report
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import Model, play, scheduler_profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One step.

    Attributes:
      files, bindings: of the config; target: DEVICE:NODESxDEVICES; tokens: of a device.
      replicas: on each device in each layer, of one expert of each of the next devices; 0 is expert parallelism.
      by_node: in which form they travel.
      options: for the compiler, beside training's.
      overflow: with the branch of later passes; without it buckets of as many rows drop what does not fit.
    """

    files: tuple[str, ...]
    bindings: tuple[str, ...]
    target: str
    tokens: int
    replicas: int
    by_node: bool = False
    options: tuple[tuple[str, str], ...] = ()
    overflow: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a case.

    Attributes:
      guided: whether the compiler's scheduler was given modelled seconds.
      program: as built; text: the scheduled program; report: of it; memory: bytes per device by kind.
      lower_seconds, compile_seconds: of this compilation alone; a guided one comes after an unguided one.
    """

    guided: bool
    program: Any
    text: str
    report: dict
    memory: dict[str, int]
    lower_seconds: float
    compile_seconds: float


def compile_case(case: Case, guided: bool) -> list[Outcome]:
    """Compile one step as the compiler schedules it by itself, and then, if asked for, guided; model each program."""
    from moe_jax.config import parse_run_config
    from moe_jax.training.compiling import compile_with_profile
    from moe_jax.training.program import build_program

    target = parse_target(case.target)
    config, _, _ = parse_run_config(list(case.files), list(case.bindings))
    devices = target.nodes * target.per_node
    sequences = devices * case.tokens // config.data.sequence_length
    train = dataclasses.replace(config.train, batch_size=sequences)
    config = compile_ahead.on_target(dataclasses.replace(config, train=train), target)
    if not case.overflow:
        moe = config.moe
        groups = moe.num_experts // devices + case.replicas
        factor = moe.bucket_slack * moe.num_experts / (devices * groups)
        config = dataclasses.replace(config, moe=dataclasses.replace(moe, capacity_factor=factor))
    program = build_program(config, compile_ahead.described_devices(target))
    options = {"xla_gpu_autotune_level": "0", **program.compiler_options(), **dict(case.options)}
    started = time.monotonic()
    lowered = program.lower_train_step(ring_replicas(program, case.replicas, case.by_node))
    lower_seconds = round(time.monotonic() - started, 1)
    found: list[Outcome] = []
    for _ in range(1 + guided):
        started = time.monotonic()
        if found:
            profile = scheduler_profile(parse_module(found[0].text), target)
            executable = compile_with_profile(lowered, options, profile)
        else:
            executable = lowered.compile(compiler_options=options)
        seconds, text = round(time.monotonic() - started, 1), executable.as_text()
        timeline = play(parse_module(text), target, Model())
        found.append(
            Outcome(
                guided=bool(found),
                program=program,
                text=text,
                report=build_report(timeline, target, Model()),
                memory=compile_ahead.memory_of(executable),
                lower_seconds=lower_seconds,
                compile_seconds=seconds,
            )
        )
    return found


def ring_replicas(program, replicas: int, by_node: bool):
    """Return the shape of a placement in which each device has replicas of one expert of each next neighbour."""
    from moe_jax.planning.plan_shape import build_shape
    from moe_jax.training.plan_cost import initial_placement

    even = initial_placement(program.config, program.roles)
    if not replicas:
        return build_shape(even)
    devices, held, layers = even.devices, even.experts // even.devices, even.layers
    rows = [
        (layer, (device + shift) % devices * held, device)
        for layer in range(layers)
        for device in range(devices)
        for shift in range(1, replicas + 1)
    ]
    return build_shape(even.replace(replicas=np.array(sorted(rows), np.int32)), by_node=by_node)
