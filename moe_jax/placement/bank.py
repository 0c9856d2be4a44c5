"""Where each expert lies in the bank of parameters, and a change of homes as a permutation of rows.

Inputs: placements. Outputs: bank rows by (layer, expert) order, and for two placements the source of every row. Nothing
here moves parameters. Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.errors import UserError
from moe_jax.placement.placement import Placement


def bank_rows(placement: Placement) -> np.ndarray:
    """Number the experts homed on each device by (layer, expert): int32 [L, E], rows within the device's bank."""
    return numbered(placement.home.ravel()).reshape(placement.home.shape)


def reshard_permutation(old: Placement, new: Placement, rows: int | None = None) -> np.ndarray:
    """Return source int32 [D Rb]: row r of the new bank holds what row source[r] of the old bank held.

    Args:
      rows: Rb, bank rows of a device; the most that either placement needs when not given. Unused rows map to unused
        ones.
    """
    if old.home.shape != new.home.shape or old.devices != new.devices:
        raise UserError(
            f"cannot reshard {old.layers} layers x {old.experts} experts on {old.devices} devices into {new.layers} x "
            f"{new.experts} on {new.devices}; a reshard keeps all three"
        )
    rows = rows or max(most_homes(old), most_homes(new))
    at_old = (old.home * rows + bank_rows(old)).ravel()
    at_new = (new.home * rows + bank_rows(new)).ravel()
    source = np.full(old.devices * rows, -1, np.int32)
    source[at_new] = at_old
    unused = np.setdiff1d(np.arange(len(source), dtype=np.int32), at_old)
    source[source < 0] = unused
    return source


def most_homes(placement: Placement) -> int:
    """Return the most experts, over all layers, that one device homes."""
    return int(np.bincount(placement.home.ravel()).max())


def numbered(key: np.ndarray) -> np.ndarray:
    """Number entries within their group in order of appearance: int [n] -> int32 [n]."""
    order = np.argsort(key, kind="stable")
    rank = np.empty(len(key), np.int32)
    rank[order] = within_group(key[order])
    return rank


def within_group(key: np.ndarray) -> np.ndarray:
    """Number the entries of each group: key int [n], sorted -> rank within the run of equal keys, int64 [n]."""
    if not len(key):
        return np.zeros(0, np.int64)
    index = np.arange(len(key))
    first = np.r_[True, key[1:] != key[:-1]]
    return index - np.maximum.accumulate(np.where(first, index, 0))
