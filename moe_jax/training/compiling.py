"""How programs are compiled: options, the compilation cache, one compilation for all processes, a guided scheduler.

Inputs: lowered programs and the devices they run on. Outputs: executables, the same on every process of a job. Each
option of `GPU` was chosen by comparing reports of `python -m moe_jax.inspect` without it and with it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax._src import distributed  # the coordination service has no public name
from jax.experimental import serialize_executable

from moe_jax.cluster.hlo import Module, parse_module
from moe_jax.cluster.targets import Target, device_named, read_device, target_names
from moe_jax.cluster.timeline import scheduler_profile, unguided_share
from moe_jax.data.user_cache import read_cached, user_cache_folder, write_cached
from moe_jax.errors import HostLostError, UserError

_LOG = logging.getLogger(__name__)

# what holds for every jax that this package supports (0.10.2 to 0.12)
GPU: dict[str, str] = {}
# With several processes: one that compiles alone must not wait for the others' timings of kernels
# (`compile_for_all`). `training/hosts.py` sets the same for all other programs of the process.
ALONE = {"xla_gpu_shard_autotuning": "False"}
# Kernels that give the same bits every time, or an error where there is none.
DETERMINISTIC = {"xla_gpu_deterministic_ops": "True"}


def compiler_options(platform: str, processes: int = 1, deterministic: bool = False) -> dict[str, str]:
    """Return the options for devices of a platform ('cpu', 'gpu', 'cuda', ...).

    Args:
      processes: of the job.
      deterministic: whether the same program must give the same bits every time.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    return {**GPU, **(ALONE if processes > 1 else {}), **(DETERMINISTIC if deterministic else {})}


def compiled(lowered, options: dict[str, str]):
    """Return the executable of a lowered program; leave out an option of `ALONE` that this compiler does not have."""
    try:
        return lowered.compile(compiler_options=options)
    except Exception as error:
        unknown = [name for name in ALONE if name in options and f"No such compile option: '{name}'" in str(error)]
        if not unknown:
            raise
        _LOG.warning("this jax's compiler has no option %s, which is left out", ", ".join(unknown))
        return lowered.compile(compiler_options={name: v for name, v in options.items() if name not in unknown})


# jax's persistent cache is on by default on GPUs, in the user's own folder: jax loads its files, so no other user may
# write to it. XLA's cache of kernel timings comes with it, so the same programs start again with the same kernels. On
# CPUs it is off: a program that was compiled for another CPU's instructions may fail when it is loaded. In a job of
# several processes process 0 alone writes and all read; where the others find nothing (a file system that not all
# share), the model's programs still come from process 0 by `compile_for_all`.
def set_up_compilation_cache(folder: str | None, platform: str | None = None) -> str | None:
    """Switch jax's persistent compilation cache on or off, before anything is compiled.

    Args:
      folder: to keep programs in; '' for none; None for JAX_COMPILATION_CACHE_DIR where that is set, else the user's
        cache folder on GPUs, else none.
      platform: None asks jax.

    Returns:
      the folder in use, None without.

    Raises:
      UserError: the folder cannot be made, or the user's cache folder is a link or belongs to another user.
    """
    if folder == "":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if folder is None:
        if jax.config.jax_compilation_cache_dir:
            return jax.config.jax_compilation_cache_dir
        if (platform or jax.default_backend()) not in ("gpu", "cuda"):
            return None
        folder = str(user_cache_folder("compilation"))
    elif "://" not in folder:  # jax also takes gs://
        folder = os.path.abspath(os.path.expanduser(folder))
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--compilation_cache={folder} cannot be made ({error.strerror or error}); name another folder, or '' "
                "for none"
            ) from error
    jax.config.update("jax_compilation_cache_dir", folder)
    return folder


WAIT_SECONDS = 3600  # for process 0's compilation; the watchdog ends a job that lost process 0
_CHUNK_BYTES = 2 << 20  # below the 4 MiB at which gRPC by default refuses a message
_PART_MILLISECONDS = 60_000  # every part is written before the head is
_turns: collections.Counter = collections.Counter()  # how often a process has asked for a program
_handed_out: list[_Store] = []  # by process 0, and not deleted yet
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Store:
    """Texts of one program in the coordination service, under keys that all processes know."""

    client: object
    key: str

    def publish(self, kind: str, *blobs: bytes, line: str = "") -> None:
        """Hand out some bytes, as many as there are."""
        counts = []
        for name, blob in enumerate(blobs):
            parts = [blob[at : at + _CHUNK_BYTES] for at in range(0, len(blob), _CHUNK_BYTES)]
            counts.append(len(parts))
            for index, part in enumerate(parts):
                self.client.key_value_set_bytes(f"{self.key}/{name}/{index}", part, allow_overwrite=True)
        head = json.dumps({"kind": kind, "parts": counts, "line": line}).encode()
        self.client.key_value_set_bytes(f"{self.key}/head", head, allow_overwrite=True)  # last: now it is complete

    def read(self, seconds: float) -> tuple[str, list[bytes], str]:
        """Return (kind, blobs, line); raise HostLostError if there is nothing in time."""
        try:
            head = json.loads(self.client.blocking_key_value_get_bytes(f"{self.key}/head", max(1, int(1000 * seconds))))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise HostLostError(
                f"process 0 did not hand out its compiled program within {seconds:g} s; see its log"
            ) from error
        blobs = [
            b"".join(
                self.client.blocking_key_value_get_bytes(f"{self.key}/{name}/{index}", _PART_MILLISECONDS)
                for index in range(count)
            )
            for name, count in enumerate(head["parts"])
        ]
        self.client.key_value_set_bytes(f"{self.key}/read/{jax.process_index()}", b"1", allow_overwrite=True)
        return head["kind"], blobs, head["line"]

    def delete_if_read(self) -> bool:
        """Delete what was handed out if all other processes have read it; return whether they have."""
        if len(self.client.key_value_dir_get_bytes(f"{self.key}/read/")) < jax.process_count() - 1:
            return False
        self.client.key_value_delete(f"{self.key}/")
        return True


# On GPUs the compiler times candidate kernels and keeps the fastest. By default it shares that work among the processes
# of a job (`xla_gpu_shard_autotuning`), each of which then waits for the others: a program that one process compiles
# alone, or finds in a cache while another does not, would wait for ever. With sharing off each process times for
# itself, noise decides between equals, and two processes may get two programs: other fusions, so another order of
# collectives in the schedule, and NCCL waits for ever. So process 0 alone compiles and hands out the result through the
# coordination service. Where an executable cannot be handed out, its profile is, and each process compiles for itself.
# A program that is compiled again (for a plan that is used again) is handed out again: the earlier executable may
# differ from the one that process 0 runs now.
def compile_for_all(
    lowered: jax.stages.Lowered,
    first: Callable[[], tuple[jax.stages.Compiled, str]],
    again: Callable[[str], jax.stages.Compiled],
    devices: Sequence,
) -> jax.stages.Compiled:
    """Return the executable that process 0 compiled.

    Args:
      lowered: equal on all processes.
      first: () -> (executable, text); compiles, on process 0.
      again: text -> executable; compiles on the others where the executable itself cannot be handed out.
      devices: of the program's mesh, in order.

    Raises:
      UserError, RuntimeError: process 0 could not compile it; on all processes, with its reason.
      HostLostError: process 0 sent nothing for an hour.
    """
    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return first()[0]
    index, digest = jax.process_index(), hashlib.sha256(lowered.as_text().encode()).hexdigest()
    with _lock:
        turn = _turns[index, digest]
        _turns[index, digest] += 1
    store = _Store(client, f"moe_jax/program/{digest}/{turn}")
    if index == 0:
        return _compile_and_publish(store, first)
    kind, blobs, line = store.read(WAIT_SECONDS)
    if kind == "error":
        raise (UserError if blobs else RuntimeError)(f"process 0 could not compile this program: {line}")
    text = zlib.decompress(blobs[0]).decode()
    if kind == "text":
        return again(text)
    try:
        return _load(zlib.decompress(blobs[1]), lowered, devices)
    except Exception as error:
        _LOG.warning(
            "process 0's compiled program cannot be loaded here (%s: %s), so this process compiles for itself; all "
            "hosts of a job should have equal devices, drivers and jax",
            type(error).__name__,
            error,
        )
        return again(text)


def _compile_and_publish(store: _Store, first: Callable[[], tuple[jax.stages.Compiled, str]]) -> jax.stages.Compiled:
    with _lock:  # programs are tens of MB each, and process 0 keeps what was handed out in its memory
        _handed_out[:] = [*(held for held in _handed_out if not held.delete_if_read()), store]
    try:
        executable, text = first()
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        store.publish("error", *([b"user"] if isinstance(error, UserError) else []), line=line)
        raise
    try:
        payload = serialize_executable.serialize(executable)[0]
    except Exception as error:
        _LOG.warning(
            "the compiled program cannot be handed to the other processes (%s: %s); each compiles it for itself",
            type(error).__name__,
            error,
        )
        store.publish("text", zlib.compress(text.encode()))
    else:
        store.publish("executable", zlib.compress(text.encode()), zlib.compress(payload, 1))
    return executable


def _load(payload: bytes, lowered: jax.stages.Lowered, devices: Sequence) -> jax.stages.Compiled:
    inputs = jax.tree.structure(lowered.args_info)
    return serialize_executable.deserialize_and_load(
        payload, inputs, lowered.out_tree, execution_devices=list(devices), backend=devices[0].client
    )


class SharedFunction:
    """A jitted function that is compiled at its first call, for all processes.

    Args:
      function: what jax.jit returned; all calls have the same shapes and shardings.
      options: for the compiler.
      devices: of its mesh.
    """

    def __init__(self, function, options: dict[str, str], devices: Sequence):
        self._function, self._options, self._devices = function, options, devices
        self._executable: jax.stages.Compiled | None = None

    def __call__(self, *arguments):
        if self._executable is None:
            lowered = self._function.lower(*arguments)

            def compile_here(_text: str = "") -> jax.stages.Compiled:
                return compiled(lowered, self._options)

            self._executable = compile_for_all(lowered, lambda: (compile_here(), ""), compile_here, self._devices)
        return self._executable(*arguments)


PROFILE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
# The share of a program's modelled seconds above which unmatched instructions are logged; nearly all are unmatched
# where a profile is of another program. A transfer that the first compilation made synchronous does not keep the name
# that the scheduler knows it by, so the compiler uses its own estimate for it: 11% of the seconds of a tiny model on
# a100:2x2 with jax 0.11.2.
UNGUIDED_LIMIT = 0.5


def find_target(devices, per_node: int) -> Target | None:
    """Return the target that these devices are, None where the scheduler cannot be guided; a GPU's reason is logged.

    Args:
      devices: of the mesh, real or described.
      per_node: of one node.
    """
    if devices[0].platform not in ("gpu", "cuda"):
        return None
    name = device_named(devices[0].device_kind)
    if name is None:
        _say_unguided(devices[0].device_kind)
        return None
    nodes = -(-len(devices) // per_node)
    return dataclasses.replace(read_device(name), nodes=nodes, per_node=min(per_node, len(devices)))


@functools.cache
def _say_unguided(kind: str) -> None:
    _LOG.warning(
        "train.guide_scheduler and ModelConfig.overlap = 'auto' have no effect on %r, whose rates are not known here "
        "(%s are); the compiler schedules by its own estimates",
        kind,
        ", ".join(target_names()),
    )


def compile_guided(
    lowered: jax.stages.Lowered, options: dict[str, str], target: Target | None, devices: Sequence = ()
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
        say_if_not_taken_up(parse_module(executable.as_text()), target, profile)
        return executable, profile

    def again(profile: str) -> jax.stages.Compiled:
        return compile_with_profile(lowered, options, profile) if profile else compiled(lowered, options)

    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return first()[0]
    return compile_for_all(lowered, first, again, devices)


def say_if_not_taken_up(module: Module, target: Target, profile: str) -> None:
    """Log if the compiler could not match a profile to its program; the compiler logs that in C++ only.

    Args:
      module: the program as compiled with the profile.
    """
    share = unguided_share(module, target, profile)
    if share > UNGUIDED_LIMIT:
        _LOG.warning(
            "train.guide_scheduler (True) had little effect on %s: the profile names instructions of %.0f%% of its "
            "modelled seconds, and the compiler scheduled the rest by its own estimates",
            module.name,
            100 * (1 - share),
        )


def profile_of(executable: jax.stages.Compiled, target: Target) -> str:
    """Return the scheduler's profile of a program, from the program as compiled without one."""
    return scheduler_profile(parse_module(executable.as_text()), target)


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
