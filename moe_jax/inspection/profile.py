"""Seconds for the compiler's scheduler: a profile of a program, from the model of this package.

Inputs: a scheduled program and its target. Outputs: the text of a profile as XLA reads it (ProfiledInstructionsProto),
for `xla_gpu_pgle_profile_file_or_directory_path` when the same program is compiled again. Without a profile the
scheduler assumes that all fusions take equally long and every collective five times as long; with one it starts a
transfer as early as its modelled seconds require. Measured seconds would do the same.

Instructions have the names here that they had during scheduling (`scheduling_name`).
"""

from __future__ import annotations

import re

from moe_jax.inspection.hlo import Instruction, Module
from moe_jax.inspection.targets import Target
from moe_jax.inspection.timeline import Model, collective_kind, instruction_seconds, launched_computations

_NAME = re.compile(r'scheduling_name="([^"]*)"')


def scheduler_profile(module: Module, target: Target, model: Model | None = None) -> str:
    """Return the profile: microseconds of each instruction, and between the start and the done of each transfer."""
    lines = []
    seconds = instruction_seconds(module, target, model or Model())
    for computation in launched_computations(module):
        for instruction in computation.instructions:
            if instruction.name not in seconds:
                continue
            took, start = seconds[instruction.name]
            name = scheduling_name(instruction)
            if start:
                source = computation.by_name[start]
                lines.append(
                    f'latencies {{ source: "{scheduling_name(source)}" target: "{name}" latency_us: {1e6 * took:.3f} }}'
                )
                if not collective_kind(source, module):  # the scheduler looks up a kernel's done among the costs too
                    lines.append(f'costs {{ name: "{name}" cost_us: 0.000 }}')
            else:
                lines.append(f'costs {{ name: "{name}" cost_us: {1e6 * took:.3f} }}')
    return "\n".join(lines) + "\n"


def scheduling_name(instruction: Instruction) -> str:
    """Return the name of an instruction during scheduling."""
    found = _NAME.search(instruction.attributes)
    return found.group(1) if found else instruction.name


def unguided_share(module: Module, target: Target, profile: str, model: Model | None = None) -> float:
    """Return the share of a program's modelled seconds whose instructions a profile does not name.

    XLA matches a profile to a program by names alone and uses its own estimates where none fits: for a profile that was
    made for another program, or by a version that names instructions otherwise, this is close to 1.

    Args:
      module: the program as it was compiled with the profile.
      profile: what `scheduler_profile` returned.
    """
    named = set(re.findall(r'(?:name|target): "([^"]*)"', profile))
    total = missed = 0.0
    seconds = instruction_seconds(module, target, model or Model())
    for computation in launched_computations(module):
        for instruction in computation.instructions:
            took, start = seconds.get(instruction.name, (0.0, ""))
            if not start:
                total += took
                missed += took if scheduling_name(instruction) not in named else 0.0
    return missed / total if total else 0.0
