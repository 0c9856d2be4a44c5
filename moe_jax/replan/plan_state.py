"""Placements and shapes as JSON data, for checkpoints. Host side."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.collectives.bucket_rows import BucketRows
from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.placement import Placement, PlanShape, build_shape


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


def read_placement(data: dict, like: Placement) -> Placement:
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


def read_shape(data: dict, placement: Placement) -> PlanShape:
    """Return the shape.

    Args:
      data: as `shape_data` gives it, or as runs up to commit 54b32df wrote it, with other sizes of a transfer.
      placement: that ran with it, for such older data: its replicas say how large the transfer has to be.
    """
    if "method" not in data:
        transfers = {name: data[name] and TransferShape(**data[name]) for name in ("ahead", "late")}
        return PlanShape(**{**data, **transfers, "bucket_rows": _rows(data["bucket_rows"])})
    shape = build_shape(placement)
    sizes = {name: max(getattr(shape, name), data[name]) for name in ("home_slots", "bank_rows", "candidates")}
    ahead = shape.ahead and dataclasses.replace(shape.ahead, slots=max(shape.ahead.slots, data["replica_slots"]))
    return dataclasses.replace(shape, ahead=ahead, bucket_rows=_rows(data["bucket_rows"]), **sizes)


def _rows(data: dict | int | None) -> BucketRows | None:
    """Return the rows of buckets; older data has one number for all, and 0 for none."""
    if isinstance(data, int):
        return BucketRows.even(data) if data else None
    return None if data is None else BucketRows(**data)
