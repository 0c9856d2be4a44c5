"""Convert between the layout of the tokens in a model-parallel (MP) group and the layout that a schedule needs.

Input and output: x, either replicated [t, M] on all devices of the group, or, with `ScheduleOptions.split_tokens`, this
device's part [t / N_MP, M] (sequence parallelism). A schedule that works on parts (s1, pairwise, ring) takes split
tokens as they are, and needs neither its split nor its last all-gather; one that works on all of them (s2, deepspeed)
all-gathers on entry and keeps its own part of the result. That gather's gradient is a slice and the slice's a gather,
so the backward moves as much as the forward.
"""

from __future__ import annotations

from moe_jax.moe.schedules.contract import ScheduleOptions
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.replicated import join_parts, own_part


def to_parts(x, roles: Roles, options: ScheduleOptions):
    """Return this device's part [t / N_MP, M] of x."""
    return x if options.split_tokens else own_part(x, roles.model)


def from_parts(y, roles: Roles, options: ScheduleOptions):
    """Return the output, from this device's part [t / N_MP, M]."""
    return y if options.split_tokens else join_parts(y, roles.model)


def to_replicated(x, roles: Roles, options: ScheduleOptions):
    """Return all t tokens [t, M], equal on the group, of x."""
    return join_parts(x, roles.model) if options.split_tokens else x


def from_replicated(y, roles: Roles, options: ScheduleOptions):
    """Return the output, from all t tokens [t, M], equal on the group."""
    return own_part(y, roles.model) if options.split_tokens else y
