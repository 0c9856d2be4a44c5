"""Rows of a bucket, from the tokens that a pair of devices is predicted to exchange."""

from __future__ import annotations

import numpy as np


def bucket_rows(largest_pair: float, error: float = 0.0, multiple: int = 1) -> int:
    """Return rows of a bucket: the predicted largest pair times (1 + error), rounded up to 8 and to `multiple`."""
    step = int(np.lcm(8, multiple))
    return step * max(1, int(np.ceil(largest_pair * (1.0 + error) / step)))
