"""Sizes of buckets from pair loads."""

import numpy as np
import pytest

from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.planning.buckets import fullest_pairs

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
