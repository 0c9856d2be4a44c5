"""Array steps that several planners share, written once for NumPy and jax.numpy.

A rule that plans on the host and decides after the gate on the device takes either as `xp`.
Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np


def put(array, index, value):
    """Return the array with `value` at `index`; the old one is spent: in NumPy it is the same."""
    if not isinstance(array, np.ndarray):
        return array.at[index].set(value)
    array[index] = value
    return array


LOOPS = {}  # of jax.numpy that which `moe/after_gate.py` has: nothing here imports jax


def loop(xp, step, carry, times, going=None):
    """Return the carry after turns 0 to times - 1 of `step(turn, carry)`, or once `going(carry)` no longer holds."""
    if xp is not np:
        return LOOPS[xp](step, carry, times, going)
    turn = 0
    while turn < times and (going is None or going(carry)):
        carry, turn = step(turn, carry), turn + 1
    return carry


def falling(xp, values):
    """Sort the last dim from large to small, ties by rising id: [..., n] -> ids [..., n]."""
    return xp.argsort(-values, axis=-1, stable=True)


def home_loads(xp, totals, home, devices: int):
    """Add expert totals at their homes: totals [L, E], home int [L, E] -> [L, D]."""
    return ((home[:, :, None] == xp.arange(devices)[None, None]) * totals[:, :, None]).sum(axis=1)
