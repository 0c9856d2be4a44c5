"""Planners, routers and schedules of files outside of this tree, which `--plugin=FOLDER` names.

A plugin is a Python package with any of the files of KINDS, which register classes as those of this tree do
(`registry.py`). They are imported where a config is first read (`config/gin_files.py`).
"""

import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence

from moe_jax.errors import UserError

KINDS = ("planners", "routers", "schedules")  # docs/adding_a_planner.md, adding_a_router.md, adding_a_schedule.md
_chosen: list[str] = []


def choose(names: Sequence[str]) -> None:
    """Set the plugins of this process, by the names of their packages; a UserError for one that cannot be found."""
    if names and os.getcwd() not in sys.path:  # an installed command does not look where it was started
        sys.path.insert(0, os.getcwd())
    for name in names:
        if all(_spec(name, kind) is None for kind in KINDS):
            files = ", ".join(f"{kind}.py" for kind in KINDS)
            raise UserError(f"--plugin={name} has none of the files {files}; add one to that folder")
    _chosen[:] = names


def load() -> None:
    """Import the files of the plugins; a UserError of one line names a file that raises."""
    for spec in filter(None, (_spec(name, kind) for name in _chosen for kind in KINDS)):
        if spec.name in sys.modules or spec.loader is None:
            continue
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            what, name = " ".join(str(error).split()), spec.name.rpartition(".")[0]
            raise UserError(
                f"--plugin={name}: {spec.origin} raises {type(error).__name__}: {what}; correct it"
            ) from error


def blame(error: BaseException) -> str | None:
    """Return in a line where a plugin raised an error itself, not what it called of moe_jax; None for other errors."""
    files = {spec.origin: name for name in _chosen for kind in KINDS if (spec := _spec(name, kind)) is not None}
    own = os.path.dirname(__file__) + os.sep
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith((own, *files))]
    if not frames or (frame := frames[-1]).filename not in files:
        return None
    what = " ".join(str(error).split())
    return (
        f"--plugin={files[frame.filename]}: {frame.filename}, line {frame.lineno}, in {frame.name}, raises "
        f"{type(error).__name__}: {what}; correct it"
    )


def _spec(name: str, kind: str) -> importlib.machinery.ModuleSpec | None:
    """Return how a file of a plugin is imported, None where it has no such file; a UserError where it is no package."""
    try:
        return importlib.util.find_spec(f"{name}.{kind}")
    except ModuleNotFoundError as error:
        if error.name not in (name.partition(".")[0], name, f"{name}.{kind}"):
            raise UserError(f"--plugin={name} needs the package {error.name!r}, which is not installed") from error
        raise UserError(
            f"--plugin={name} is no folder of Python files here; name one, with dots for slashes"
        ) from error
    except Exception as error:
        raise UserError(f"--plugin={name}: importing it raises {type(error).__name__}: {error}; correct it") from error
