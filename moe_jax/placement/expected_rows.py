"""Rows of a bucket that holds what is to be expected, where tokens choose at random.

Inputs: the mean rows of each pair of devices (source, destination), and the chance that is allowed. Outputs: rows of a
bucket. The rows of a pair are a binomial count: each of the source's choices goes to the destination or not. (That a
token's K experts differ makes the count vary a little less.) Chances of pairs are added, so pairs need not be
independent. Host side.
"""

from __future__ import annotations

import math

import numpy as np


def overflow_chance(means, choices: int, rows: int) -> float:
    """Return a bound, close to exact where it is small, on the chance that some pair has more than `rows` rows.

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
    log_terms = _log_choose(choices, least) + least * np.log(p) + (choices - least) * np.log1p(-p)
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


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
