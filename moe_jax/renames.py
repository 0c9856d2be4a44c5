"""What things were called up to commit 54b32df, and what they are called now.

Inputs: a binding, a config text, a record of metrics, the plan of a checkpoint or the name of a fit as an older version
wrote it. Outputs: the same in today's names. A user's gin file is not translated: config/gin_files.py refuses
an old name and shows the new one. What a run wrote itself is translated wherever it is read, so that old runs resume,
plot and replay. docs/glossary.md says why each name changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# binding -> binding
BINDINGS: dict[str, str] = {
    "ModelConfig.rematerialize": "ModelConfig.refetch_replicas",
    "PlannerConfig.alpha": "PlannerConfig.balance_threshold",
    "PlannerConfig.guest_slots": "PlannerConfig.replica_slots",
    "PlannerConfig.n": "PlannerConfig.skipped_devices",
    "train.accumulate": "train.grad_accum_steps",
}

# today's binding -> value -> value
VALUES: dict[str, dict[str, str]] = {
    "MoEConfig.transport": {"pairwise": "ppermute"},
    "PlannerConfig.transfer": {"shift": "auto", "permute": "auto", "gather": "auto", "broadcast": "auto"},
}

# of these a user is told what replaces them by the class that they bind: no value of today does the same
REPLACED: frozenset[str] = frozenset({"PlannerConfig.transfer"})

# key of metrics.jsonl -> key; a key that ends in an underscore is a prefix
METRICS: dict[str, str] = {
    "guests": "replicas",
}

# key of the plan in a checkpoint, at any depth -> key
PLAN: dict[str, str] = {
    "copies": "replicas",
    "guest_slots": "replica_slots",
    "skeleton": "shape",
}

# what a fit of a calibration file is of, before the colon and the group's size -> what
FITS: dict[str, str] = {
    "pairwise": "ppermute",
}


def binding_of_today(binding: str) -> str:
    """Return today's `Name.field` for one of today or of an older version."""
    return BINDINGS.get(binding, binding)


def value_of_today(binding: str, value: Any) -> Any:
    """Return today's value of one of today's bindings."""
    return VALUES.get(binding, {}).get(value, value) if isinstance(value, str) else value


def config_text_of_today(text: str) -> str:
    """Return a config text whose lines `Name.field = value` have today's names and values."""
    return "".join(_line_of_today(line) for line in text.splitlines(keepends=True))


def _line_of_today(line: str) -> str:
    binding, equals, value = line.partition(" = ")
    binding = binding_of_today(binding)
    for old, new in VALUES.get(binding, {}).items():
        value = value.replace(f"'{old}'", f"'{new}'", 1)
    return binding + equals + value


def metrics_of_today(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of metrics with today's keys; one that holds both keeps today's."""
    renamed = {_metric_of_today(name): value for name, value in record.items()}
    return {**renamed, **{name: record[name] for name in record if name in renamed}}


def _metric_of_today(name: str) -> str:
    for old, new in METRICS.items():
        if old.endswith("_") and name.startswith(old):
            return new + name.removeprefix(old)
    return METRICS.get(name, name)


def plan_of_today(data: Any) -> Any:
    """Return the plan of a checkpoint, JSON data, with today's keys."""
    if isinstance(data, Mapping):
        return {PLAN.get(key, key): plan_of_today(value) for key, value in data.items()}
    return [plan_of_today(value) for value in data] if isinstance(data, list) else data


def fit_of_today(name: str) -> str:
    """Return the name of a fit in a calibration file, such as `ppermute:8`."""
    what, colon, size = name.partition(":")
    return FITS.get(what, what) + colon + size
