"""The names of the files of a run, in one place.

Inputs: the path of a work folder. Outputs: the paths inside it, and small text files written atomically. Whether a
folder that holds another config is an error is decided by the caller.

    config.gin            what the user bound          metrics.jsonl      one JSON object a step
    operative_config.gin  what the program used        evaluations.jsonl  one JSON object an evaluation
    environment.json      versions, devices, mesh      loads/ loads.npz   parts while training, merged at the end
    checkpoints/          orbax                        plots/ report.html pictures, and all of it on one page
    tensorboard/          events                       profile/           traces of train.profile_steps
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from moe_jax.errors import UserError

TEMPORARY_SUFFIX = ".tmp"

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG_KIND = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}


@contextmanager
def disk_errors_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` raised while `path` is written into one line that names the file, the cause and a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            remedy = "free space on its disk, then give the same command again"
        elif error.errno in _NOT_ALLOWED:
            remedy = "choose a --workdir that you may write to"
        elif error.errno in _WRONG_KIND:
            remedy = "a file stands where a folder is needed, or the reverse: move it away or choose another --workdir"
        else:
            remedy = "check its disk or choose another --workdir"
        raise UserError(f"cannot write {os.fspath(path)} ({error.strerror or error}); {remedy}") from error


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a file to write; it takes the place of `path` only when the block ends without an error.

    The temporary file has one fixed name beside `path`, so a kill leaves at most one, which the next write reuses:
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
            try:
                temporary.unlink(missing_ok=True)
            except OSError:
                pass
            raise


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Replace the content of `path` in one move. Text is written as UTF-8."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with atomic_file(path) as file:
        file.write(data)
    return Path(path)


METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"


class RunFolder:
    """Paths of one run. Usable wherever a path is (`os.fspath`), equal when the paths are."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True):
        """Open the run at `path`.

        Args:
          path: the work folder; `~` is expanded.
          create: make the folder with its parents, and check that it can be written to. Readers give False.

        Raises:
          UserError: the folder cannot be made or written to, or (create=False) does not exist.
        """
        self.path = Path(path).expanduser()
        self._made = [folder for folder in (self.path, *self.path.parents) if create and not folder.exists()]
        if create:
            with disk_errors_named(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
            probe = write_atomically(self.path / ".writable", "moe_jax\n")
            with disk_errors_named(probe):
                probe.unlink(missing_ok=True)
        elif not self.path.is_dir():
            raise UserError(f"run folder {self.path} does not exist; give the --workdir of a run")

    def remove_if_unused(self) -> None:
        """Remove the folder, and those above it, that this object made and that are still empty."""
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __repr__(self) -> str:
        return f"RunFolder({os.fspath(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def config(self) -> Path:
        return self.path / "config.gin"

    @property
    def operative_config(self) -> Path:
        return self.path / "operative_config.gin"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def evaluations(self) -> Path:
        return self.path / EVALUATIONS

    @property
    def loads_parts(self) -> Path:
        return self.path / "loads"

    @property
    def loads(self) -> Path:
        return self.path / "loads.npz"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    def held_config(self, other_than: str) -> str | None:
        """Return the config text this folder holds when it differs from `other_than`, else None.

        None also when the folder holds no config yet. White space at the ends of lines and text is no difference.
        """
        held = read_text(self.config)
        return held if held is not None and _trimmed(held) != _trimmed(other_than) else None

    def write_config(self, text: str) -> Path:
        """Write config.gin: every value of the run, with those marked that the user set."""
        return write_atomically(self.config, _ending_in_newline(text))

    def write_operative_config(self, text: str) -> Path:
        """Write operative_config.gin: what the program used, defaults included."""
        return write_atomically(self.operative_config, _ending_in_newline(text))

    def write_environment(self, record: Mapping[str, Any]) -> Path:
        """Write environment.json from plain data (see `environment_record`)."""
        return write_atomically(self.environment, json.dumps(record, indent=2, allow_nan=False) + "\n")

    def read_environment(self) -> dict[str, Any]:
        """Return environment.json as a dict, empty when there is none.

        Raises:
          UserError: the file is not a JSON object.
        """
        text = read_text(self.environment)
        if text is None:
            return {}
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{self.environment} is not JSON ({error}); remove it") from error
        if not isinstance(record, dict):
            raise UserError(f"{self.environment} holds a {type(record).__name__}, not a JSON object; remove it")
        return record


def read_text(path: Path) -> str | None:
    """Return the UTF-8 text of `path`, None where it does not exist; a UserError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); remove it or give another --workdir") from error


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _ending_in_newline(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "numpy")


def environment_record(
    *,
    devices: Iterable[Mapping[str, Any]] = (),
    mesh: Mapping[str, int] | None = None,
    processes: int = 1,
    now: datetime | None = None,
) -> dict[str, Any]:
    """Describe the machine and its software.

    Args:
      devices: one record per device, at least `kind` and `platform`; other fields are ignored.
      mesh: axis name -> size, in the mesh's order.
      processes: processes of the run.
      now: the date to state (default: today, UTC).

    Returns:
      Plain data for JSON.
    """
    kinds = Counter((str(device["platform"]), str(device["kind"])) for device in devices)
    return {
        "date": (now or datetime.now(UTC)).date().isoformat(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cpu_count": os.cpu_count(),
        },
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
    package = package or Path(__file__).resolve().parent.parent
    unknown = {"commit": None, "uncommitted_changes": None}
    # From inside the package, so that git answers for the checkout that the package lies in.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return unknown
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain", "--", ".")
    if commit is None or changes is None:
        return unknown
    return {"commit": commit, "uncommitted_changes": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
