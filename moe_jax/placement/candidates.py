"""The holders a token may choose between, as slices of sorted rows.

Inputs: who holds what, and share rows. Outputs: `Candidates`, which `routing.py` looks tokens up in.

Letters: docs/notation.md; h holder rows, m share rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Lists of candidates as slices of two sorted row tables.

    Devices of a node have neighbouring ids, so in rows sorted by (layer, expert, device) the holders of an expert on
    one node are a slice too.

    Attributes:
      holder: int32 [h], devices by rising (layer, expert, device).
      start, count: int32 [L, E], the slice of all holders.
      node_start, node_count: int32 [L, E, Nn], the slice on one node.
      share_device: int32 [m], share_num: int64 [m], running sums of shares within a slice.
      share_start, share_count: int32 [L, E, Nn]; count 0 where no shares apply.
    """

    holder: np.ndarray
    start: np.ndarray
    count: np.ndarray
    node_start: np.ndarray
    node_count: np.ndarray
    share_device: np.ndarray
    share_num: np.ndarray
    share_start: np.ndarray
    share_count: np.ndarray


def build_candidates(holds: np.ndarray, shares: np.ndarray, nodes: int) -> Candidates:
    """Sort holders and share rows into slices.

    Args:
      holds: bool [L, E, D]; shares: int [m, 5], rows (layer, expert, device, share, node), sorted; nodes: Nn.
    """
    layers, experts, devices = holds.shape
    held = holds.reshape(layers, experts, nodes, devices // nodes)
    node_count = held.sum(axis=3, dtype=np.int32)
    count = node_count.sum(axis=2, dtype=np.int32)
    start = (np.cumsum(count.ravel()) - count.ravel()).reshape(count.shape).astype(np.int32)
    node_start = (np.cumsum(node_count.ravel()) - node_count.ravel()).reshape(node_count.shape).astype(np.int32)
    share = _share_slices(shares, layers, experts, nodes)
    return Candidates(np.nonzero(holds)[2].astype(np.int32), start, count, node_start, node_count, *share)


def _share_slices(
    shares: np.ndarray, layers: int, experts: int, nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    layer, expert, device, share, node = shares.T.astype(np.int64)
    key = (layer * experts + expert) * (nodes + 1) + node + 1  # column 0: rows for every node without its own
    count = np.bincount(key, minlength=layers * experts * (nodes + 1))
    start = np.cumsum(count) - count
    before = np.concatenate([[0], np.cumsum(share)])
    num = before[1:] - before[start[key]] if len(key) else np.zeros(0, np.int64)
    count = count.reshape(layers, experts, nodes + 1)
    start = start.reshape(layers, experts, nodes + 1)
    own = count[:, :, 1:] > 0
    slice_start = np.where(own, start[:, :, 1:], start[:, :, :1]).astype(np.int32)
    slice_count = np.where(own, count[:, :, 1:], count[:, :, :1]).astype(np.int32)
    return device.astype(np.int32), num, slice_start, slice_count
