"""The array operations that NumPy and jax.numpy write differently, so that a rule is written once for both.

A rule that is decided after the gate runs on the device, and on the host to say what the device did. It takes `xp`:
NumPy as `NUMPY` here, or jax.numpy as `after_gate/quotas.py` has it. Beside all functions that both modules share, `xp`
has `put` and `repeat`.
"""

from __future__ import annotations

import typing

import numpy as np


class NumpyArrays:
    """numpy, and the operations that jax.numpy lacks."""

    def __getattr__(self, name: str) -> typing.Any:
        return getattr(np, name)

    def put(self, array, index, value):
        """Return the array with `value` at `index`; the old one is spent, here it is the same."""
        array[index] = value
        return array

    def repeat(self, step, carry, going, times: int):
        """Return step(step(... carry)) for as long as `going(carry)` holds, at most `times` steps."""
        while times and going(carry):
            carry, times = step(carry), times - 1
        return carry


NUMPY = NumpyArrays()
