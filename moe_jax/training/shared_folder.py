"""A run folder that all processes of a job see, and lines that one of them prints.

Inputs: a path, and this process' place in the job. Outputs: the folder, with its lock where the job writes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from moe_jax.errors import HostLostError, UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.jobs.lock import FolderLock
from moe_jax.storage.run_folder import RunFolder

FOLDER_SECONDS = 60.0  # until a network file system shows what another host has made


def say(hosts: Hosts, text: str) -> None:
    """Print a line, on the main process."""
    if hosts.is_main:
        print(text, flush=True)


@contextlib.contextmanager
def shared_folder(workdir: str, hosts: Hosts, *, writes: bool) -> Iterator[RunFolder]:
    """Yield a run folder that all processes see; a job that writes makes it, and holds its lock.

    Process 0 makes the folder before any other looks for it; at the end an empty one that it made goes.

    Raises:
      UserError: the folder cannot be opened, or another job has it.
      HostLostError: a process does not see process 0's folder.
    """
    with contextlib.ExitStack() as stack:
        if hosts.is_main:
            folder = RunFolder(workdir, create=writes)
            stack.callback(folder.remove_if_unused)
            if writes:
                stack.enter_context(FolderLock(folder, hosts.fail))
        seen = hosts.gather_text("run folder", str(folder.seen()) if hosts.is_main else "")[0]
        yield folder if hosts.is_main else _await_folder(workdir, hosts, seen)


def _await_folder(workdir: str, hosts: Hosts, seen: str) -> RunFolder:
    """Return process 0's run folder, as another process sees it, once it does; seen: as of `RunFolder.seen`."""
    deadline = time.monotonic() + FOLDER_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(UserError):
            if str((folder := RunFolder(workdir, create=False)).seen()) == seen:
                return folder
        time.sleep(0.5)
    raise HostLostError(
        f"process {hosts.process_index} does not see process 0's run folder {workdir}; give a --workdir that all hosts "
        "share"
    )
