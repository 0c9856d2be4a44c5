"""How programs are compiled: options, the compilation cache, one compilation for all processes, a guided scheduler.

Inputs: lowered programs and the devices they run on. Outputs: executables, the same on every process of a job.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import os
import tempfile
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
from jax._src import compilation_cache, distributed  # neither cache nor coordination service has a public name
from jax._src.compilation_cache_interface import CacheInterface
from jax.experimental import serialize_executable

from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import Target, device_named, read_device, target_names
from moe_jax.cluster.timeline import scheduler_profile, unguided_share
from moe_jax.data.user_cache import check_own_folder, read_cached, user_cache_folder, user_key, write_cached
from moe_jax.errors import HostLostError, UserError
from moe_jax.recovery.job_secret import seal, unseal
from moe_jax.recovery.rendezvous import VERSIONS

_LOG = logging.getLogger(__name__)

# With several processes: one that compiles alone must not wait for the others' timings of kernels
# (`compile_for_all`). The model's programs have it whatever XLA_FLAGS says; `training/hosts.py` sets it there for all
# others.
ALONE = {"xla_gpu_shard_autotuning": "False"}
# Kernels that give the same bits every time, or an error where there is none.
DETERMINISTIC = {"xla_gpu_deterministic_ops": "True"}
# Experts that are split over `data` travel between nodes while rows travel inside them: by default one collective is in
# flight at a time, and reduce-scatters of several layers are joined, which then wait for the last of them.
AT_ONCE = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "1000000",
}


def compiler_options(platform: str, processes: int = 1, deterministic: bool = False, at_once: bool = False) -> dict:
    """Return {option: text} for devices of a platform ('cpu', 'gpu', 'cuda', ...) in a job of so many processes;
    `deterministic`: the same program must give the same bits every time; `at_once`: experts travel next to rows.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    asked = (ALONE, processes > 1), (DETERMINISTIC, deterministic), (AT_ONCE, at_once)
    return {name: value for options, wanted in asked if wanted for name, value in options.items()}


# XLA's scheduler reckons with 95% of what four fifths of a GPU's memory leave beside a program's inputs. A program that
# needs more gets its collectives one after the other, with nothing next to them: of a state of 44 GB on an H100 with
# room for 76 all overlap was lost. So it is told what jax takes.
def scheduler_memory(device, held: int) -> dict[str, str]:
    """Return the option by which XLA's scheduler reckons with the memory that jax takes; {} where that is no more.

    Args:
      device: real or described; held: bytes of its inputs.
    """
    name = device_named(device.device_kind) if device.platform in ("gpu", "cuda") else None
    target = None if name is None else read_device(name)
    free = 0 if target is None else 0.8 * target.whole_memory - held
    percent = 0 if free <= 0 else round(95 * (target.usable_memory - held) / free)
    return {"xla_gpu_memory_limit_slop_factor": str(percent)} if percent > 95 else {}


# jax's persistent cache is on by default on GPUs, in the user's own folder: jax runs what its files hold, so no other
# user may write to it, and each file is signed. XLA's cache of kernel timings comes with it, so the same programs start
# again with the same kernels. On CPUs it is off: a program that was compiled for another CPU's instructions may fail
# when it is loaded. In a job of several processes process 0 alone writes and all read; where the others find nothing (a
# file system that not all share, or a user's key of their own), the model's programs still come from process 0 by
# `compile_for_all`.
def set_up_compilation_cache(folder: str | None, platform: str | None = None) -> str | None:
    """Switch jax's persistent compilation cache on or off, before anything is compiled; return its folder, or None.

    A folder that other users may write to is not used, which is logged.

    Args:
      folder: to keep programs in; '' for none; None for JAX_COMPILATION_CACHE_DIR where that is set, else the user's
        cache folder on GPUs, else none.
      platform: None asks jax.

    Raises:
      UserError: the folder cannot be made.
    """
    if folder == "":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    asked = folder or jax.config.jax_compilation_cache_dir
    alone = jax.config.jax_enable_compilation_cache and jax.process_count() == 1
    if asked and not alone and (platform or jax.default_backend()) == "cpu":
        _LOG.warning(
            "compilation cache %s is not used with --host_devices, or with several processes on CPUs: with several CPU "
            "devices a program from it hangs between two collectives (jax 0.10.2)",
            asked,
        )
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if folder is None and not jax.config.jax_compilation_cache_dir:
        if (platform or jax.default_backend()) not in ("gpu", "cuda"):
            return None
    elif folder is not None and "://" not in folder:  # jax also takes gs://
        folder = os.path.abspath(os.path.expanduser(folder))
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--compilation_cache={folder} cannot be made ({error.strerror or error}); name another folder, or '' "
                "for none"
            ) from error
    folder = folder or jax.config.jax_compilation_cache_dir
    try:
        folder = folder or str(user_cache_folder("compilation"))
        if os.path.isdir(folder):
            check_own_folder(folder)
        key = user_key()
    except UserError as reason:
        _LOG.warning("compiled programs are not kept: %s", reason)
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = lambda path: (SignedCache(_file_cache(path)[0], key), path)
    return folder


_file_cache = compilation_cache.get_file_cache


class SignedCache(CacheInterface):
    """A cache of jax whose entries only this user can have written: each begins with a proof of the user's key.

    Where several users share a folder, each has entries of their own.
    """

    def __init__(self, files: CacheInterface, key: bytes):
        self._files, self._key, self._path = files, key, files._path

    def get(self, key: str) -> bytes | None:
        """Return what `put` was given; None where there is nothing, or something by somebody else."""
        name = self._name(key)
        held = self._files.get(name)
        if held is None or hmac.compare_digest(held[:32], self._proof(name, held[32:])):
            return None if held is None else held[32:]
        _LOG.warning("%s in %s is not by this user, and is not loaded; delete it", name, self._path)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep a program."""
        name = self._name(key)
        self._files.put(name, self._proof(name, value) + value)

    def _name(self, key: str) -> str:
        return f"{key}-{self._proof('name', b'')[:4].hex()}"

    def _proof(self, name: str, value: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + value, "sha256")


WAIT_SECONDS = 3600  # for process 0's compilation; the watchdog ends a job that lost process 0
_CHUNK_BYTES = 2 << 20  # below the 4 MiB at which gRPC by default refuses a message
_PART_MILLISECONDS = 60_000  # every part is written before the head is
_turns: collections.Counter = collections.Counter()  # how often a process has asked for a program
_handed_out: list[str] = []  # keys of what process 0 handed out and has not deleted yet
_lock = threading.Lock()
_program_key: bytes | None = None


def trust_programs(key: bytes) -> None:
    """Set the key by which the processes of this start of the job know each other's programs."""
    global _program_key
    _program_key = key


# On GPUs the compiler times candidate kernels and keeps the fastest. By default it shares that work among the processes
# of a job (`xla_gpu_shard_autotuning`), each of which then waits for the others: a program that one process compiles
# alone, or finds in a cache while another does not, would wait for ever. With sharing off each process times for
# itself, noise decides between equals, and two processes may get two programs: other fusions, so another order of
# collectives in the schedule, and NCCL waits for ever. So process 0 alone compiles and hands out the result through the
# coordination service. Where an executable cannot be handed out, its profile is, and each process compiles for itself.
# A program that is compiled again (for a plan that is used again) is handed out again: the earlier executable may
# differ from the one that process 0 runs now.
def compile_for_all(
    lowered: jax.stages.Lowered, options: dict[str, str], target: Target | None, devices: Sequence, buckets: tuple = ()
) -> jax.stages.Compiled:
    """Return the executable of `compile_guided`, in a job of several processes the one that process 0 compiled.

    Args:
      lowered: equal on all processes.
      options: none on devices that need no common compilation: then each process compiles for itself.
      devices: of the program's mesh, in order.

    Raises:
      UserError, RuntimeError: process 0 could not compile it; on all processes, with its reason.
      HostLostError: process 0 sent nothing for an hour, or what lies there is not by process 0.
    """
    client = distributed.global_state.client
    if not options or client is None or jax.process_count() == 1:
        return compile_guided(lowered, options, target, buckets)[0]
    index, digest = jax.process_index(), hashlib.sha256(lowered.as_text().encode()).hexdigest()
    with _lock:
        turn = _turns[index, digest]
        _turns[index, digest] += 1
    if _program_key is None:
        raise RuntimeError("processes share programs only where start_hosts has joined them")
    key = f"moe_jax/program/{digest}/{turn}"
    if index == 0:
        return _compile_and_hand_out(client, key, lowered, options, target, buckets)
    head, blobs = _take(client, key)
    client.key_value_set_bytes(f"{key}/read/{index}", b"1", allow_overwrite=True)
    if head["kind"] == "error":
        raise (UserError if blobs else RuntimeError)(f"process 0 could not compile this program: {head['line']}")
    if head["kind"] == "executable":
        try:
            inputs, backend = jax.tree.structure(lowered.args_info), devices[0].client
            return serialize_executable.deserialize_and_load(
                zlib.decompress(blobs[1]), inputs, lowered.out_tree, execution_devices=list(devices), backend=backend
            )
        except Exception as error:
            _LOG.warning(
                "process 0's compiled program cannot be loaded here (%s: %s), so this process compiles for itself; all "
                "hosts of a job should have equal devices, drivers and jax",
                type(error).__name__,
                error,
            )
    profile = zlib.decompress(blobs[0]).decode()
    return compile_with_profile(lowered, options, profile) if profile else lowered.compile(options)


# A program runs as code, and loading it unpickles it. Whoever reaches the store could put one there, so nothing of it
# is decompressed or loaded before its head has proved the job's secret, for this start, program and turn, and every
# byte has proved to be what the head says.
def _take(client, key: str) -> tuple[dict, list[bytes]]:
    """Return what process 0 has handed out: its head and its parts.

    Raises:
      HostLostError: as of `compile_for_all`.
    """
    try:
        text = client.blocking_key_value_get_bytes(f"{key}/head", max(1, int(1000 * WAIT_SECONDS)))
    except Exception as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise HostLostError(
            f"process 0 did not hand out its compiled program within {WAIT_SECONDS:g} s; see its log"
        ) from error
    message = None
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(text)
    head, blobs = unseal(_program_key, key, message) if isinstance(message, dict) else None, []
    if head is not None and head["versions"] == VERSIONS:
        for name, (size, _) in enumerate(head["parts"]):
            parts = [f"{key}/{name}/{part}" for part in range(-(-size // _CHUNK_BYTES))]
            blobs.append(b"".join(client.blocking_key_value_get_bytes(part, _PART_MILLISECONDS) for part in parts))
        if [[len(blob), hashlib.sha256(blob).hexdigest()] for blob in blobs] == head["parts"]:
            return head, blobs
    raise HostLostError(
        "what lies in jax's key-value store as process 0's program is not by process 0 of this job, so it was not "
        "loaded: somebody else can write there"
    )


def _compile_and_hand_out(
    client, key: str, lowered: jax.stages.Lowered, options: dict[str, str], target: Target | None, buckets: tuple
) -> jax.stages.Compiled:
    """Compile on process 0, and write the result, or the reason why there is none, to the coordination service."""
    kind, blobs, line, executable, failure = "executable", [], "", None, None
    with _lock:  # programs are tens of MB each, and process 0 keeps what was handed out in its memory
        for held in list(_handed_out):
            if len(client.key_value_dir_get_bytes(f"{held}/read/")) == jax.process_count() - 1:
                client.key_value_delete(f"{held}/")
                _handed_out.remove(held)
        _handed_out.append(key)
    try:
        executable, profile = compile_guided(lowered, options, target, buckets)
        blobs = [zlib.compress(profile.encode())]
    except Exception as error:
        kind, failure, line = "error", error, (str(error).splitlines() or [type(error).__name__])[0]
        blobs = [b"user"] if isinstance(error, UserError) else []
    if executable is not None:
        try:
            blobs.append(zlib.compress(serialize_executable.serialize(executable)[0], 1))
        except Exception as error:
            kind = "profile"
            _LOG.warning(
                "the compiled program cannot be handed to the other processes (%s: %s); each compiles it for itself",
                type(error).__name__,
                error,
            )
    for name, blob in enumerate(blobs):
        for part, at in enumerate(range(0, len(blob), _CHUNK_BYTES)):
            client.key_value_set_bytes(f"{key}/{name}/{part}", blob[at : at + _CHUNK_BYTES], allow_overwrite=True)
    sizes = [(len(blob), hashlib.sha256(blob).hexdigest()) for blob in blobs]
    content = {"kind": kind, "parts": sizes, "line": line, "versions": VERSIONS}
    head = json.dumps(seal(_program_key, "program", key, content)).encode()
    client.key_value_set_bytes(f"{key}/head", head, allow_overwrite=True)  # last: now it is complete
    if failure is not None:
        raise failure
    return executable


def shared_function(function, options: dict[str, str], devices: Sequence):
    """Return a jitted function as one that process 0 compiles for all processes at its first call.

    Args:
      function: what jax.jit returned; all calls have the same shapes and shardings.
      options: for the compiler; none on devices that need no common compilation: then it stays as it is.
      devices: of its mesh, in order.
    """
    executable = None

    def call(*arguments):
        nonlocal executable
        if executable is None:
            executable = compile_for_all(function.lower(*arguments), options, None, devices)
        return executable(*arguments)

    return call if options else function


PROFILE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
# The share of a program's modelled seconds above which unmatched instructions are logged; nearly all are unmatched
# where a profile is of another program. A transfer that the first compilation made synchronous does not keep the name
# that the scheduler knows it by, so the compiler uses its own estimate for it: 11% of the seconds of a tiny model on
# a100:2x2 with jax 0.11.2.
UNGUIDED_LIMIT = 0.5


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
    lowered: jax.stages.Lowered, options: dict[str, str], target: Target | None, buckets: tuple = ()
) -> tuple[jax.stages.Compiled, str]:
    """Return (executable, profile): with a target the scheduler gets its modelled seconds as a profile, else ''.

    The profile is that of the program as compiled without one; buckets: as of `parse_module`.
    """
    executable = lowered.compile(options)
    if target is None:
        return executable, ""
    prices = Prices(target)
    profile = scheduler_profile(parse_module(executable.as_text(), buckets), prices)
    executable = compile_with_profile(lowered, options, profile)
    module = parse_module(executable.as_text(), buckets)
    share = unguided_share(module, prices, profile)
    if share > UNGUIDED_LIMIT:  # the compiler itself logs in C++ only that it could not match the profile
        _LOG.warning(
            "train.guide_scheduler (True) had little effect on %s: the profile names instructions of %.0f%% of its "
            "modelled seconds, and the compiler scheduled the rest by its own estimates",
            module.name,
            100 * (1 - share),
        )
    return executable, profile


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
    except UserError as reason:
        try:
            with tempfile.NamedTemporaryFile("w", prefix="moe_jax_", suffix=".pbtxt") as file:
                file.write(profile)
                file.flush()
                _LOG.warning("the scheduler's profile is kept for this compilation only: %s", reason)
                return lowered.compile({**options, PROFILE_OPTION: file.name})
        except OSError:
            raise reason from None
    return lowered.compile({**options, PROFILE_OPTION: str(path)})
