"""Sizes of buckets from pair loads, and what an exchange of such buckets hands over."""

import numpy as np
import pytest

from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.planning.buckets import exchange_bytes, fullest_pairs

PAIRS = np.array(
    [
        [[9, 1, 2, 3], [4, 5, 1, 0], [0, 7, 2, 6], [1, 1, 1, 1]],
        [[0, 0, 0, 0], [8, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]
)


@pytest.mark.parametrize(
    "per_node, want",
    [
        (2, BucketRows(own=9, node=8, far=7)),
        (1, BucketRows(own=9, node=0, far=8)),
        (4, BucketRows(own=9, node=8, far=0)),
    ],
)
def test_fullest_pairs(per_node, want):
    assert fullest_pairs(PAIRS, per_node) == want


def test_bytes_of_an_exchange():
    """8 devices, 4 a node: 3 others on the node, 4 elsewhere; a near bucket has the rows of a farther one at least."""
    assert exchange_bytes(BucketRows(own=100, node=10, far=1), 8, 4, row_bytes=2) == (200, 60, 8)
    assert exchange_bytes(BucketRows(own=1, node=2, far=10), 8, 4) == (10, 30, 40)
