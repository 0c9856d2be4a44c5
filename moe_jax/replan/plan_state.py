"""Placements and skeletons as JSON data, for checkpoints. Host side."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.placement import Placement, Skeleton


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


def skeleton_data(skeleton: Skeleton) -> dict:
    """Return all fields of a skeleton; tuples become lists in a file."""
    return dataclasses.asdict(skeleton)


def read_skeleton(data: dict) -> Skeleton:
    """Return the skeleton, its rounds as tuples again; older checkpoints have two fields more, which are dropped."""
    fields = {name: value for name, value in data.items() if name not in ("schedule", "remat")}
    return Skeleton(**{**fields, "rounds": _tuples(data["rounds"])})


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
