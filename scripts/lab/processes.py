"""Runs one command on every host of a lab, streams what it prints, and ends all of them together.

Inputs: the hosts that network.py built, and a command. Outputs: each host's exit code. When a host dies, the others get
a grace period in which to notice; then the lab kills them. The network stays as it is.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from network import LabHost

_COORDINATOR_PORT = 8476  # free: the lab has its own network


def host_command(command: Sequence[str], hosts: Sequence[LabHost], index: int, devices: int) -> list[str]:
    """Return the command for one host: programs of moe_jax get their place by flags, others by the environment."""
    if not any(a == "-m" and b.split(".")[0] == "moe_jax" for a, b in zip(command, command[1:], strict=False)):
        return list(command)
    place = [f"--num_processes={len(hosts)}", f"--process_id={index}", f"--host_devices={devices}"]
    return [*command, f"--coordinator={hosts[0].address}:{_COORDINATOR_PORT}", *place]


def host_environment(given: Mapping[str, str], hosts: Sequence[LabHost], index: int, devices: int) -> dict[str, str]:
    """Return the environment for one host."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", given.get("XLA_FLAGS", ""))
    return {
        **given,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": flags,
        "JAX_COORDINATOR_ADDRESS": f"{hosts[0].address}:{_COORDINATOR_PORT}",
        "JAX_NUM_PROCESSES": str(len(hosts)),
        "JAX_PROCESS_ID": str(index),
        "PYTHONUNBUFFERED": "1",
    }


class LabRun:
    """The command on all hosts; `poll` until `is_done`.

    Args:
      hosts: where to run.
      command: what to run.
      devices: devices of each process.
      logs: folder that gets a copy of each host's output.
      grace_seconds: how long the others may go on after a host has failed or after a signal.
    """

    def __init__(
        self,
        hosts: Sequence[LabHost],
        command: Sequence[str],
        *,
        devices: int,
        logs: Path | None,
        grace_seconds: float,
    ):
        self.exits: list[str] = []  # how each host's command ended, in their order
        self.exit_code = 0  # as a shell states it: 0 if all hosts ended well, else that of the first one that did not
        self.is_output_closed = False
        self._grace_seconds = grace_seconds
        self._deadline: float | None = None
        self._print_lock = threading.Lock()
        self._start_time = time.monotonic()
        self._running: dict[str, subprocess.Popen] = {}
        self._readers: list[threading.Thread] = []
        self._width = max(len(host.host_name) for host in hosts)
        for index, host in enumerate(hosts):
            process = subprocess.Popen(
                [*host.enter(), *host_command(command, hosts, index, devices)],
                env=host_environment(os.environ, hosts, index, devices),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C reaches the lab alone, which passes it on
            )
            self._running[host.host_name] = process
            log = open(logs / f"{host.host_name}.log", "w") if logs else None
            for pipe, screen in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert pipe is not None
                reader = threading.Thread(target=self._copy, args=(host.host_name, pipe, screen, log), daemon=True)
                reader.start()
                self._readers.append(reader)

    @property
    def is_done(self) -> bool:
        """Whether every host's command has ended."""
        return not self._running

    def poll(self) -> None:
        """Note which hosts have ended; kill the others once their grace is over."""
        now = time.monotonic()
        codes = {name: code for name, process in self._running.items() if (code := process.poll()) is not None}
        # Where several ended since the last look, one that a signal killed is the cause, the others noticed it.
        for name, code in sorted(codes.items(), key=lambda ended: ended[1] >= 0):
            del self._running[name]
            how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
            self.exits.append(f"{name}: {how} after {now - self._start_time:.1f} s")
            self.exit_code = self.exit_code or (code if code >= 0 else 128 - code)
            if code != 0 and self._running:
                self._set_deadline(now, f"{self.exits[-1]}; the others have {self._grace_seconds:g} s to notice")
        if self._deadline is not None and now > self._deadline and self._running:
            self.say(f"killing {', '.join(self._running)}: still running after {self._grace_seconds:g} s")
            self.kill()

    def pass_on(self, number: int) -> None:
        """Pass a signal on to every host and expect them to end."""
        for process in self._running.values():
            process.send_signal(number)
        name = signal.Signals(number).name
        self._set_deadline(time.monotonic(), f"{name}: all hosts have {self._grace_seconds:g} s to end")

    def kill(self) -> None:
        """Kill what still runs."""
        for process in self._running.values():
            process.kill()

    def finish(self) -> None:
        """Wait for the last output, briefly: a process that a host left behind may hold the pipe open."""
        for reader in self._readers:
            reader.join(2.0)

    def say(self, line: str) -> None:
        """Print a line of the lab's own."""
        self._print(sys.stderr, f"[{'lab':{self._width}}] {line}\n")

    def _set_deadline(self, now: float, line: str) -> None:
        if self._deadline is None:
            self._deadline = now + self._grace_seconds
            self.say(line)

    def _copy(self, name: str, pipe: IO[str], screen: IO[str], log: IO[str] | None) -> None:
        for line in pipe:  # a bare carriage return ends a line too: a progress bar becomes lines
            if log:
                log.write(line)
                log.flush()
            self._print(screen, f"[{name:{self._width}}] {line.rstrip()}\n")

    def _print(self, screen: IO[str], line: str) -> None:
        with self._print_lock:
            try:
                screen.write(line)
                screen.flush()
            except (BrokenPipeError, ValueError):  # the reader, such as `| head`, has closed the pipe
                self.is_output_closed = True
