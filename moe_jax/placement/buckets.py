"""Rows of the buckets of an exchange, from the tokens that pairs of devices exchange, and what they carry.

Inputs: pair loads [..., S, D], tokens by (source, destination), S = D; devices of a node are neighbours. Outputs: sizes
of the three kinds of bucket (`collectives/bucket_rows.py`), and rows or bytes that one device sends. Host side.
"""

from __future__ import annotations

import numpy as np

from moe_jax.collectives.bucket_rows import BucketRows, carried


def fullest_pairs(pair_loads: np.ndarray, devices_per_node: int) -> BucketRows:
    """Return the most tokens of a pair: of a device and itself, of two on one node, of two on different nodes.

    0 where there is no such pair.

    Args:
      pair_loads: int [..., D, D], as `routing.pair_loads` counts.
      devices_per_node: Dn, which divides D.
    """
    kinds = pairs_by_kind(pair_loads, devices_per_node)
    return BucketRows(**{kind: int(loads.max(initial=0)) for kind, loads in kinds.items()})


def pairs_by_kind(pair_loads: np.ndarray, devices_per_node: int) -> dict[str, np.ndarray]:
    """Return {'own', 'node', 'far'}: the loads [..., n] of the pairs of each kind of bucket, as in `fullest_pairs`."""
    index = np.arange(pair_loads.shape[-1])
    own = index[:, None] == index[None]
    near = (index[:, None] // devices_per_node == index[None] // devices_per_node) & ~own
    return {"own": pair_loads[..., own], "node": pair_loads[..., near], "far": pair_loads[..., ~near & ~own]}


def bucket_rows(largest_pair: float, error: float = 0.0, multiple: int = 1) -> int:
    """Return rows of a bucket: the predicted largest pair times (1 + error), rounded up to 8 and to `multiple`."""
    step = int(np.lcm(8, multiple))
    return step * max(1, int(np.ceil(largest_pair * (1.0 + error) / step)))


def exchange_bytes(
    rows: BucketRows, devices: int, devices_per_node: int, row_bytes: float = 1
) -> tuple[float, float, float]:
    """Return what one device hands over in one padded exchange: (to itself, to others of its node, to other nodes).

    It is the same on the way back. In rows where `row_bytes` is 1.

    Args:
      rows: of the buckets, as wanted: a bucket gets as many as a farther one at least.
      devices, devices_per_node: D, Dn.
    """
    sent = carried(rows, devices, devices_per_node)
    return sent.own * row_bytes, sent.node * row_bytes, sent.far * row_bytes
