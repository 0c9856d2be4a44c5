"""Plans of a model with several segments as one value: a tuple with each segment's, first layers first.

Inputs and outputs: placements, shapes, loads, planners: of one segment as they are, of several in a tuple. So the
re-jit engine reads the same for both. Host side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moe_jax.placement import Placement


def each(function: Callable, *values) -> Any:
    """Return function(*values) of one segment, or the tuple of it of each of several."""
    if isinstance(values[0], tuple):
        return tuple(function(*own) for own in zip(*values, strict=True))
    return function(*values)


def listed(value) -> tuple:
    """Return a tuple with each segment's part, also of one segment."""
    return value if isinstance(value, tuple) else (value,)


def by_name(names: tuple[str, ...], value) -> Any:
    """Return the tree that a compiled step takes: the only segment's part, or {segment: part}."""
    return dict(zip(names, value, strict=True)) if isinstance(value, tuple) else value


def own_loads(loads: np.ndarray, placement: Placement | tuple[Placement, ...]):
    """Return int64 [L, D, E] of each segment, from the counts of all layers, without the zeros of what it lacks."""
    found, first = [], 0
    for own in listed(placement):
        found.append(np.asarray(loads[first : first + own.layers, : own.devices, : own.experts], np.int64))
        first += own.layers
    return tuple(found) if isinstance(placement, tuple) else found[0]


def homes_differ(placement, other) -> bool:
    """Say whether an expert's home in one is not its home in the other."""
    return any((own.home != there.home).any() for own, there in zip(listed(placement), listed(other), strict=True))
