"""What a run ran on: versions, processors, devices, mesh, commit.

Inputs: devices and mesh as plain data (this package does not import jax). Outputs: a dict for environment.json, without
host names, user names and paths.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

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
