"""Optimistic steps: the two programs of a step, and when overflow is too frequent to hope. Host side.

Inputs: executables, and which finished steps overflowed. Outputs: what the next step runs. The common program has pass
0 of the exchanges alone and no conditional for an overflow; where a bucket overflows it leaves the state as it was and
says so. The same batch then goes through the complete program, which has all passes. `stepper.py` does that some steps
later, when it reads the step's metrics; until then the steps in flight change nothing either.

    common 7 | common 8 | common 9     8 overflows: it and 9 leave the state of 7
             | complete 8 | common 9   once the host has read that

Such a step costs a common one, those in flight behind it, and a complete one. So it must be rare, and where it is not
(more than MOST of the last WINDOW steps) steps go through the complete program at once, until overflow is rare again.
Which program a step runs depends on the passes of earlier steps only: all processes, and a resumed run, do the same.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

from moe_jax.config.command_line import COMPILING

WINDOW, MOST = 8, 1


@dataclasses.dataclass(frozen=True)
class Programs:
    """Executables of one step.

    Attributes:
      common: (state, halted, *inputs) -> (state, metrics), None where steps are not optimistic.
      future: of (state, *inputs) -> (state, metrics), the complete program.
    """

    common: Any
    future: concurrent.futures.Future

    @classmethod
    def of_complete(cls, complete) -> Programs:
        """Return the programs of a step that is not optimistic."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(complete)
        return cls(None, future)

    @classmethod
    def of_common(cls, common, compile_complete: Callable[[], Any]) -> Programs:
        """Return the programs of an optimistic step; the complete one is being compiled from now on, in a thread."""
        thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix=COMPILING)
        future = thread.submit(compile_complete)
        thread.shutdown(wait=False)
        return cls(common, future)

    @property
    def first(self):
        """The executable that a step starts with."""
        return self.complete() if self.common is None else self.common

    def complete(self):
        """Return the complete program; waits until it is compiled."""
        return self.future.result()


class Overflows:
    """Which of the last steps overflowed, as far as their metrics were read.

    Attributes:
      steps: their numbers, from 0.
      run_again: how many steps of the run were run again.
    """

    def __init__(self, steps: list[int] | None = None, run_again: int = 0):
        self.steps, self.run_again = list(steps or ()), run_again

    def observe(self, step: int, overflowed: bool, again: bool) -> None:
        """Take in a finished step; again: whether it was run again."""
        self.run_again += again
        if overflowed:
            self.steps = [*(known for known in self.steps if known > step - 2 * WINDOW), step]

    def are_rare(self, last: int) -> bool:
        """Say whether a step may hope, by the steps up to `last`, all of which are known."""
        return sum(last - WINDOW < step <= last for step in self.steps) <= MOST

    def state(self) -> dict:
        """Return what a checkpoint holds of it, as JSON data."""
        return {"steps": self.steps, "run_again": self.run_again}
