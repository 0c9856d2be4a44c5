"""Rows of the buckets of an exchange: from the tokens that pairs of devices exchange, or at random.

Pair loads [..., S, D] are tokens by (source, destination), S = D; devices of a node are neighbours. Buckets have three
kinds (`parallel/bucket_rows.py`): of a device and itself, of two on one node, of two on different nodes.
"""

from __future__ import annotations

import math

import numpy as np

from moe_jax.parallel.bucket_rows import BucketRows


def fullest_pairs(pair_loads: np.ndarray, devices_per_node: int) -> BucketRows:
    """Return the most tokens of a pair of each kind, 0 where there is no such pair.

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


def overflow_chance(means, choices: int, rows: int) -> float:
    """Return a bound, close to exact where it is small, on the chance that some pair has more than `rows` rows.

    The rows of a pair are a binomial count: each of the source's choices goes to the destination or not. (That a
    token's K experts differ makes the count vary a little less.) Chances of pairs are added: they may depend on each
    other.

    Args:
      means: float [n], expected rows of each pair.
      choices: of one source.
    """
    mean = np.minimum(np.asarray(means, np.float64).ravel(), choices)
    least = rows + 1  # the fewest rows that overflow
    if least > choices:
        return 0.0
    sure = mean >= least
    p = np.clip(mean[~sure] / choices, 1e-300, None)
    log_ways = math.lgamma(choices + 1) - math.lgamma(least + 1) - math.lgamma(choices - least + 1)
    log_terms = log_ways + least * np.log(p) + (choices - least) * np.log1p(-p)
    ratio = (choices - least) / (least + 1) * p / (1 - p)  # of a term to the one before; it falls from term to term
    tail = np.exp(np.minimum(log_terms, 0.0)) / np.maximum(1 - ratio, 1e-9)
    return float(np.sum(np.minimum(tail, 1.0)) + np.count_nonzero(sure))


def expected_rows(means, choices: int, chance: float, step: int = 8) -> int:
    """Return the fewest rows, a multiple of `step`, of which some pair needs more with this chance at most.

    Args:
      means, choices: as in `overflow_chance`.
    """
    fewest, most = 1, max(1, math.ceil(choices / step))
    while fewest < most:
        middle = (fewest + most) // 2
        if overflow_chance(means, choices, middle * step) <= chance:
            most = middle
        else:
            fewest = middle + 1
    return fewest * step
