"""Machines of a lab that can lose everything: each has network, mounts, memory disk, names and processes of its own.

Inputs: the hosts that network.py built. Outputs: machines that boot, start commands inside, and are killed: then all
their processes and all that lay in their /dev/shm are gone, as after a power cut. Files elsewhere are shared by all.
"""

import os
import signal
import subprocess
from pathlib import Path

from network import LabHost

_SHM_SIZE = "4g"


class Machine:
    """One machine; `boot` it first."""

    def __init__(self, host: LabHost):
        self.host, self._init = host, 0
        self._unshared: subprocess.Popen | None = None

    @property
    def is_up(self) -> bool:
        return bool(self._init)

    def boot(self) -> None:
        """Give it namespaces of its own, an empty /dev/shm, and a first process that does nothing."""
        inside = f"hostname {self.host.host_name} && mount -t tmpfs -o size={_SHM_SIZE} tmpfs /dev/shm && echo up"
        enter = ["ip", "netns", "exec", self.host.namespace, "unshare", "-m", "-u", "-p", "-f", "--kill-child"]
        command = [*enter, "--mount-proc", "sh", "-c", f"{inside} && exec sleep infinity"]
        quiet = subprocess.DEVNULL  # unshare complains of the signal that its child dies by
        self._unshared = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True)
        assert self._unshared.stdout is not None
        with self._unshared.stdout as said:
            if said.readline() != "up\n":
                raise RuntimeError(f"{self.host.host_name} does not boot")
        self._init = children_of(self._unshared.pid)[0]

    def inside(self) -> list[str]:
        """Return what a command begins with that runs on this machine; its process is a child of that command's."""
        return ["nsenter", "-t", str(self._init), "-m", "-u", "-n", "-p", "--"]

    def kill(self) -> None:
        """End it, with all processes on it; safe where it is dead already."""
        if self._init:
            os.kill(self._init, signal.SIGKILL)
            self._init = 0
        if self._unshared is not None:
            self._unshared.wait()
            self._unshared = None

    def set_link(self, state: str) -> None:
        """Plug its network cable in ('up') or out ('down')."""
        command = ["ip", "-n", self.host.namespace, "link", "set", "eth0", state]
        subprocess.run(command, check=True, start_new_session=True)


def children_of(pid: int) -> list[int]:
    """Return the ids of a process' children, in the order in which they started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
