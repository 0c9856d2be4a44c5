"""Routings that these tests share: what tokens chose, drawn so that the odd cases are there."""

import dataclasses

import numpy as np
import pytest

from moe_jax.moe.routing import Choice
from moe_jax.parallel.bucket_rows import bucket_layout


@dataclasses.dataclass(frozen=True)
class Case:
    """t tokens with K choices each, D destinations with G groups each, buckets of C rows.

    `skew`: 'even'; 'one', every first choice goes to expert 1; 'half', the upper half of the experts gets nothing.
    `dropped`: share of the choices that a capacity dropped.
    """

    tokens: int
    top_k: int
    destinations: int
    groups: int
    rows: int
    skew: str = "even"
    dropped: float = 0.0

    @property
    def experts(self):
        return self.destinations * self.groups

    @property
    def layout(self):
        return bucket_layout(self.rows, self.destinations)

    def draw(self, seed=0):
        """Return Choice, destination [t, K] and group [t, K] as NumPy; a token's experts differ from each other."""
        rng = np.random.default_rng(seed)
        score = rng.random((self.tokens, self.experts))
        if self.skew == "one":
            score[:, 1] = 2
        elif self.skew == "half":
            score[:, self.experts // 2 :] = -1
        expert_ids = np.argsort(-score, axis=1)[:, : self.top_k].astype(np.int32)
        keep_mask = rng.random(expert_ids.shape) >= self.dropped
        weights = rng.normal(size=expert_ids.shape)
        choice = Choice(expert_ids=expert_ids, weights=weights, keep_mask=keep_mask)
        return choice, expert_ids // self.groups, expert_ids % self.groups


CASES = {
    "one_pass": Case(12, 2, 4, 2, 12),
    "several_passes": Case(12, 2, 4, 2, 3),
    "all_to_one": Case(10, 2, 4, 1, 4, skew="one"),
    "empty_experts": Case(9, 3, 2, 4, 8, skew="half"),
    "dropped": Case(16, 2, 4, 2, 5, dropped=0.4),
    "all_dropped": Case(4, 2, 2, 2, 3, dropped=1.1),
    "one_destination": Case(7, 2, 1, 4, 14),
    "one_row_buckets": Case(6, 1, 3, 1, 1),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]
