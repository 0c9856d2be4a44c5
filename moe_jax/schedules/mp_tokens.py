"""Between the tokens as a model-parallel (MP) group hands them over, and as a schedule wants them.

Enters and leaves: x, either equal copies [t, M] on all devices of the group, or, with `ScheduleOptions.split_tokens`,
this device's part [t / N_MP, M] (sequence parallelism). A schedule that works on parts (s1, pairwise, ring) takes split
tokens as they are, and needs neither its split nor its last all-gather; one that works on all of them (s2, deepspeed)
gathers at its door and keeps its own part of the result. That gather's gradient is a slice and the slice's a gather, so
the backward moves as much as the forward.
"""

from __future__ import annotations

from moe_jax.collectives.copies import join_parts, own_part
from moe_jax.mesh.roles import Roles
from moe_jax.schedules.base import ScheduleOptions


def to_parts(x, roles: Roles, options: ScheduleOptions):
    """Return this device's part [t / N_MP, M] of what entered."""
    return x if options.split_tokens else own_part(x, roles.model)


def from_parts(y, roles: Roles, options: ScheduleOptions):
    """Return what leaves, from this device's part [t / N_MP, M]."""
    return y if options.split_tokens else join_parts(y, roles.model)


def to_copies(x, roles: Roles, options: ScheduleOptions):
    """Return all t tokens [t, M], equal on the group, of what entered."""
    return join_parts(x, roles.model) if options.split_tokens else x


def from_copies(y, roles: Roles, options: ScheduleOptions):
    """Return what leaves, from all t tokens [t, M], equal on the group."""
    return own_part(y, roles.model) if options.split_tokens else y
