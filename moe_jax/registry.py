"""What configs choose by name: routers, schedules and planners, each with options that it alone reads.

A class of this tree is registered when its package is imported. One with options has their defaults in `options`, an
instance of a frozen dataclass of its file, which checks them. gin binds them by that dataclass' name
(`Hecate.shard_every`); a config's `options` hold those that are not the defaults.

Planners, routers and schedules of files outside of this tree are plugins, which `--plugin=FOLDER` names: packages with
any of the files of KINDS, which register classes likewise. They are imported where a config is first read
(`config/gin_files.py`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from moe_jax.errors import UserError

T = TypeVar("T")
KINDS = ("planners", "routers", "schedules")  # docs/adding_a_planner.md, adding_a_router.md, adding_a_schedule.md
_chosen: list[str] = []
# dataclass' name -> (the config whose `options` hold them, their defaults)
OPTIONS: dict[str, tuple[str, Any]] = {}


class Registry(dict[str, Any]):
    """The classes of one kind by name; `binding` is where a config names one, such as 'MoEConfig.router'."""

    def __init__(self, binding: str):
        super().__init__()
        self.binding = binding

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Declare the decorated class under a name, and its options."""

        def declare(cls):
            assert name not in self, f"{self.binding} = {name!r} is registered twice"
            if cls.options is not None:
                _, known = OPTIONS.setdefault(type(cls.options).__name__, (self.binding.split(".")[0], cls.options))
                assert type(known) is type(cls.options), f"options {type(known).__name__} are registered twice"
            cls.name = name
            self[name] = cls
            return cls

        return declare

    def find(self, name: str) -> Any:
        """Return the class of a name, or raise a UserError for an unknown one."""
        if name not in self:
            raise UserError(
                f"{self.binding} ({name!r}) must be one of {', '.join(sorted(self))}, or name the --plugin that has it"
            )
        return self[name]

    def check_read(self, options: Collection[Any], names: Collection[str]) -> None:
        """Raise a UserError for options of classes of this kind of which none is among `names`."""
        for own in options:
            readers = [name for name, cls in self.items() if type(cls.options) is type(own)]
            if readers and not set(readers) & set(names):
                field = next(field for field in dataclasses.fields(own) if getattr(own, field.name) != field.default)
                raise UserError(
                    f"{type(own).__name__}.{field.name} ({getattr(own, field.name)!r}) is read by {self.binding} = "
                    f"{' or '.join(map(repr, readers))}, not by {' or '.join(map(repr, sorted(names)))}; leave it out, "
                    "or choose another"
                )


ROUTERS = Registry("MoEConfig.router")
SCHEDULES = Registry("MoEConfig.schedule")
PLANNERS = Registry("PlannerConfig.name")


def options_in(config: Any, defaults: T) -> T:
    """Return the options of the class of `defaults` that a config holds, `defaults` where it holds none."""
    return next((own for own in config.options if type(own) is type(defaults)), defaults)


def replaced(options: Collection[Any], own: Any) -> tuple[Any, ...]:
    """Return options with `own` in place of others of its class, those that are defaults left out, sorted by name."""
    kept = [one for one in (*(one for one in options if type(one) is not type(own)), own) if one != type(one)()]
    return tuple(sorted(kept, key=lambda one: type(one).__name__))


def choose_plugins(names: Sequence[str]) -> None:
    """Set the plugins of this process, by the names of their packages; a UserError for one that cannot be found."""
    if names and os.getcwd() not in sys.path:  # an installed command does not look where it was started
        sys.path.insert(0, os.getcwd())
    for name in names:
        if all(_spec(name, kind) is None for kind in KINDS):
            files = ", ".join(f"{kind}.py" for kind in KINDS)
            raise UserError(f"--plugin={name} has none of the files {files}; add one to that folder")
    _chosen[:] = names


def load_plugins() -> None:
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


def plugin_mistake(error: BaseException) -> str | None:
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
