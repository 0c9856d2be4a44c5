"""What configs choose by name: routers, schedules and planners, each with options that it alone reads.

A class of this tree is registered when its package is imported, one of a plugin when that is loaded (`plugins.py`). One
with options has their defaults in `options`, an instance of a frozen dataclass of its file, which checks them. gin
binds them by that dataclass' name (`Hecate.shard_every`); a config's `options` hold those that are not the defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from moe_jax.errors import UserError

T = TypeVar("T")
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
