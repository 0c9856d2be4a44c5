"""What a checkpoint holds beside its arrays, as one record: from JSON and back.

Inputs: the host data of a checkpoint, of this or an earlier version. Outputs: the same, typed. What is at its default is
not written, and what a checkpoint lacks is at its default.
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
    config: str = ""  # hash of what the model computes; '' where its parameters say enough


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
        kinds = {"teacher": ModelIdentity, "base": ModelIdentity, "overflows": Overflows}
        return _record(cls, data | {name: _record(kinds[name], data[name]) for name in kinds if data.get(name)})

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return _plain(self)


def _record(kind: type, data: dict[str, Any]):
    """Return a record of this kind from those of the data that are its fields."""
    return kind(**{field.name: data[field.name] for field in dataclasses.fields(kind) if field.name in data})


def _plain(record) -> dict[str, Any]:
    """Return {field: value} of a record, without those at their defaults."""
    values = ((field, getattr(record, field.name)) for field in dataclasses.fields(record))
    return {
        field.name: _plain(value) if dataclasses.is_dataclass(value) else value
        for field, value in values
        if value != field.default
    }
