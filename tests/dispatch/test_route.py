"""Routing, packing and regrouping, against loops over Python lists."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.moe.routing import Choice, pack, regroup, route
from moe_jax.parallel.bucket_rows import BucketRows, bucket_layout

ROUTE = jax.jit(route, static_argnames=("num_destinations", "num_groups"))
PACK = jax.jit(pack, static_argnames=("layout", "top_k", "num_groups"))
REGROUP = jax.jit(regroup, static_argnames="layout")


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


def choice_of(expert_ids, keep_mask=None):
    ids = np.array(expert_ids, np.int32)
    return Choice(
        expert_ids=ids,
        weights=np.ones(ids.shape, np.float32),
        keep_mask=np.ones(ids.shape, bool) if keep_mask is None else np.array(keep_mask, bool),
    )


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


def test_regroup_against_lists(case):
    """Each destination draws the counts of one source; together they are what one destination receives."""
    rng = np.random.default_rng(1)
    counts = np.zeros((case.destinations, case.groups), np.int32)
    for source in range(case.destinations):
        filled = rng.integers(0, case.rows + 1)
        np.add.at(counts[source], rng.integers(0, case.groups, filled), 1)
    total = case.destinations * case.rows
    rows = []  # (group, source, row) of each row that is filled
    for source in range(case.destinations):
        group_of_slot = np.repeat(np.arange(case.groups), counts[source])
        rows += [(group, source, source * case.rows + slot) for slot, group in enumerate(group_of_slot)]
    compact = [row for _, _, row in sorted(rows)]
    place_of_row, row_of_place = np.full(total, total), np.full(total, total)
    row_of_place[: len(compact)] = compact
    place_of_row[compact] = np.arange(len(compact))
    grouping = REGROUP(jnp.asarray(counts), layout=case.layout)
    np.testing.assert_array_equal(grouping.group_sizes, counts.sum(axis=0))
    if case.destinations == 1:  # one bucket, whose rows stand in order as they came
        assert grouping.row_of_place is None and grouping.place_of_row is None and compact == list(range(len(compact)))
    else:
        np.testing.assert_array_equal(grouping.row_of_place, row_of_place)
        np.testing.assert_array_equal(grouping.place_of_row, place_of_row)


@pytest.mark.parametrize("me", range(4))
def test_buckets_of_three_lengths_hold_the_same_rows_in_the_same_order(me):
    """4 members, two a node, two shards each: packed and regrouped, every row is the one of buckets all as long."""
    layout, groups, each = bucket_layout(BucketRows(own=7, node=4, far=2), 4, 2), 3, 2
    rng = np.random.default_rng(me)
    fits = np.array([7 if d == me else 4 if d // 2 == me // 2 else 2 for d in range(4)])

    def slots(buckets):
        """Return the (bucket, slot) of each row of a buffer of `buckets` of every member."""
        found = []
        for piece in layout.pieces:
            first = {"far": 0, "node": me // 2 * 2, "own": me}[piece.kind]
            for bucket in range(first * buckets, (first + piece.count) * buckets):
                found += [(bucket, slot) for slot in range(piece.begin, piece.end)]
        return found

    target = np.repeat(np.arange(4), rng.integers(0, fits + 1)).astype(np.int32)[:, None]
    choice = choice_of(target, np.ones_like(target, bool))
    routing = route(choice, jnp.asarray(target), jnp.asarray(rng.integers(0, groups, target.shape)), 4, groups)
    even, three = pack(routing, 0, bucket_layout(7, 4), 1, groups), pack(routing, 0, layout, 1, groups, jnp.int32(me))
    np.testing.assert_array_equal(three.counts, even.counts)
    as_even = [bucket * 7 + slot for bucket, slot in slots(1)]
    np.testing.assert_array_equal(three.choice_of_row, np.asarray(even.choice_of_row)[as_even])
    np.testing.assert_array_equal(np.asarray(as_even)[three.row_of_choice], even.row_of_choice)

    counts = np.zeros((4 * each, groups), np.int32)
    for source in range(4 * each):
        np.add.at(counts[source], rng.integers(0, groups, rng.integers(0, fits[source // each] + 1)), 1)
    counts = jnp.asarray(counts)
    even, three = regroup(counts, bucket_layout(7, 4 * each)), regroup(counts, layout, jnp.int32(me))
    filled = counts.sum()
    as_even = [source * 7 + slot for source, slot in slots(each)]
    np.testing.assert_array_equal(np.asarray(as_even)[three.row_of_place[:filled]], even.row_of_place[:filled])
    np.testing.assert_array_equal(np.asarray(three.place_of_row)[three.row_of_place[:filled]], np.arange(filled))
    np.testing.assert_array_equal(three.group_sizes, even.group_sizes)
