"""In which size a transfer after the gate runs: the whole, its half, a quarter and so on (`TransferShape.halves`).

Inputs: the largest `TransferShape`, and what a decision needs of it. Outputs: which size is the smallest that holds the
need. A step has one branch for each of them and one for nothing; planners price their choices by the same list.

Letters: docs/notation.md; `...` stands for any leading dims; X, m, Cp as in collectives/transfer_shape.py.
"""

from __future__ import annotations

import numpy as np

from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.placement.transfer_sizes import TransferSizes

SIZES = ("offers", "slots", "crossing")


def late_size(needed: TransferSizes, shape: TransferShape) -> np.ndarray:
    """Return the size that holds a need [...]: 0 for nothing, i for the i-th (from 1) of `TransferShape.halves`.

    What no size holds gets the last. The same for arrays on a device: `moe_jax.after_gate.contract.late_size`.
    """
    sizes = shape.halves()
    misses = np.sum([~_holds(needed, size) for size in sizes], axis=0)
    return np.where(np.asarray(needed.slots) > 0, np.minimum(misses, len(sizes) - 1) + 1, 0)


def late_room(needed: TransferSizes, shape: TransferShape) -> np.ndarray:
    """Say whether a need [...] fits the largest size: -> bool [...]."""
    return _holds(needed, shape)


def _holds(needed: TransferSizes, size: TransferShape) -> np.ndarray:
    return (needed.offers <= size.offers) & (needed.slots <= size.slots) & (needed.crossing <= size.crossing)
