"""Compile a program twice, the second time with modelled seconds for the compiler's scheduler.

Inputs: a lowered program, options, and the target whose rates the model takes. Outputs: the executable. XLA's
latency-hiding scheduler assumes that every fusion takes equally long, so it overlaps a transfer with five small kernels
and none of the large ones; docs/bench/overlap.md has programs with and without guidance. What it needs is in the first
program: the same instructions, read and timed by `moe_jax.inspection`. In a job of several processes one compiles for
all (`shared_program.py`): two schedules of one program would order its collectives differently and hang.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import tempfile
from collections.abc import Sequence

import jax

from moe_jax import inspection
from moe_jax.errors import UserError
from moe_jax.training.compiler_options import compiled
from moe_jax.training.shared_program import compile_for_all
from moe_jax.user_cache import read_cached, user_cache_folder, write_cached

_LOG = logging.getLogger(__name__)
PROFILE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
# The share of a program's modelled seconds above which unmatched instructions are logged; nearly all are unmatched
# where a profile is of another program. A transfer that the first compilation made synchronous does not keep the name
# that the scheduler knows it by, so the compiler uses its own estimate for it: 11% of the seconds of a tiny model on
# a100:2x2 with jax 0.11.2.
UNGUIDED_LIMIT = 0.5


def find_target(devices, per_node: int) -> inspection.Target | None:
    """Return the target that these devices are, None where the scheduler cannot be guided; a GPU's reason is logged.

    Args:
      devices: of the mesh, real or described.
      per_node: of one node.
    """
    if devices[0].platform not in ("gpu", "cuda"):
        return None
    name = inspection.device_named(devices[0].device_kind)
    if name is None:
        _say_unguided(devices[0].device_kind)
        return None
    nodes = -(-len(devices) // per_node)
    return dataclasses.replace(inspection.read_device(name), nodes=nodes, per_node=min(per_node, len(devices)))


@functools.cache
def _say_unguided(kind: str) -> None:
    _LOG.warning(
        "train.guide_scheduler and ModelConfig.overlap = 'auto' have no effect on %r, whose rates are not known here "
        "(%s are); the compiler schedules by its own estimates",
        kind,
        ", ".join(inspection.target_names()),
    )


def compile_guided(
    lowered: jax.stages.Lowered, options: dict[str, str], target: inspection.Target | None, devices: Sequence = ()
) -> jax.stages.Compiled:
    """Return the executable of a lowered program; with a target the scheduler gets its modelled seconds.

    Args:
      devices: of the program's mesh, where it is to run: if they are GPUs, process 0 compiles for all processes.

    Raises:
      UserError, RuntimeError, HostLostError: see `compile_for_all`.
    """

    def first() -> tuple[jax.stages.Compiled, str]:
        if target is None:
            return compiled(lowered, options), ""
        profile = profile_of(compiled(lowered, options), target)
        executable = compile_with_profile(lowered, options, profile)
        say_if_not_taken_up(inspection.parse_module(executable.as_text()), target, profile)
        return executable, profile

    def again(profile: str) -> jax.stages.Compiled:
        return compile_with_profile(lowered, options, profile) if profile else compiled(lowered, options)

    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return first()[0]
    return compile_for_all(lowered, first, again, devices)


def say_if_not_taken_up(module: inspection.Module, target: inspection.Target, profile: str) -> None:
    """Log if the compiler could not match a profile to its program; the compiler logs that in C++ only.

    Args:
      module: the program as compiled with the profile.
    """
    share = inspection.unguided_share(module, target, profile)
    if share > UNGUIDED_LIMIT:
        _LOG.warning(
            "train.guide_scheduler (True) had little effect on %s: the profile names instructions of %.0f%% of its "
            "modelled seconds, and the compiler scheduled the rest by its own estimates",
            module.name,
            100 * (1 - share),
        )


def profile_of(executable: jax.stages.Compiled, target: inspection.Target) -> str:
    """Return the scheduler's profile of a program, from the program as compiled without one."""
    return inspection.scheduler_profile(inspection.parse_module(executable.as_text()), target)


def compile_with_profile(lowered: jax.stages.Lowered, options: dict[str, str], profile: str) -> jax.stages.Compiled:
    """Compile a lowered program with a profile for the scheduler.

    The profile is a file of the user's cache folder, named after its content, and stays: its name is an option of the
    compilation, and JAX's compilation cache would not find the program under another one. Where the folder takes no
    more (a quota, a disk that is full or mounted to be read only), a file for this compilation does.

    Raises:
      UserError: the folder is a link or belongs to another user, or no file can be written at all.
    """
    path = user_cache_folder("profiles") / f"{hashlib.sha256(profile.encode()).hexdigest()[:32]}.pbtxt"
    try:
        if read_cached(path) != profile.encode():
            write_cached(path, profile)
    except UserError as error:
        return _compile_with_passing_file(lowered, options, profile, error)
    return compiled(lowered, {**options, PROFILE_OPTION: str(path)})


def _compile_with_passing_file(
    lowered: jax.stages.Lowered, options: dict[str, str], profile: str, reason: UserError
) -> jax.stages.Compiled:
    try:
        with tempfile.NamedTemporaryFile("w", prefix="moe_jax_", suffix=".pbtxt") as file:
            file.write(profile)
            file.flush()
            _LOG.warning("the scheduler's profile is kept for this compilation only: %s", reason)
            return compiled(lowered, {**options, PROFILE_OPTION: file.name})
    except OSError:
        raise reason from None
