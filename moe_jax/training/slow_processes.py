"""Which processes of a job are slow: each times the same work on its first device, and all compare.

A step tells nothing: in it all wait for the slowest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

_SLOW = 1.5  # times the median


def probe_seconds() -> float:
    """Return how long this process' first device takes for a product of matrices, at best; other devices do not count.

    A step tells nothing: in it all wait for the slowest.
    """
    device, seconds = jax.local_devices()[0], []
    side = 512 if device.platform == "cpu" else 4096  # 64 MiB: a training run leaves little memory
    matrix = jax.device_put(np.ones((side, side), np.float32), device)
    for _ in range(4):  # the first one compiles
        began = time.monotonic()
        jax.block_until_ready(_product(matrix))
        seconds.append(time.monotonic() - began)
    return min(seconds)


@jax.jit
def _product(matrix):
    return matrix @ matrix


def slow_processes(seconds: Sequence[float], names: Sequence[str]) -> str:
    """Return in words which processes take more than _SLOW times the median for the same work, '' where none does."""
    median = statistics.median_low(seconds)  # of two the faster one
    slow = [
        f"process {index} ({name}) takes {own / median:.1f} times as long as the median"
        for index, (own, name) in enumerate(zip(seconds, names, strict=True))
        if own > _SLOW * median
    ]
    return f"{', '.join(slow)} for the same work on its device: all wait for it" if slow else ""
