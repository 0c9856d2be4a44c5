"""What a checkpoint holds of a run's plans, as JSON data, and what another run makes of it.

Inputs: placements and shapes of all segments. Outputs: dictionaries that JSON keeps, and back.
"""

from __future__ import annotations

import dataclasses
import json
import operator

import numpy as np

from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning.balancer import BALANCERS
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.plan import Placements
from moe_jax.planning.plan_shape import PlanShape, Shapes

_ARRAYS = ("home", "replicas", "shares")
_SIZES = ("layers", "experts", "devices", "devices_per_node", "bank_rows")  # that a mesh and a config fix


def as_json(data: dict) -> dict:
    """Return the data with lists instead of NumPy's arrays."""
    return json.loads(json.dumps(data, default=operator.methodcaller("tolist")))


def placement_data(placements: Placements) -> dict:
    """Return what distinguishes placements from others on the same devices."""
    fields = (*_ARRAYS, "rule", "program")
    return {name: {field: getattr(own, field) for field in fields} for name, own in placements.items()}


def read_placements(data: dict, like: Placements) -> Placements:
    """Return saved placements, on the devices of `like`."""
    return {
        name: own.replace(
            **{field: np.asarray(data[name][field], np.int32) for field in _ARRAYS},
            rule=tuple(data[name]["rule"]),
            program=data[name].get("program", ""),
        )
        for name, own in like.items()
    }


def shape_data(shapes: Shapes) -> dict:
    """Return the sizes of shapes; the rule after the gate follows from the config."""
    found = {name: dataclasses.asdict(dataclasses.replace(own, after_gate=None)) for name, own in shapes.items()}
    for own in found.values():
        del own["after_gate"]
    return found


def read_shapes(data: dict, first: Shapes) -> Shapes:
    """Return saved shapes, with the slots of this run's `first` shapes for what is decided after the gate."""
    found = {}
    for name, own in first.items():
        rows = data[name]["bucket_rows"]
        parts = {part: (sizes := data[name].get(part)) and TransferShape(**sizes) for part in ("ahead", "spare")}
        parts["bucket_rows"] = rows and BucketRows(**rows)
        found[name] = PlanShape(**{**data[name], **parts, "late": own.late})
    return found


def other_mesh(data: dict, first: Shapes) -> list[str]:
    """Return in which sizes saved shapes are of another mesh or model, 'SIZE was THAT and is THIS' each."""
    return [
        f"{size} was {data[name][size]} and is {getattr(own, size)}"
        for name, own in first.items()
        for size in _SIZES
        if data[name][size] != getattr(own, size)
    ]


def options_of(config: PlannerConfig) -> dict[str, str]:
    """Return what decides which replicas there are and how they travel, as text by field of `PlannerConfig`."""
    names = ("name", "when", "replica_slots", "overlap_degree", "bounded", "transfer", *BALANCERS[config.name].knobs)
    return {name: repr(getattr(config, name)) for name in names}
