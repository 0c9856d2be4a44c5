"""What a part of the GPU benchmark is given, raises where it does not apply, and takes times with."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping

OF_THE_PARENT = frozenset(("name", "status", "seconds", "reason", "rows", "stderr"))
LONGEST = 0.05  # seconds of one case in a row


class NotHere(Exception):
    """What a part raises if it does not apply to this machine, jax or commit."""


class Context:
    """What a part is given.

    Attributes:
      tiny: whether sizes are those of the tests.
      scratch: folder for temporary files that the children of this day share.
    """

    def __init__(self, pipe: int, scratch: pathlib.Path, tiny: bool):
        self.pipe, self.scratch, self.tiny = pipe, scratch, tiny

    def send(self, **message):
        os.write(self.pipe, json.dumps(message, default=float).encode() + b"\n")

    def record(self, **values):
        """Keep values in the day's JSON under this part, besides what the parent says of it."""
        taken = values.keys() & OF_THE_PARENT
        if taken:
            raise ValueError(f"{sorted(taken)} are what the parent says of a part; choose other names")
        self.send(values=values)

    def row(self, what: str, result: str):
        """Add a row to the page's table of this item."""
        self.send(row=[what, result])

    def kill_me(self):
        """Have this process killed by SIGKILL; the part counts as done."""
        self.send(end="kill")
        time.sleep(3600)

    def of_size(self, full, tiny):
        return tiny if self.tiny else full


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
