"""What a checkpoint holds beside its arrays, as one record: from JSON and back.

Inputs: the host data of a checkpoint, of this or an earlier version. Outputs: the same, typed. What is at its default
is not written, and what a checkpoint lacks is at its default.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Name a model of another run, whose weights a checkpoint does not hold."""

    folder: str
    step: int
    parameters: str  # their hash


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overflows:
    """Count the optimistic steps that overflowed, as far as their metrics were read."""

    steps: tuple[int, ...]  # the last of them, from 0
    run_again: int  # of the whole run: they took the complete program after the common one


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostData:
    """Hold what a run keeps beside its arrays."""

    config: str = ""  # the run's, as text
    parameters_only: bool = False  # of a converted model: runs start from it, and none goes on
    tokenizer: str | None = None  # its name
    teacher: ModelIdentity | None = None  # kept after it has left too
    base: ModelIdentity | None = None  # the model under adapters
    skipped_steps: int = 0  # so far, as far as metrics were read
    overflowed_updates: int = 0  # likewise
    overflows: Overflows = Overflows(steps=(), run_again=0)
    changes: tuple[dict, ...] = ()  # what --override changed: {'step', 'binding', 'was', 'is'}
    data: dict | None = None  # of `TokenStream.position`
    plan: dict | None = None  # of `RejitEngine.state`

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HostData:
        """Return the record of what `to_json` returned, in any version."""
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        for name, kind in _NESTED.items():
            if record := known.get(name):
                known[name] = kind(**{field: record[field] for field in kind.__dataclass_fields__})
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        told = {name: value for name, value in vars(self).items() if value != getattr(HostData, name)}
        return told | {name: vars(told[name]) for name in _NESTED.keys() & told.keys()}


_NESTED = {"teacher": ModelIdentity, "base": ModelIdentity, "overflows": Overflows}
