"""Planners, routers and schedules of files outside of this tree, which `--plugin=FOLDER` names.

A plugin is a Python package with any of the files of KINDS. Each is imported by the package that it adds to, at the end
of that package's own files and before the config that takes its knobs is made; so a plugin is chosen before any of
these packages is imported, by the flag (config/command_line.py) or by `choose`.
"""

import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from moe_jax.errors import UserError

# planners.py declares planners (docs/adding_a_planner.md), routers.py routers, schedules.py schedules; knobs.py has
# KNOBS, dataclasses whose fields MoEConfig gets for schedules
KINDS = ("planners", "routers", "schedules", "knobs")
_chosen: list[str] = []


def choose(names: Sequence[str]) -> None:
    """Set the plugins of this process, by the names of their packages.

    Raises:
      UserError: one cannot be found, or what it adds to was imported already.
    """
    if names and list(names) == _chosen:
        return
    if names and "moe_jax.planning" in sys.modules:
        raise UserError(
            f"plugin {names[0]!r} comes too late: choose plugins before other parts of moe_jax are imported"
        )
    if names and os.getcwd() not in sys.path:  # an installed command does not look where it was started
        sys.path.insert(0, os.getcwd())
    for name in names:
        with_files = [kind for kind in KINDS if _spec(name, kind) is not None]
        if not with_files:
            files = ", ".join(f"{kind}.py" for kind in KINDS)
            raise UserError(f"--plugin={name} has none of the files {files}; add one to that folder")
    _chosen[:] = names


def named_in(argv: Sequence[str]) -> list[str]:
    """Return the plugins that a command line names, for a command whose flags are made of their knobs."""
    words = (*argv, "")
    given = [word.partition("=") for word in words]
    return [value or after for (flag, _, value), after in zip(given, words[1:], strict=False) if flag == "--plugin"]


def load(kind: str) -> list[ModuleType]:
    """Import one file of each plugin that has it; a UserError of one line names a file that raises."""
    loaded = []
    for name in _chosen:
        spec = _spec(name, kind)
        if spec is None or spec.loader is None:
            continue
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            what = " ".join(str(error).split())
            raise UserError(
                f"--plugin={name}: {spec.origin} raises {type(error).__name__}: {what}; correct it"
            ) from error
        loaded.append(module)
    return loaded


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
