"""The processes of one host that train: started ahead, given their places, ended. No arrays, no jax.

Inputs: a command, and for every start of the job its places. Outputs: exit codes and finished steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Sequence

from moe_jax.errors import HostLostError
from moe_jax.recovery.job_secret import FILE_VARIABLE, VARIABLE
from moe_jax.recovery.standby import READY
from moe_jax.recovery.standby import VARIABLE as STANDBY

STOPPED = 75  # exit code of a process that has saved and ended, because it was asked to
_FINAL = (2, 3)  # exit codes of the whole job, which no start changes
_KILL_SECONDS = 5.0
# Not for the processes: the job's own secret, whose place that of an epoch takes, and by what jax finds Slurm's tasks,
# which are the supervisors.
_KEPT_BACK = (VARIABLE, FILE_VARIABLE, "SLURM_NTASKS")


class _Process:
    """One process, from its imports to its end; it has a session of its own, so that all it starts ends with it."""

    def __init__(self, command: Sequence[str], slot: int, count: int):
        self.slot, (self.connection, theirs) = slot, socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _KEPT_BACK}
        environment[STANDBY] = "1"
        if count > 1:
            environment["JAX_LOCAL_DEVICE_IDS"] = str(slot)
        with theirs:
            self.popen = subprocess.Popen(command, stdin=theirs, env=environment, start_new_session=True)
        self.connection.setblocking(False)
        self.received, self.is_ready, self.is_open = b"", False, True

    def read(self) -> int:
        """Take in what it says; return the last step that it has finished, 0 for none."""
        step = 0
        with contextlib.suppress(BlockingIOError):
            try:
                data = self.connection.recv(65536)
            except ConnectionError:
                data = b""
            self.is_open = bool(data)
            *lines, self.received = (self.received + data).split(b"\n")
            for line in lines:
                self.is_ready |= line == READY.encode()
                step = int(line) if line.isdigit() else step
        return step


class Workers:
    """The processes of this host: those that train, and those that stand by for the next start.

    Attributes:
      step: the last that a process of this start has finished, 0 before the first.
    """

    def __init__(self, command: Sequence[str], count: int, selector: selectors.BaseSelector):
        """Start none yet.

        Args:
          command: of every process; flags are put behind it.
          count: of processes on this host.
          selector: gets their connections, each with a function to call when it can be read.
        """
        self.step, self._asked = 0, False
        self._command, self._count, self._selector = list(command), count, selector
        self._placed: list[_Process] = []
        self._standing_by: list[_Process] = []

    @property
    def is_ready(self) -> bool:
        """Whether the next start needs no imports."""
        return len(self._standing_by) == self._count and all(process.is_ready for process in self._standing_by)

    @property
    def is_running(self) -> bool:
        return any(process.popen.poll() is None for process in self._placed)

    @property
    def code(self) -> int | None:
        """How the processes of this start have ended: by the first failure, else when all have; None while they run."""
        codes = [process.popen.poll() for process in self._placed]
        codes = [code if code is None or code >= 0 else 128 - code for code in codes]
        failed = [code for code in codes if code not in (None, 0, STOPPED)]
        if failed:
            return next((code for code in failed if code in _FINAL), failed[0])
        return None if None in codes or not codes else max(code for code in codes if code is not None)

    def prepare(self) -> None:
        """Let processes import what a start needs."""
        for slot in set(range(self._count)) - {process.slot for process in self._standing_by}:
            process = _Process(self._command, slot, self._count)
            self._selector.register(process.connection, selectors.EVENT_READ, lambda own=process: self._hear(own))
            self._standing_by.append(process)

    def place(self, flags: Sequence[Sequence[str]], environment: dict[str, str]) -> None:
        """Start anew: end the processes that train, and give those that stand by, or new ones, their places.

        Args:
          flags: of each process.
          environment: what all get besides that of this process.
        """
        self.stop()
        self.prepare()
        self._placed, self._standing_by = sorted(self._standing_by, key=lambda process: process.slot), []
        for process, own in zip(self._placed, flags, strict=True):
            with contextlib.suppress(OSError):  # it is gone, as its exit code tells
                line = json.dumps({"flags": list(own), "environment": environment})
                process.connection.sendall(line.encode() + b"\n")

    def ask_to_stop(self) -> None:
        """Let the processes save and end; a second time changes nothing."""
        asked, self._asked = self._asked, True
        for process in [] if asked else self._placed:
            with contextlib.suppress(ProcessLookupError):
                process.popen.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the processes that train, and all that these have started.

        HostLostError: one does not end, as where a device holds it.
        """
        self._end(self._placed)
        self._placed, self.step, self._asked = [], 0, False

    def close(self) -> None:
        """End all processes."""
        self._end(self._placed + self._standing_by)

    def _end(self, processes: Sequence[_Process]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: on macOS, of a zombie
                os.killpg(process.popen.pid, signal.SIGKILL)
        for process in processes:
            try:
                process.popen.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                raise HostLostError(
                    f"process {process.popen.pid} of this host does not end; restart the host, a device may hold it"
                ) from None
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.connection)
            process.connection.close()

    def _hear(self, process: _Process) -> None:
        step = process.read()
        if process in self._placed:
            self.step = max(self.step, step)
        if not process.is_open:
            self._selector.unregister(process.connection)
            if process in self._standing_by:  # a start replaces it, and tells why where that fails too
                self._standing_by.remove(process)
                process.popen.kill()
                process.popen.wait()
