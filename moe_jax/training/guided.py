"""Compile a program twice, the second time with modelled seconds for the compiler's scheduler.

Enters: a lowered program, options, and the target whose rates the model takes. Leaves: the executable. XLA's
latency-hiding scheduler takes every fusion for equally long, so it fills a transfer with five small kernels and leaves
the large ones beside nothing; docs/bench/overlap.md has the before and after. What it needs to know stands in the first
program: the same instructions, read and timed by `moe_jax.inspection`. All processes of a job take the profile of the
first one: two schedules of one program would order its collectives differently and hang.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import tempfile
import zlib
from collections.abc import Callable

import jax
from jax._src import distributed  # the coordination service has no public name

from moe_jax import inspection

_LOG = logging.getLogger(__name__)
PROFILE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
WAIT_SECONDS = 3600  # for another process' first compilation; the watchdog ends a job that lost that process


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
        "train.guide_scheduler (True) has no effect on %r, whose rates are not known here (%s are); the compiler "
        "schedules by its own estimates",
        kind,
        ", ".join(inspection.target_names()),
    )


def compile_guided(lowered: jax.stages.Lowered, options: dict[str, str], target: inspection.Target | None):
    """Return the executable of a lowered program; with a target the scheduler is told what the model says of it."""
    if target is None:
        return lowered.compile(compiler_options=options)

    def profile() -> str:
        return profile_of(lowered.compile(compiler_options=options), target)

    name = lambda: hashlib.sha256(lowered.as_text().encode()).hexdigest()  # noqa: E731
    return compile_with_profile(lowered, options, agreed(profile, name))


def profile_of(executable: jax.stages.Compiled, target: inspection.Target) -> str:
    """Return what the scheduler is to be told of a program, from the program as compiled without that."""
    return inspection.scheduler_profile(inspection.parse_module(executable.as_text()), target)


def compile_with_profile(lowered: jax.stages.Lowered, options: dict[str, str], profile: str) -> jax.stages.Compiled:
    """Compile a lowered program with a profile for the scheduler.

    The profile lies in a file of the user's temporary folder that is named after what it says, and stays: its name
    is an option of the compilation, and JAX's compilation cache would not find the program under another one.
    """
    folder = pathlib.Path(tempfile.gettempdir()) / f"moe_jax_profiles_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.sha256(profile.encode()).hexdigest()[:32]}.pbtxt"
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(profile, encoding="utf-8")
    whole.replace(path)
    return lowered.compile(compiler_options={**options, PROFILE_OPTION: str(path)})


def agreed(make: Callable[[], str], name: Callable[[], str]) -> str:
    """Return make() of process 0 on all processes of the job.

    Args:
      make: called on process 0 only.
      name: () -> what the text is called among the processes; equal on all.
    """
    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return make()
    key = f"moe_jax/profile/{name()}"
    if jax.process_index() == 0:
        text = make()
        client.key_value_set_bytes(key, zlib.compress(text.encode()), allow_overwrite=True)
        return text
    return zlib.decompress(client.blocking_key_value_get_bytes(key, 1000 * WAIT_SECONDS)).decode()
