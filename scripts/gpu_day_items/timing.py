"""Times of jitted functions, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

LONGEST = 0.05


def seconds_of(cases: Mapping[str, tuple[Callable, tuple]], rounds: int = 7, calls: int = 10) -> dict[str, float]:
    """Return {name: seconds of a call}, medians over rounds.

    Args:
      cases: name -> (function, arguments); the first call of each compiles and is not timed.
      rounds: each times every case in turn.
      calls: of a case in a row, waited for together, so that the host's work hides behind the device's; fewer where
        they would take more than `LONGEST` seconds.
    """
    import jax

    times: dict[str, list[float]] = {name: [] for name in cases}
    in_a_row = {}
    for name, (function, arguments) in cases.items():
        jax.block_until_ready(function(*arguments))
        started = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        in_a_row[name] = max(1, min(calls, int(LONGEST / (time.perf_counter() - started))))
    for _ in range(rounds):
        for name, (function, arguments) in cases.items():
            started = time.perf_counter()
            result = None
            for _ in range(in_a_row[name]):
                result = function(*arguments)
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - started) / in_a_row[name])
    return {name: statistics.median(found) for name, found in times.items()}


def shown(seconds: float) -> str:
    """Return seconds in a unit that suits them."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.1f} us"
