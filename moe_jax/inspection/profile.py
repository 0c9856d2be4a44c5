"""What the compiler's scheduler should believe about time: a profile of a program, from the model of this room.

Enters: a scheduled program and its target. Leaves: the text of a profile as XLA reads it (ProfiledInstructionsProto),
for `xla_gpu_pgle_profile_file_or_directory_path` when the same program is compiled again. Left to itself the scheduler
takes every fusion for equally long and every collective for five of them; with a profile it starts a transfer as early
as its modelled seconds ask for. Measured seconds would do the same.
Names: an instruction is called what it was called when the scheduler saw it (`scheduling_name`).
"""

from __future__ import annotations

import re

from moe_jax.inspection.hlo import Instruction, Module
from moe_jax.inspection.targets import Target
from moe_jax.inspection.timeline import Model, instruction_seconds, launched_computations

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
                source = scheduling_name(computation.by_name[start])
                lines.append(f'latencies {{ source: "{source}" target: "{name}" latency_us: {1e6 * took:.3f} }}')
            else:
                lines.append(f'costs {{ name: "{name}" cost_us: {1e6 * took:.3f} }}')
    return "\n".join(lines) + "\n"


def scheduling_name(instruction: Instruction) -> str:
    """Return what the compiler called an instruction while it scheduled."""
    found = _NAME.search(instruction.attributes)
    return found.group(1) if found else instruction.name
