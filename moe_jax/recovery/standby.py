"""A supervised process' side: it waits with its imports done until its supervisor gives it a place. No arrays, no jax.

Inputs: a socket to the supervisor, as standard input. Outputs: flags and environment of the place; to the supervisor a
line when this process is ready, then one for every finished step.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys

VARIABLE = "MOE_JAX_STANDBY"  # set by the supervisor
READY = "ready"
_PR_SET_PDEATHSIG = 1


def is_supervised() -> bool:
    """Say whether a supervisor started this process."""
    return VARIABLE in os.environ


def await_place() -> list[str]:
    """Wait for the place of this process in its job; set its environment and return its flags.

    From here on this process ends with its supervisor. SystemExit: that is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _say(READY)
    line = sys.stdin.readline()
    if not line:  # also where it ended before prctl
        sys.exit(1)
    place = json.loads(line)
    os.environ.update(place["environment"])
    return place["flags"]


def report_step(step: int) -> None:
    """Tell the supervisor, if there is one, that a step is finished."""
    if is_supervised():
        _say(str(step))


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a supervisor that is gone ends this process
        os.write(0, f"{line}\n".encode())
