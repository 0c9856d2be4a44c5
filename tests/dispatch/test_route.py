"""Routing, packing and regrouping: by hand, and against loops over Python lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.moe.routing import Choice, largest_bucket, pack, regroup, route
from moe_jax.parallel.bucket_rows import BucketRows, bucket_layout

ROUTE = jax.jit(route, static_argnames=("num_destinations", "num_groups"))
PACK = jax.jit(pack, static_argnames=("rows", "top_k", "num_groups"))
REGROUP = jax.jit(regroup, static_argnames="rows")


def choice_of(expert_ids, keep_mask=None):
    ids = np.array(expert_ids, np.int32)
    return Choice(
        expert_ids=ids,
        weights=np.ones(ids.shape, np.float32),
        keep_mask=np.ones(ids.shape, bool) if keep_mask is None else np.array(keep_mask, bool),
    )


# Four tokens, two choices each, experts 0 and 1 on destination 0, experts 2 and 3 on destination 1:
#   choice   0  1 | 2  3 | 4  5 | 6  7        (token * 2 + k)
#   expert   0  3 | 2  3 | 3  1 | 0  1        choice 4 is dropped
# In the order (destination, expert, token): 0 6 | 5 7 || 2 | 1 3, then the dropped 4.
HAND = choice_of([[0, 3], [2, 3], [3, 1], [0, 1]], [[1, 1], [1, 1], [0, 1], [1, 1]])


def hand_routing():
    return ROUTE(HAND, HAND.expert_ids // 2, HAND.expert_ids % 2, num_destinations=2, num_groups=2)


def test_route_by_hand():
    routing = hand_routing()
    np.testing.assert_array_equal(routing.choice_at, [0, 6, 5, 7, 2, 1, 3, 4])
    np.testing.assert_array_equal(routing.place_of, [0, 5, 4, 6, 7, 2, 1, 3])
    np.testing.assert_array_equal(routing.destination, [0, 1, 1, 1, 2, 0, 0, 0])
    np.testing.assert_array_equal(routing.start, [0, 2, 4, 5, 7])
    assert largest_bucket(routing, 2) == 4  # choices 0 6 5 7 go to destination 0
    assert {leaf.dtype.name for leaf in jax.tree.leaves(routing)} == {"int32"}


def test_pack_by_hand():
    # buckets of three rows: destination 0 takes 0 6 5, then 7; destination 1 takes 2 1 3
    first = PACK(hand_routing(), 0, rows=3, top_k=2, num_groups=2)
    np.testing.assert_array_equal(first.choice_of_row, [0, 6, 5, 2, 1, 3])
    np.testing.assert_array_equal(first.row_of_choice, [[0, 4], [3, 5], [6, 2], [1, 6]])  # 6: no row in this pass
    np.testing.assert_array_equal(first.counts, [[2, 1], [1, 2]])
    second = PACK(hand_routing(), 1, rows=3, top_k=2, num_groups=2)
    np.testing.assert_array_equal(second.choice_of_row, [7, 8, 8, 8, 8, 8])  # 8: an empty row
    np.testing.assert_array_equal(second.row_of_choice, [[6, 6], [6, 6], [6, 6], [6, 0]])
    np.testing.assert_array_equal(second.counts, [[0, 1], [0, 0]])


def test_regroup_by_hand():
    # source 0 sent one row for group 0 and two for group 1, source 1 two for group 0; its third row is empty:
    #   row     0  1  2 | 3  4  5
    #   group   0  1  1 | 0  0  -       compact: 0 3 4 | 1 2
    grouping = REGROUP(jnp.int32([[1, 2], [2, 0]]), rows=3)
    np.testing.assert_array_equal(grouping.place_of_row, [0, 3, 4, 1, 2, 6])
    np.testing.assert_array_equal(grouping.row_of_place, [0, 3, 4, 1, 2, 6])
    np.testing.assert_array_equal(grouping.group_sizes, [3, 2])


def test_regroup_nothing():
    grouping = REGROUP(jnp.zeros((3, 2), jnp.int32), rows=2)
    np.testing.assert_array_equal(grouping.place_of_row, [6] * 6)
    np.testing.assert_array_equal(grouping.row_of_place, [6] * 6)
    np.testing.assert_array_equal(grouping.group_sizes, [0, 0])


# MaxText's all-to-all example: rows that each source (line) sends to each destination, where each of its buckets starts
# among its own rows, and where its rows start among those that the destination received.
SENT = np.array([[1, 2, 0, 3], [4, 0, 1, 2], [0, 3, 2, 1], [2, 1, 4, 0]])
INPUT_OFFSETS = [[0, 1, 3, 3], [0, 4, 4, 5], [0, 0, 3, 5], [0, 2, 3, 7]]
OUTPUT_OFFSETS = np.array([[0, 0, 0, 0], [1, 2, 0, 3], [5, 2, 1, 5], [5, 5, 3, 6]])


def test_route_maxtext_offsets():
    rng = np.random.default_rng(0)
    for sizes, offsets in zip(SENT, INPUT_OFFSETS, strict=True):
        # seven tokens with one choice each, in any order; those without a destination are dropped
        target = rng.permutation(np.append(np.repeat(np.arange(4), sizes), [4] * (7 - sum(sizes)))).astype(np.int32)
        choice = choice_of(target[:, None], target[:, None] < 4)
        routing = ROUTE(choice, target[:, None] % 4, np.zeros((7, 1), np.int32), num_destinations=4, num_groups=1)
        np.testing.assert_array_equal(routing.start, [*offsets, sum(sizes)])
        parcel = PACK(routing, 0, rows=4, top_k=1, num_groups=1)
        np.testing.assert_array_equal(parcel.counts[:, 0], sizes)


def test_regroup_maxtext_offsets():
    for destination in range(4):
        received = SENT[:, destination]  # the transpose
        grouping = REGROUP(jnp.int32(received[:, None]), rows=4)
        starts = np.asarray(grouping.place_of_row).reshape(4, 4)[:, 0]
        sent_any = received > 0
        np.testing.assert_array_equal(starts[sent_any], OUTPUT_OFFSETS[sent_any, destination])
        assert grouping.group_sizes[0] == sum(received)


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
    assert largest_bucket(routing, case.groups) == max(map(len, buckets))
    flat = [index for bucket in buckets for _, index in bucket]
    np.testing.assert_array_equal(routing.choice_at[: len(flat)], flat)
    np.testing.assert_array_equal(routing.choice_at[routing.place_of], np.arange(case.tokens * case.top_k))
    no_choice, no_row = case.tokens * case.top_k, case.destinations * case.rows
    met = []
    for index in range(-(-no_choice // case.rows) + 1):  # one more than can be needed
        parcel = PACK(routing, index, rows=case.rows, top_k=case.top_k, num_groups=case.groups)
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


def test_pack_takes_a_traced_index(case):
    choice, destination, group = case.draw()
    routing = ROUTE(choice, destination, group, num_destinations=case.destinations, num_groups=case.groups)
    packed = functools.partial(PACK, routing, rows=case.rows, top_k=case.top_k, num_groups=case.groups)
    jax.tree.map(np.testing.assert_array_equal, packed(jnp.int32(1)), packed(1))


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
    grouping = REGROUP(jnp.asarray(counts), rows=case.rows)
    np.testing.assert_array_equal(grouping.row_of_place, row_of_place)
    np.testing.assert_array_equal(grouping.place_of_row, place_of_row)
    np.testing.assert_array_equal(grouping.group_sizes, counts.sum(axis=0))


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
    even, three = pack(routing, 0, 7, 1, groups), pack(routing, 0, layout, 1, groups, jnp.int32(me))
    np.testing.assert_array_equal(three.counts, even.counts)
    as_even = [bucket * 7 + slot for bucket, slot in slots(1)]
    np.testing.assert_array_equal(three.choice_of_row, np.asarray(even.choice_of_row)[as_even])
    np.testing.assert_array_equal(np.asarray(as_even)[three.row_of_choice], even.row_of_choice)

    counts = np.zeros((4 * each, groups), np.int32)
    for source in range(4 * each):
        np.add.at(counts[source], rng.integers(0, groups, rng.integers(0, fits[source // each] + 1)), 1)
    even, three = regroup(jnp.asarray(counts), 7), regroup(jnp.asarray(counts), layout, jnp.int32(me))
    filled = counts.sum()
    as_even = [source * 7 + slot for source, slot in slots(each)]
    np.testing.assert_array_equal(np.asarray(as_even)[three.row_of_place[:filled]], even.row_of_place[:filled])
    np.testing.assert_array_equal(np.asarray(three.place_of_row)[three.row_of_place[:filled]], np.arange(filled))
    np.testing.assert_array_equal(three.group_sizes, even.group_sizes)
