"""Plans as values and as JSON data: {segment: ...} of the segments with experts, first layers first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape


def each(function: Callable, first: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """Return {segment: function(its parts of all that is given)}, segments in the order of the first."""
    return {name: function(own, *(other[name] for other in others)) for name, own in first.items()}


def own_loads(loads: np.ndarray, placement: dict[str, Placement]) -> dict[str, np.ndarray]:
    """Return int64 [L, D, E] of each segment, from the counts of all layers, without the zeros of what it lacks."""
    found, first = {}, 0
    for name, own in placement.items():
        found[name] = np.asarray(loads[first : first + own.layers, : own.devices, : own.experts], np.int64)
        first += own.layers
    return found


def homes_differ(placement: dict[str, Placement], other: dict[str, Placement]) -> bool:
    """Say whether an expert's home in one is not its home in the other."""
    return any((own.home != other[name].home).any() for name, own in placement.items())


def to_lists(value):
    """Return nested lists and numbers for arrays and NumPy numbers in dictionaries and lists."""
    if isinstance(value, dict):
        return {name: to_lists(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def placement_data(placement: Placement) -> dict:
    """Return what distinguishes a placement from others on the same devices."""
    names = ("home", "replicas", "shares")
    return {**{name: getattr(placement, name).tolist() for name in names}, "rule": list(placement.rule)}


def read_placement(like: Placement, data: dict) -> Placement:
    """Return the placement on the devices of `like`."""
    arrays = {name: np.asarray(data[name], np.int32) for name in ("home", "replicas", "shares")}
    return like.replace(**arrays, rule=tuple(data["rule"]))


def shape_data(shape: PlanShape) -> dict:
    """Return the sizes of a shape; the rule after the gate follows from the config."""
    fields = {
        field.name: getattr(shape, field.name) for field in dataclasses.fields(shape) if field.name != "after_gate"
    }
    return {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value for name, value in fields.items()
    }


def read_shape(data: dict) -> PlanShape:
    """Return the shape that `shape_data` wrote down."""
    records = {"ahead": TransferShape, "late": TransferShape, "bucket_rows": BucketRows}
    read = {name: data[name] and record(**data[name]) for name, record in records.items()}
    return PlanShape(**{**data, **read})
