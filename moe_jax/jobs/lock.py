"""The lock of a run folder: one job at a time writes there, also where several hosts share the file system.

Inputs: a run folder. Outputs: `lock.json` in it, which says who holds the folder, and counts while that process lives.
"""

# On one machine the kernel says whether the holder lives: the file is locked until its process ends. A network may not
# have such locks, and two clocks are never compared: the holder counts, and a process on another host looks, for
# STALE_SECONDS of its own, whether the count moves. An attempt of a job of Slurm begins when the one before has ended.

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from moe_jax.errors import UserError
from moe_jax.parallel.mesh import machine_id
from moe_jax.storage.run_folder import OpenFolder, RunFolder, disk_errors_named

BEAT_SECONDS = 2.0
STALE_SECONDS = 30.0  # without a beat, after which a job counts as dead; network file systems show changes late


class FolderLock:
    """A job's right to write to a run folder, for the length of a `with` block."""

    def __init__(self, folder: RunFolder, on_lost: Callable[[Exception], object]):
        """Take nothing yet; on_lost: called from another thread if a later job takes the folder meanwhile."""
        self._run, self._on_lost, self._ended, self._writing = folder, on_lost, threading.Event(), threading.Lock()
        self._record = {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine_id(), "beats": 0}
        self._record |= {"job": os.environ.get("SLURM_JOB_ID", ""), "id": secrets.token_hex(8)}
        self._beat = threading.Thread(target=self._keep, name="moe_jax lock", daemon=True)

    def __enter__(self) -> FolderLock:
        """Take the folder; a UserError where another job has it."""
        self._take()
        self._beat.start()
        return self

    def _take(self) -> None:
        with disk_errors_named(self._run.lock), self._writing:
            self._run.path.mkdir(parents=True, exist_ok=True)
            try:
                self._file = os.open(self._run.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)  # only one process can
            except FileExistsError:
                self._file = os.open(self._run.lock, os.O_RDWR)
                if self._lives(held := self._read()):
                    raise UserError(self._taken_by(held)) from None
            self._lock_file()
            self._write()
            self._opened, self._run.retake = OpenFolder(self._run.path), self.retake

    def _lives(self, held: dict) -> bool:
        """Say whether the process of a record goes on; one on another host is watched for up to STALE_SECONDS."""
        if held.get("released") or held.get("job") and held["job"] == self._record["job"]:
            return False
        here = held.get("machine") == self._record["machine"]
        for turn in range(int(4 * STALE_SECONDS / BEAT_SECONDS)):
            if here and (is_mine := self._lock_file()) is not None and (is_mine or turn):  # one just killed may have it
                return not is_mine
            time.sleep(BEAT_SECONDS / 4)
            if (now := self._read()) != held:
                return not now.get("released")
        return False

    def _lock_file(self) -> bool | None:
        """Say whether this process has locked the file; None where the file system knows no locks."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return False if isinstance(error, BlockingIOError) else None
        return True

    def retake(self) -> bool:
        """Make and take the run folder again where it was deleted, and no other job is there; say whether it was."""
        if self._run.lock.exists() and self._opened.is_there():
            return False
        self._opened.check_deleted()
        os.close(self._file)
        self._take()
        return True

    def __exit__(self, *_error) -> None:
        self._ended.set()
        self._beat.join()
        self._record["released"] = True
        with contextlib.suppress(OSError):
            os.close(self._file)
            if self._read().get("id") == self._record["id"]:
                self._write()
                if not self._run.environment.exists():  # nothing began
                    self._run.lock.unlink()

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError), self._writing:  # a disk that does not answer now
                held = self._read()
                if held and held.get("id") != self._record["id"]:
                    self._on_lost(UserError(self._taken_by(held)))
                    return
                self._record["beats"] += 1
                self._write()

    def _read(self) -> dict:
        """Return what the file says, {} while it is being written."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if isinstance(record := json.loads(self._run.lock.read_text(encoding="utf-8")), dict):
                return record
        return {}

    def _write(self) -> None:
        # in place: a full disk does not stop the count, and a network's cache cannot show the file that was replaced
        with open(self._run.lock, "r+", encoding="utf-8") as file:
            file.write(json.dumps(self._record) + "\n")
            file.truncate()

    def _taken_by(self, held: dict) -> str:
        who = f"is held by process {held.get('pid', '?')} on {held.get('host', '?')}"
        return f"run folder {self._run.path} {who}; wait for that job's end, or give another --workdir"
