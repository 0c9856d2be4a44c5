"""Clocks: calls in interleaved rounds, and arrays spread over a mesh of one or several processes.

Inputs: named functions without arguments. Outputs: seconds of every call. The calls are interleaved, so that a time in
which the machine is slow affects all of them alike. On several processes all must make the same calls in the same
order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding


def interleaved_seconds(calls: Mapping[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Call everything once to warm up, then `rounds` times in turn; return {name: seconds [rounds]}."""
    for call in calls.values():
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - started)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return {name: median}."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def spread(shape: tuple[int, ...], sharding: NamedSharding, seed: int = 0, scale: float = 1.0):
    """Return a float32 array of normal numbers with this sharding; equal values where it is replicated."""

    def part(index):
        starts = [0 if piece.start is None else piece.start for piece in index]
        sizes = [len(range(*piece.indices(size))) for piece, size in zip(index, shape, strict=True)]
        rng = np.random.default_rng([seed, *starts])
        return scale * rng.standard_normal(sizes, dtype=np.float32)

    return jax.make_array_from_callback(shape, sharding, part)


def placed(array, sharding: NamedSharding):
    """Return a host array, the same on all processes, with this sharding."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
