"""Dropless in bounded memory: the same buckets, as many passes as the fullest one needs.

Enters: a function that runs one pass. Leaves: the sum of all passes. Pass 0 stands outside any branch, so that what
overlaps it still does; the rest runs only when some device's bucket overflowed, and keeps no residuals but its inputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.varying import cast_varying, varying_axes


def passes_needed(largest, rows: int, most: int, axes: tuple[str, ...]):
    """Return int32 [], passes of `rows` rows that the fullest bucket on any device takes; equal on all devices.

    Args:
      largest: int32 [], rows of this device's fullest bucket.
      rows: C; most: static bound on the passes; 1 needs nothing from the other devices.
      axes: all mesh axes: every device must take the same branch, for the branches hold collectives.
    """
    if most == 1:
        return jnp.ones((), jnp.int32)
    needed = jnp.maximum((largest + rows - 1) // rows, 1)
    axes = tuple(axis for axis in axes if axis in varying_axes(needed))
    return lax.pmax(needed, axes) if axes else needed


def run_passes(one_pass, needed, most: int, lean: bool = False):
    """Return one_pass(0) + ... + one_pass(needed - 1).

    Args:
      one_pass: function of the pass index (int or int32 []) to an array; may hold collectives.
      needed: int32 [], at least 1, equal on all devices.
      most: static bound on `needed`; 1 leaves no branch in the program.
      lean: save nothing inside the branch of a pass, and so no copy of the bank per pass. Right only where all
        collectives of a pass span the same devices: with MP or ESP groups beside them XLA:CPU (jax 0.10.2) ran a
        recomputed branch and its gradient in different orders on different devices, and hung.
    """
    first = one_pass(0)
    if most == 1:
        return first
    zeros = cast_varying(jnp.zeros(first.shape, first.dtype), varying_axes(first))

    # Both checkpoints stand outside their branch: what a branch saves is a copy, of the bank too, for every pass and
    # layer; what a checkpointed call saves is its inputs, and the bank is the same input every time.
    @jax.checkpoint
    def lean_pass(index):
        return lax.cond(index < needed, one_pass, lambda _: zeros, index)

    def any_pass(index):
        return lax.cond(index < needed, jax.checkpoint(one_pass), lambda _: zeros, index)

    later = lean_pass if lean else any_pass

    def body(total, index):
        return total + later(index), None

    @jax.checkpoint
    def rest(needed):
        return lax.cond(
            needed > 1, lambda: lax.scan(body, zeros, jnp.arange(1, most, dtype=jnp.int32))[0], lambda: zeros
        )

    return first + rest(needed)
