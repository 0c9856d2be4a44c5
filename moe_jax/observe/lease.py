"""The lease of a run folder: one job at a time writes there, also where several hosts share the file system.

Inputs: a run folder. Outputs: `lease/00000007.json` in it, which says who holds epoch 7, and whose count rises while
that job lives. A job takes the folder by making the file of the next epoch; who finds a higher one, or another's record
in its own file (the folder was deleted and begun anew), has lost it. Where supervisors restart the job's processes, the
one that leads holds the lease, in an epoch of its own for every start, and the processes only look for a higher one.
"""

# No lock of the file system is used, which a network may not have, and no two clocks are compared: the holder counts,
# and who waits looks, for STALE_SECONDS of its own, whether the count moves. Only one process can make a file by
# open(..., "x"). A holder whose process is gone from this very machine (its boot, its PID namespace) is not watched.

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from moe_jax.errors import HostLostError, UserError
from moe_jax.observe.run_folder import OpenFolder, RunFolder, disk_errors_named

BEAT_SECONDS = 2.0
STALE_SECONDS = 30.0  # without a beat, after which a job counts as dead; network file systems show changes late
EPOCH_VARIABLE = "MOE_JAX_EPOCH"  # of a supervised process: the epoch that it belongs to
_JOB_IDS = ("SLURM_JOB_ID", "PMIX_NAMESPACE")
_log = logging.getLogger(__name__)


class Lease:
    """A job's right to write to a run folder, for the length of a `with` block.

    Attributes:
      epoch: from 1; higher than that of every job that had the folder before; 0 before it is taken.
      seen: of who looks on: the newest epoch and its count.
      moves: of who looks on: how often that has changed.
    """

    def __init__(self, folder: RunFolder, on_lost: Callable[[Exception], object], group: str = ""):
        """Take nothing yet.

        Args:
          on_lost: called from another thread if a later job, or start of this one, takes the folder meanwhile.
          group: of supervisors: equal on all that may take the lease over from each other.
        """
        self.epoch = 0
        self._run, self._folder, self._on_lost = folder, folder.lease, on_lost
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._holds, self.seen, self.moves, self._moved = True, (0, -1), 0, time.monotonic()
        self._beat = threading.Thread(target=self._keep, name="moe_jax lease", daemon=True)
        self._record = {
            "host": socket.gethostname(),
            "job": next((os.environ[name] for name in _JOB_IDS if os.environ.get(name)), ""),
            "machine": _machine(),
            "process": os.getpid(),
            "started": _started(os.getpid()),
            "beats": 0,
            "id": secrets.token_hex(8),
            "group": group,
        }

    def __enter__(self) -> Lease:
        """Take the folder; a UserError where another job has it. A supervised process looks on, in its epoch."""
        if epoch := os.environ.get(EPOCH_VARIABLE):
            self.epoch, self._holds = int(epoch), False
            self._beat.start()
            return self
        with disk_errors_named(self._folder):
            self._folder.mkdir(exist_ok=True)
            before = self._newest()
            self._wait_for_end(before)
        self.take(before)
        return self

    def look(self) -> None:
        """Note whether the count has moved since the last look; a disk that does not answer shows nothing."""
        with contextlib.suppress(OSError):
            epoch = self._newest()
            seen = epoch, self._read(epoch).get("beats", -1)
            if seen != self.seen:
                self.seen, self.moves, self._moved = seen, self.moves + 1, time.monotonic()

    def is_free(self, patience: float) -> bool:
        """Say whether nobody has the folder now, after a look.

        Args:
          patience: seconds for which the count of an epoch of this group has to stand still.
        """
        record = self._read(self.seen[0]) if self.seen[0] else {"released": True}
        patience = patience if record.get("group", "") == self._record["group"] else STALE_SECONDS
        return _has_ended(record) or time.monotonic() - self._moved >= patience

    def is_own(self) -> bool:
        """Say whether the epoch that was seen is of this group."""
        return self._read(self.seen[0]).get("group", "") == self._record["group"]

    def holder(self) -> str:
        """Return in words who has the epoch that was seen."""
        record = self._read(self.seen[0])
        return f"process {record.get('process', '?')} on {record.get('host', '?')}, epoch {self.seen[0]}"

    def take(self, before: int) -> None:
        """Make the epoch after `before`, of this job or another, whose end the caller has seen.

        UserError: another process was faster, or has the folder already.
        """
        with disk_errors_named(self._folder), self._lock:
            if self.epoch and (later := self._lost_to()):
                raise UserError(self._taken(later))
            self._folder.mkdir(parents=True, exist_ok=True)  # who had it may have removed it
            try:
                open(self._path(before + 1), "x").close()
            except FileExistsError:
                raise UserError(self._taken(before + 1)) from None
            self.epoch = before + 1
            self._write()
            if later := self._lost_to():  # this process was slow, and others have come and gone
                raise UserError(self._taken(later))
            self._opened, self._run.retake = OpenFolder(self._run.path), self.retake
            for path in self._folder.glob("*.json"):
                if path.stem.isdecimal() and int(path.stem) < self.epoch:
                    path.unlink(missing_ok=True)
        if not self._beat.is_alive():
            self._beat.start()

    def retake(self) -> bool:
        """Make the run folder again and take it where it, or its lease, was deleted; say whether that was so.

        UserError: it lives on under another name, or another job is there now.
        """
        with disk_errors_named(self._run.path):
            if (is_there := self._opened.is_there()) and self._path(self.epoch).exists():
                return False
            with contextlib.suppress(OSError):  # of a deleted folder over a network; one here is empty
                if os.listdir(self._opened.descriptor) and not is_there:
                    raise UserError(f"run folder {self._run.path} was renamed under a job; name its new place")
        self.take(0)
        return True

    def __exit__(self, *_error) -> None:
        self._ended.set()
        if self._beat.is_alive():
            self._beat.join()
        if not self._holds or not self.epoch:
            return
        self._record["released"] = True
        with contextlib.suppress(OSError):
            if self._lost_to():
                return
            if self._run.operative_config.exists():
                self._write()
            else:  # nothing began
                self._path(self.epoch).unlink()
                self._folder.rmdir()

    def _wait_for_end(self, epoch: int) -> None:
        """Return when the holder of an epoch has ended; a UserError as soon as it shows life."""
        seen, deadline = self._read(epoch), time.monotonic() + STALE_SECONDS
        if not epoch or _has_ended(seen):
            return
        _log.warning("%s; looking, for %g s, whether it lives", self._holder(epoch, seen), STALE_SECONDS)
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 4)
            now = self._read(epoch)
            if _has_ended(now) or not self._path(epoch).exists():
                return
            if now.get("beats", -1) > seen.get("beats", -1) or self._newest() > epoch:
                raise UserError(self._taken(self._newest()))

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                with self._lock:
                    later = self._lost_to()
                    if self._holds and not later:
                        self._record["beats"] += 1
                        self._write()
                if later:
                    kind = UserError if self._holds else HostLostError  # a later start of its job goes on
                    self._on_lost(kind(self._taken(later)))
                    return
            except OSError:  # a disk that does not answer now; if that lasts, others take the folder
                pass

    def _lost_to(self) -> int:
        """Return the epoch of another job that has the folder now, 0 while this one has it."""
        newest, held = self._newest(), self._read(self.epoch) if self._holds else {}
        if newest > self.epoch:
            return newest
        return self.epoch if held and held.get("id") != self._record["id"] else 0

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{epoch:08d}.json"

    def _newest(self) -> int:
        """Return the highest epoch, 0 before the first."""
        return max((int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdecimal()), default=0)

    def _read(self, epoch: int) -> dict:
        """Return the record of an epoch, {} while it is being written."""
        try:
            record = json.loads(self._path(epoch).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) and type(record.get("beats")) is int else {}

    def _write(self) -> None:
        # in place: a full disk does not stop the count, and a network's cache cannot show the file that was replaced
        with open(self._path(self.epoch), "r+", encoding="utf-8") as file:
            file.write(json.dumps(self._record) + "\n")
            file.truncate()

    def _holder(self, epoch: int, record: Mapping) -> str:
        names = [f"process {record.get('process', '?')} on {record.get('host', '?')}", f"epoch {epoch}"]
        names += [f"job {record['job']}"] if record.get("job") else []
        return f"run folder {self._run.path} is held by another job ({', '.join(names)})"

    def _taken(self, epoch: int) -> str:
        return f"{self._holder(epoch, self._read(epoch))}; wait for its end, or give another --workdir"


def _machine() -> str:
    """Return a text that is equal on two processes only if the number of a process means the same to both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _started(process: int) -> str | None:
    """Return when a process of this machine began, in ticks; '' where that cannot be told, None if it is gone."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except OSError:  # another user's
        return ""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]


def _has_ended(record: Mapping) -> bool:
    """Say whether the holder has given its epoch back, or its process is gone from this machine."""
    if record.get("released"):
        return True
    if record.get("machine") != _machine() or type(record.get("process")) is not int:
        return False
    started = _started(record["process"])
    return started is None or bool(started) and started != record.get("started")
