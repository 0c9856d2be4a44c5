"""How programs are compiled: options, the compilation cache, the same program on all processes, a guided scheduler.

Inputs: lowered programs and the devices they run on. Outputs: executables, the same on every process of a job.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import logging
import os
import re
import stat
import threading

import jax
from jax._src import compilation_cache, distributed  # neither cache nor coordination service has a public name

from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import Target, device_named, read_device, target_names
from moe_jax.cluster.timeline import scheduler_profile
from moe_jax.data.user_cache import user_cache_folder, write_cached
from moe_jax.errors import HostLostError, UserError
from moe_jax.jobs.start import ALONE

_LOG = logging.getLogger(__name__)

# Kernels that give the same bits every time, or an error where there is none.
DETERMINISTIC = {"xla_gpu_deterministic_ops": "True"}
# Experts that are split over `data` travel between nodes while rows travel inside them: by default one collective is in
# flight at a time, and reduce-scatters of several layers are joined, which then wait for the last of them.
AT_ONCE = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "1000000",
}


# XLA's scheduler reckons with 95% of what four fifths of a GPU's memory leave beside a program's inputs. A program that
# needs more gets its collectives one after the other, with nothing next to them: of a state of 44 GB on an H100 with
# room for 76 all overlap was lost. So it is told what jax takes.
def compiler_options(
    device, processes: int = 1, deterministic: bool = False, at_once: bool = False, held: int = 0
) -> dict[str, str]:
    """Return {option: text} for devices like this one, real or described, in a job of so many processes; {} for CPUs.

    Args:
      deterministic: the same program must give the same bits every time.
      at_once: experts travel next to rows.
      held: bytes of the program's inputs, beside which XLA's scheduler may reckon with all the memory that jax takes.
    """
    if device.platform not in ("gpu", "cuda"):
        return {}
    asked = (ALONE, processes > 1), (DETERMINISTIC, deterministic), (AT_ONCE, at_once)
    options = {name: value for options, wanted in asked if wanted for name, value in options.items()}
    if (name := device_named(device.device_kind)) is not None:
        target = read_device(name)
        free = 0.8 * target.whole_memory - held
        percent = 0 if free <= 0 else round(95 * (target.usable_memory - held) / free)
        if percent > 95:
            options["xla_gpu_memory_limit_slop_factor"] = str(percent)
    return options


# jax's persistent cache is on by default on GPUs, in the user's own folder: jax runs what its files hold, so no other
# user may write to it. XLA's cache of kernel timings comes with it, so the same programs start again with the same
# kernels. On CPUs it is off: a program that was compiled for another CPU's instructions may fail when it is loaded.
# Of several processes process 0 alone writes and all read.
def set_up_compilation_cache(folder: str | None, platform: str | None = None) -> str | None:
    """Switch jax's persistent compilation cache on or off, before anything is compiled; return its folder, or None.

    A named folder that other users may write to is not used, which is logged.

    Args:
      folder: to keep programs in; '' for none; None for JAX_COMPILATION_CACHE_DIR where that is set, else the user's
        cache folder on GPUs, else none.
      platform: None asks jax.

    Raises:
      UserError: the named folder cannot be made; the user's cache folder is a link, or belongs to another user.
    """
    platform = platform or jax.default_backend()
    if folder is None:
        folder = jax.config.jax_compilation_cache_dir
        if not folder and platform not in ("gpu", "cuda"):
            return None
        folder = folder or str(user_cache_folder("compilation"))
    elif folder and "://" not in folder:  # jax also takes gs://
        folder = os.path.abspath(os.path.expanduser(folder))
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--compilation_cache={folder} cannot be made ({error.strerror or error}); name another folder, or '' "
                "for none"
            ) from error
    alone = jax.config.jax_enable_compilation_cache and jax.process_count() == 1
    if folder and platform == "cpu" and not alone:
        _LOG.warning(
            "compilation cache %s is not used with --host_devices, or with several processes on CPUs: with several CPU "
            "devices a program from it hangs between two collectives (jax 0.10.2)",
            folder,
        )
        folder = ""
    if folder and os.path.isdir(folder):
        status = os.stat(folder)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            _LOG.warning("programs are not kept: other users may write to %r, and what lies there is run", folder)
            folder = ""
    if not folder:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
    return folder


WAIT_SECONDS = 3600  # for process 0's compilation; the watch ends a job that lost process 0
_turns: collections.Counter = collections.Counter()  # how often this process has asked for a program
_lock = threading.Lock()


# On GPUs the compiler times candidate kernels and keeps the fastest, each process for itself (`jobs/hosts.py`: ALONE).
# Noise decides between equals, and two processes may get two programs: other fusions, so another order of collectives
# in the schedule, and NCCL would wait for ever. So all compare what they have compiled before they run it.
def compile_for_all(
    lowered: jax.stages.Lowered, options: dict[str, str], target: Target | None, buckets: tuple = ()
) -> jax.stages.Compiled:
    """Return the executable of `compile_guided`; of several processes all have the same, by process 0's profile.

    Args:
      lowered: equal on all processes.

    Raises:
      UserError, RuntimeError: it cannot be compiled, here or on process 0.
      HostLostError: this process has compiled another program than process 0, or process 0 none in an hour.
    """
    client, index = distributed.global_state.client, jax.process_index()
    if client is None or jax.process_count() == 1:
        return compile_guided(lowered, options, target, buckets)[0]
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    with _lock:
        key = f"moe_jax/program/{digest}/{_turns[digest]}"
        _turns[digest] += 1
    told = {"profile": "", "program": "", "error": ""}
    if index:
        try:
            told = json.loads(client.blocking_key_value_get(key, 1000 * WAIT_SECONDS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise HostLostError(f"process 0 has compiled no program in {WAIT_SECONDS} s; see its log") from error
            raise
        if told["error"]:
            raise RuntimeError(f"process 0 could not compile this program: {told['error']}")
        compiled, _ = compile_guided(lowered, options, target, buckets, told["profile"])
        if program_digest(compiled) != told["program"]:
            raise HostLostError(
                f"process {index} has compiled another program than process 0, so the two cannot run together; all "
                "hosts of a job should have equal devices, drivers and jax, and XLA_FLAGS=--xla_gpu_autotune_level=0 "
                "takes kernels without timing them"
            )
        return compiled
    try:
        compiled, told["profile"] = compile_guided(lowered, options, target, buckets)
        told["program"] = program_digest(compiled)
        return compiled
    except Exception as error:
        told["error"] = (str(error).splitlines() or [type(error).__name__])[0]
        raise
    finally:
        client.key_value_set(key, json.dumps(told))


def program_digest(compiled: jax.stages.Compiled) -> str:
    """Return a hash of an optimised program, without the names of source files, which may lie elsewhere."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    return hashlib.sha256(text.encode()).hexdigest()


PROFILE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"


def find_target(devices, per_node: int) -> Target | None:
    """Return the target that these devices are, real or described, `per_node` on a node; None of CPUs.

    Raises:
      UserError: a GPU whose rates are not known.
    """
    if devices[0].platform not in ("gpu", "cuda"):
        return None
    name = device_named(devices[0].device_kind)
    if name is None:
        kind, known = devices[0].device_kind, ", ".join(target_names())
        raise UserError(
            f"train.guide_scheduler (True) needs the rates of {kind!r}, which are not known here ({known} are); set it "
            "to False"
        )
    nodes = -(-len(devices) // per_node)
    return dataclasses.replace(read_device(name), nodes=nodes, per_node=min(per_node, len(devices)))


def compile_guided(
    lowered: jax.stages.Lowered,
    options: dict[str, str],
    target: Target | None,
    buckets: tuple = (),
    profile: str | None = None,
) -> tuple[jax.stages.Compiled, str]:
    """Return (executable, profile): with a target the scheduler gets its modelled seconds as a profile, else ''.

    The profile is a file of the user's cache folder, named after its content, and stays: its name is an option of the
    compilation, and JAX's compilation cache would not find the program under another one.

    Args:
      buckets: as of `parse_module`.
      profile: None for that of the program as compiled without one, which is compiled first; '' for none.

    Raises:
      UserError: the folder is a link or belongs to another user, or takes no more.
    """
    if profile is None:
        executable = lowered.compile(options)
        if target is None:
            return executable, ""
        profile = scheduler_profile(parse_module(executable.as_text(), buckets), Prices(target))
    if profile:
        path = user_cache_folder("profiles") / f"{hashlib.sha256(profile.encode()).hexdigest()[:32]}.pbtxt"
        if path.is_symlink() or not path.is_file() or path.read_text(encoding="utf-8") != profile:
            write_cached(path, profile)
        options = {**options, PROFILE_OPTION: str(path)}
    return lowered.compile(options), profile


def memory_counts(devices, name: str) -> list[int]:
    """Return a count of bytes of each of these devices, 'peak_bytes_in_use' or 'bytes_limit'; none of CPUs."""
    return [int(stats[name]) for device in devices if name in (stats := device.memory_stats() or {})]


def compiled_peak(executable) -> int | None:
    """Return the most bytes that a program needs on one device, as the compiler counts them."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return None
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + outputs)
