"""The CUDA wheels that compile for GPUs on a machine without one, in an environment of their own.

They are large, and a machine without a GPU needs them for nothing else: they never enter the environment that trains.
The folder and its `installed.txt` are those of `bash scripts/test.sh --gpu-compile`: the first of the two to run makes
it, under another name, and renames it when everything is in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from moe_jax.errors import UserError

PLUGINS = {13: "jax-cuda13-plugin", 12: "jax-cuda12-plugin"}
SIZE = "about 2 GB to download, 4.8 GB on disk"  # measured with jax 0.10.2, the other requirements included
MARK = "installed.txt"
RECORDED = "0.10.2"  # the jax whose wheels scripts/test.sh --gpu-compile takes without --jax
STARTED = "MOE_JAX_CUDA_ENVIRONMENT"  # set in the process that was started with the other Python


def installed_cuda() -> int | None:
    """Return the CUDA version whose wheels this Python has, None without any."""
    for version, name in PLUGINS.items():
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version
    return None


def folder(version: str | None = None) -> Path:
    """Return the environment's folder: `.venv-cuda` in the checkout (or here), or MOE_JAX_VENV with -cuda behind it.

    Another jax than the one that the tests compile with by default has a folder of its own, with its version behind;
    None is the one that runs here.
    """
    root = Path(__file__).resolve().parents[2]
    beside = root if (root / "requirements.txt").exists() else Path.cwd()
    version = version or metadata.version("jax")
    suffix = "-cuda" if version == RECORDED else f"-cuda-{version}"
    return beside / (os.environ.get("MOE_JAX_VENV", ".venv") + suffix)


def wheels() -> str:
    """Return the requirement that installs them: of the jax version that runs here."""
    return f"jax[cuda13]=={metadata.version('jax')}"


def ready(place: Path) -> bool:
    """Say whether the environment holds the wheels of this jax version, whatever else changed since."""
    mark = place / MARK
    return mark.exists() and wheels() in mark.read_text(encoding="utf-8").splitlines()


def install(place: Path) -> None:
    """Make the environment; nothing is left behind if that fails.

    Raises:
      UserError: pip cannot get the wheels, or the disk is full; the message has pip's last line.
    """
    making = place.with_name(f"{place.name}.making-{os.getpid()}")
    print(f"installing {wheels()} into {place} ({SIZE}); minutes", file=sys.stderr)
    listed = Path(__file__).resolve().parents[2] / "requirements.txt"  # of a checkout; else what this Python has
    names = ("flax", "optax", "orbax-checkpoint", "numpy", "absl-py", "gin-config", "matplotlib")
    rest = ["-r", str(listed)] if listed.exists() else [f"{name}=={metadata.version(name)}" for name in names]
    mark = listed.read_text(encoding="utf-8").rstrip("\n") if listed.exists() else "\n".join(rest)
    pip = [str(making / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        for command, what in (
            ([sys.executable, "-m", "venv", str(making)], "a virtual environment cannot be made"),
            ([*pip, *rest, wheels()], f"the CUDA wheels ({wheels()}, {SIZE}) cannot be had"),
        ):
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
                errors = [line for line in said if line.startswith("ERROR")] or said
                raise UserError(f"{what}: {errors[-1]}; nothing was left behind; fix that and give --install again")
        # scripts/environment.sh writes the same
        (making / MARK).write_text(f"{mark}\n{wheels()}\n", encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        making.rename(place)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def run_with_wheels(arguments: list[str], install_them: bool) -> int | None:
    """Make sure that this process has the wheels, or run the same command in one that does.

    Args:
      arguments: of `python -m moe_jax.inspect`; install_them: fetch the wheels where they are missing.

    Returns:
      None where this process has them; else the exit code of the other one.

    Raises:
      UserError: they are missing, with their size and the flag that installs them.
    """
    if installed_cuda() is not None:
        return None
    if os.environ.get(STARTED):
        raise UserError(
            f"{folder()} lacks the CUDA wheels although its {MARK} names them; remove it and --install again"
        )
    place = folder()
    if not ready(place):
        if not install_them:
            raise UserError(
                f"compiling for a GPU needs the CUDA wheels of jax {metadata.version('jax')} ({SIZE}), and neither "
                f"this Python nor {place.name} has them; add --install to put them there, apart from everything else"
            )
        install(place)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, "PYTHONPATH": path, STARTED: "1"}
    command = [str(place / "bin" / "python"), "-m", "moe_jax.inspect", *arguments]
    return subprocess.run(command, env=environment).returncode
