"""The CUDA wheels that compile for GPUs on a machine without one, in an environment of their own.

They are large and needed for nothing else, so they never enter the environment that trains. `bash scripts/test.sh
--gpu-compile` uses the same folder and `installed.txt`; whichever runs first makes it, under another name until it is
whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from moe_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = {13: "jax-cuda13-plugin", 12: "jax-cuda12-plugin"}
SIZE = "about 2 GB to download, 4.8 GB on disk"  # measured with jax 0.10.2, the other requirements included
MARK = "installed.txt"
RECORDED = "0.10.2"  # the jax whose wheels scripts/test.sh --gpu-compile takes without --jax
WHEELS = f"jax[cuda13]=={metadata.version('jax')}"  # the requirement that installs them
STARTED = "MOE_JAX_CUDA_ENVIRONMENT"  # set in the process that was started with the other Python


def installed_cuda() -> int | None:
    """Return the CUDA version whose wheels this Python has, None without any."""
    for version, name in PLUGINS.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            return version
    return None


def folder(version: str | None = None) -> Path:
    """Return the environment's folder: `.venv-cuda` in the checkout (or here), or MOE_JAX_VENV with -cuda behind it.

    Another jax than the one that the tests compile with by default has a folder of its own, with its version behind;
    None is the one that runs here.
    """
    parent = ROOT if (ROOT / "requirements.txt").exists() else Path.cwd()
    version = version or metadata.version("jax")
    suffix = "-cuda" if version == RECORDED else f"-cuda-{version}"
    return parent / (os.environ.get("MOE_JAX_VENV", ".venv") + suffix)


def ready(place: Path) -> bool:
    """Say whether the environment holds the wheels of this jax version, whatever else changed since."""
    mark = place / MARK
    return mark.exists() and WHEELS in mark.read_text(encoding="utf-8").splitlines()


def install(place: Path) -> None:
    """Make the environment; nothing is left behind if that fails.

    Raises:
      UserError: pip cannot get the wheels, or the disk is full; the message has pip's last line.
    """
    making = place.with_name(f"{place.name}.making-{os.getpid()}")
    print(f"installing {WHEELS} into {place} ({SIZE}); minutes", file=sys.stderr)
    listed = ROOT / "requirements.txt"  # of a checkout; else what this Python has
    names = ("flax", "optax", "orbax-checkpoint", "numpy", "absl-py", "gin-config", "matplotlib")
    rest = ["-r", str(listed)] if listed.exists() else [f"{name}=={metadata.version(name)}" for name in names]
    mark = listed.read_text(encoding="utf-8").rstrip("\n") if listed.exists() else "\n".join(rest)
    pip = [str(making / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        for command, what in (
            ([sys.executable, "-m", "venv", str(making)], "a virtual environment cannot be made"),
            ([*pip, *rest, WHEELS], f"the CUDA wheels ({WHEELS}, {SIZE}) cannot be had"),
        ):
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
                errors = [line for line in said if line.startswith("ERROR")] or said
                raise UserError(f"{what}: {errors[-1]}; nothing was left behind; fix that and give --install again")
        # scripts/environment.sh writes the same
        (making / MARK).write_text(f"{mark}\n{WHEELS}\n", encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        making.rename(place)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def run_with_wheels(arguments: list[str], install_them: bool) -> int | None:
    """Return None where this process has the wheels, else the exit code of the same command in one that does.

    Args:
      arguments: of `python -m moe_jax.inspect`; install_them: fetch the wheels where they are missing.

    Raises:
      UserError: they are missing, with their size and the flag that installs them.
    """
    if installed_cuda() is not None:
        return None
    place = folder()
    if os.environ.get(STARTED):
        raise UserError(f"{place} lacks the CUDA wheels although its {MARK} names them; remove it and --install again")
    if not ready(place):
        if not install_them:
            raise UserError(
                f"compiling for a GPU needs the CUDA wheels of jax {metadata.version('jax')} ({SIZE}), and neither "
                f"this Python nor {place.name} has them; add --install to put them there, apart from everything else"
            )
        install(place)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, STARTED: "1"}
    command = [str(place / "bin" / "python"), "-m", "moe_jax.inspect", *arguments]
    return subprocess.run(command, env=environment).returncode
