"""The names of the files of a run, in one place, and small text files written atomically.

config.gin        every value, and which the user bound
metrics.jsonl     one JSON object a step           evaluations.jsonl  one JSON object an evaluation
environment.json  versions, devices, mesh          loads/ loads.npz   parts while training, merged at the end
checkpoints/      orbax                            plots/ report.html expert_load.png, and a page
tensorboard/      events                           profile/           traces of train.profile_steps
lock.json         the job that writes here         (jobs/lock.py)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from moe_jax.errors import UserError

TEMPORARY_SUFFIX = ".tmp"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "numpy")
REMEDIES = {
    "free space on its disk, then give the same command again": (errno.ENOSPC, errno.EDQUOT),
    "choose a folder that you may write to": (errno.EACCES, errno.EPERM, errno.EROFS),
    "a file stands where a folder is needed, or the reverse: move it away": (errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
}


@contextmanager
def disk_errors_named(path: str | os.PathLike[str], more: str = "") -> Iterator[None]:
    """Turn an `OSError` raised while `path` is written into one line that names the file, the cause and a remedy.

    Args:
      more: what else to say.
    """
    try:
        yield
    except OSError as error:
        remedies = [remedy for remedy, numbers in REMEDIES.items() if error.errno in numbers]
        remedy = remedies[0] if remedies else "check its disk or choose another folder"
        raise UserError(f"cannot write {os.fspath(path)} ({error.strerror or error}); {remedy}{more}") from error


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a file to write; it takes the place of `path` only when the block ends without an error.

    The temporary file has one fixed name next to `path`, so a kill leaves at most one, which the next write reuses:
    each path has a single writer (process 0).
    """
    target = Path(path)
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    with disk_errors_named(target):
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            # Frees space on a full disk; a temporary file that cannot be removed must not hide the first error.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def write_atomically(path: str | os.PathLike[str], text: str) -> Path:
    """Replace the content of `path` by UTF-8 text in one move; a newline ends it."""
    with atomic_file(path) as file:
        file.write((text if text.endswith("\n") else text + "\n").encode("utf-8"))
    return Path(path)


class OpenFolder:
    """The folder at a path now, told from another one that takes its place."""

    def __init__(self, path: Path):
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)  # while open, its number goes to no other

    def __del__(self):
        os.close(self.descriptor)

    def is_there(self) -> bool:
        """Say whether the path still leads to it."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        return False

    def check_deleted(self) -> None:
        """Raise a UserError where it is not at its path, but lives on under another name."""
        with contextlib.suppress(OSError):  # of a deleted folder over a network; one here is empty
            if not self.is_there() and os.listdir(self.descriptor):
                raise UserError(f"folder {self.path} was renamed under a job; name its new place")


class RunFolder:
    """Paths of one run: config, metrics, loads and so on. Usable wherever a path is (`os.fspath`)."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True):
        """Open the run at `path`, where `~` is expanded.

        Args:
          create: make the folder with its parents, and check that it can be written to; else it must exist.
        """
        self.path = Path(path).expanduser()
        self.config = self.path / "config.gin"
        self.environment, self.report = self.path / "environment.json", self.path / "report.html"
        self.metrics, self.evaluations = self.path / METRICS, self.path / EVALUATIONS
        self.loads_parts, self.loads = self.path / "loads", self.path / "loads.npz"
        self.picture, self.profile = self.path / "plots" / "expert_load.png", self.path / "profile"
        self.checkpoints, self.tensorboard = self.path / "checkpoints", self.path / "tensorboard"
        self.lock = self.path / "lock.json"
        self.retake: Callable[[], bool] = lambda: False  # a lock sets `FolderLock.retake`
        self._made = [folder for folder in (self.path, *self.path.parents) if create and not folder.exists()]
        if create:
            with disk_errors_named(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path / ".writable", "moe_jax\n").unlink(missing_ok=True)
        elif not self.path.is_dir():
            raise UserError(f"run folder {self.path} does not exist; give the --workdir of a run")

    def remove_if_unused(self) -> None:
        """Remove the folder, and those above it, that this object made and that are still empty."""
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def seen(self) -> tuple[int, str]:
        """Return what is equal on two hosts that see the same folder: its number on its disk, and who holds it."""
        job = re.search(r'"id": "(\w+)"', read_text(self.lock) or "")
        return self.path.stat().st_ino, job[1] if job else ""

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def read_environment(self) -> dict[str, Any]:
        """Return what environment.json holds, {} where there is none; a UserError where it is no JSON object."""
        text = read_text(self.environment)
        try:
            environment = {} if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.environment} is not JSON ({error}); remove it") from error
        if not isinstance(environment, dict):
            raise UserError(f"{self.environment} holds a {type(environment).__name__}, not a JSON object; remove it")
        return environment


def read_text(path: Path) -> str | None:
    """Return the UTF-8 text of `path`, None where it does not exist; a UserError when it cannot be read."""
    try:
        return readable(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); remove it or give another --workdir") from error


def readable(path: Path) -> Path:
    """Return `path`; an OSError where it is a pipe or a device, for which a reader may wait for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EIO, "it is a pipe or a device, not a file")
    return path


def environment_record(
    *, devices: Iterable[Mapping[str, Any]] = (), mesh: Mapping[str, int] | None = None, processes: int = 1
) -> dict[str, Any]:
    """Describe the machine and its software as plain data for JSON; the date is today's (UTC).

    Args:
      devices: one record per device, at least `kind` and `platform`; mesh: axis name -> size, in the mesh's order.
    """
    kinds = Counter((str(device["platform"]), str(device["kind"])) for device in devices)
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "packages": packages,
        "machine": {"system": platform.system(), "architecture": platform.machine(), "cpu_count": os.cpu_count()},
        "devices": [{"platform": where, "kind": kind, "count": count} for (where, kind), count in kinds.items()],
        "mesh": {str(axis): int(size) for axis, size in (mesh or {}).items()},
        "processes": int(processes),
        **git_state(),
    }


def git_state(package: Path | None = None) -> dict[str, Any]:
    """Return the commit of the checkout that holds the package, and whether the package's files differ from it.

    Both are None when the package is not tracked by git, for instance when it is installed into a virtual environment
    inside the checkout of another project.
    """
    # From inside the package, so that git answers for the checkout that the package lies in.
    options = {"cwd": package or Path(__file__).resolve().parent.parent, "stdin": subprocess.DEVNULL, "timeout": 10}
    answers = []
    try:
        for words in ("ls-files --error-unmatch __init__.py", "rev-parse HEAD", "status --porcelain -- ."):
            command = ["git", *words.split()]
            answers.append(subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout)
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "uncommitted_changes": None}
    _, commit, changes = answers
    return {"commit": commit.strip(), "uncommitted_changes": bool(changes)}
