"""One process compiles, all run the same program. No arrays.

Inputs: a lowered program and a function that compiles it. Outputs: its executable, on every process of the job.

On GPUs the compiler times candidate kernels and keeps the fastest. By default it shares that work among all processes
of a job (`xla_gpu_shard_autotuning`), each of which then waits for the others: a program that one process compiles
alone, or finds in a cache while another does not, would wait for ever. With sharing off (see `compiler_options.py`)
each process times for itself, noise decides between equals, and two processes may get two programs: other fusions, so
another order of collectives in the schedule, and NCCL waits for ever. So process 0 alone compiles and hands out the
result, through the coordination service. Where an executable cannot be handed out, its profile is, and each process
compiles for itself. A program that is compiled again, for instance for a plan that is used again, is handed out again:
the earlier executable may differ from the one that process 0 runs now.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import logging
import threading
import zlib
from collections.abc import Callable, Sequence

import jax
from jax._src import distributed  # the coordination service has no public name
from jax.experimental import serialize_executable

from moe_jax.errors import HostLostError, UserError
from moe_jax.training import compiler_options

_LOG = logging.getLogger(__name__)
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

            def compiled(_text: str = "") -> jax.stages.Compiled:
                return compiler_options.compiled(lowered, self._options)

            self._executable = compile_for_all(lowered, lambda: (compiled(), ""), compiled, self._devices)
        return self._executable(*arguments)
