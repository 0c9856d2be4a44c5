"""Routing and packing against loops over Python lists; rows that move: sums in float32, and empty rows unread."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.moe.permute import permute_tokens, unpermute_tokens
from moe_jax.moe.routing import Choice, Parcel, pack, route
from moe_jax.parallel.static_sizes import bucket_layout

ROUTE = jax.jit(route, static_argnames=("num_destinations", "num_groups"))
PACK = jax.jit(pack, static_argnames=("layout", "top_k", "num_groups"))


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


def sorted_choices(case, choice, destination, group):
    """Return per destination the list of (group, choice index) that this source sends there, in order."""
    buckets = [[] for _ in range(case.destinations)]
    for token in range(case.tokens):
        for k in range(case.top_k):
            if choice.keep_mask[token, k]:
                buckets[destination[token, k]].append((group[token, k], token * case.top_k + k))
    return [sorted(bucket) for bucket in buckets]


def test_route_and_pack_against_lists(case):
    """Every pass against lists; all passes together hold every kept choice once."""
    choice, destination, group = case.draw()
    buckets = sorted_choices(case, choice, destination, group)
    routing = ROUTE(choice, destination, group, num_destinations=case.destinations, num_groups=case.groups)
    flat = [index for bucket in buckets for _, index in bucket]
    np.testing.assert_array_equal(routing.choice_at[: len(flat)], flat)
    np.testing.assert_array_equal(routing.choice_at[routing.place_of], np.arange(case.tokens * case.top_k))
    no_choice, no_row = case.tokens * case.top_k, case.destinations * case.rows
    met = []
    for index in range(-(-no_choice // case.rows) + 1):  # one more than can be needed
        parcel = PACK(routing, index, layout=case.layout, top_k=case.top_k, num_groups=case.groups)
        choice_of_row, row_of_choice = np.full(no_row, no_choice), np.full(no_choice, no_row)
        counts = np.zeros((case.destinations, case.groups), int)
        for d, bucket in enumerate(buckets):
            for slot, (g, chosen) in enumerate(bucket[index * case.rows : (index + 1) * case.rows]):
                choice_of_row[d * case.rows + slot] = chosen
                row_of_choice[chosen] = d * case.rows + slot
                counts[d, g] += 1
                met.append(chosen)
        np.testing.assert_array_equal(parcel.choice_of_row, choice_of_row)
        np.testing.assert_array_equal(parcel.row_of_choice.reshape(-1), row_of_choice)
        np.testing.assert_array_equal(parcel.counts, counts)
    assert sorted(met) == sorted(flat)


# Two tokens, two choices; five rows. Choice 0 travels in row 3, choice 1 in row 0, choice 2 in no row of this pass,
# choice 3 in row 4; rows 1 and 2 are empty.
HAND = Parcel(
    choice_of_row=np.int32([1, 4, 4, 0, 3]), row_of_choice=np.int32([[3, 0], [5, 4]]), counts=np.int32([[1, 2]])
)


def test_unpermute_tokens_sums_in_float32():
    """1 and eight times 2^-9: one after the other in bfloat16 each would be lost, the sum is exact in float32."""
    rows = jnp.bfloat16([[1]] + [[2**-9]] * 8)
    parcel = Parcel(
        choice_of_row=np.arange(9, dtype=np.int32),
        row_of_choice=np.arange(9, dtype=np.int32)[None],
        counts=np.int32([[9]]),
    )
    y = unpermute_tokens(rows, jnp.ones((1, 9)), parcel)
    assert y.dtype == jnp.bfloat16 and y[0, 0] == 1 + 2**-6


def test_gradients_do_not_read_empty_rows():
    """A cotangent may hold anything in the rows that nobody fills, and weights of choices elsewhere get zero."""
    x = jnp.float32([[1, 2], [3, 4]])
    d_rows = jnp.float32([[1, 1], [np.nan, np.nan], [np.nan, np.nan], [2, 2], [4, 4]])
    np.testing.assert_array_equal(jax.vjp(lambda x: permute_tokens(x, HAND), x)[1](d_rows)[0], [[3, 3], [4, 4]])
    rows = jnp.where(jnp.isnan(d_rows), jnp.nan, 1.0)
    weights = jnp.float32([[10, 100], [7, 2]])
    _, pull_back = jax.vjp(lambda rows, weights: unpermute_tokens(rows, weights, HAND), rows, weights)
    got_rows, got_weights = pull_back(jnp.float32([[1, 2], [3, 4]]))
    np.testing.assert_array_equal(got_rows, [[100, 200], [0, 0], [0, 0], [10, 20], [6, 8]])
    np.testing.assert_array_equal(got_weights, [[3, 3], [0, 7]])
