"""Placements against an oracle that walks over single tokens, and every way to get one wrong; shapes, tables, sizes;
rows that even or stated loads need at random, against binomials summed exactly."""

import dataclasses
import math

import numpy as np
import pytest
from support.placements import counted_destinations, random_placement

from moe_jax.errors import UserError
from moe_jax.moe.routing import share_of
from moe_jax.planning import routing
from moe_jax.planning.buckets import expected_rows, fullest, overflow_chance, pairs_by_kind
from moe_jax.planning.fastermoe import sizes_everywhere
from moe_jax.planning.placement import Placement, sent_with, transfer_sizes
from moe_jax.planning.plan_shape import build_shape, fill_tables, grow, misfits, table_shapes


def placement_of(seed):
    """Draw homes, replicas, rules and shares; some nodes have shares of their own: those of all in another order."""
    drawn = random_placement(seed, layers=3, experts=8, devices=8, replica_slots=2, rules="any", per_node=4)
    rows = drawn.shares
    own = np.concatenate([rows[:, :3], rows[np.lexsort((-rows[:, 2], rows[:, 1], rows[:, 0])), 3:]], axis=1)
    own[:, 4] = (rows[:, 1] + seed) % 2
    kept = rows[rows[:, 1] % 3 > 0]  # a few experts have shares for one node only
    return drawn.replace(shares=np.concatenate([kept, own]) if len(rows) else None)


def walk_tokens(placement, loads):
    """Send tokens one by one, straight from the rule: counts [L, S, E, D]."""
    counts = np.zeros((*loads.shape, placement.devices), int)
    per_node = placement.devices_per_node
    for layer, source, expert in np.ndindex(loads.shape):
        n = int(loads[layer, source, expert])
        holders = {int(placement.home[layer, expert])}
        holders |= {int(d) for row_l, row_e, d in placement.replicas if (row_l, row_e) == (layer, expert)}
        node = source // per_node
        mine = [r for r in placement.shares if (r[0], r[1]) == (layer, expert)]
        rows = [r for r in mine if r[4] == node] or [r for r in mine if r[4] == -1]
        for i in range(n):
            if placement.rule[layer] == "shares" and rows:
                cum, chosen = 0, None
                for row in sorted(rows, key=lambda r: r[2]):
                    cum += int(row[3])
                    if chosen is None and np.uint32(cum * n) // np.uint32(65536) > i:
                        chosen = int(row[2])
            elif source in holders:
                chosen = source
            elif placement.rule[layer] == "home":
                chosen = int(placement.home[layer, expert])
            else:
                near = sorted(d for d in holders if d // per_node == node) or sorted(holders)
                near = near[source % len(near) :] + near[: source % len(near)]
                chosen = next(d for j, d in enumerate(near) if (j + 1) * n // len(near) > i)
            counts[layer, source, expert, chosen] += 1
    return counts


def read_tables(placement, loads):
    """Count tokens as a step reads the tables: [L, S, E, D]; every slot that gets some must hold their expert."""
    shape = build_shape(placement)
    tables, n = fill_tables(shape, placement), loads.transpose(1, 0, 2)[..., None].astype(np.uint32)
    edges = np.minimum(share_of(tables.dest_num, tables.dest_den[..., None], n), n)
    tokens = np.diff(edges.astype(int), axis=3, prepend=0)
    source, layer, expert, q = np.nonzero(tokens)
    device, slot = np.divmod(tables.dest_slot[source, layer, expert, q], shape.slots)
    np.testing.assert_array_equal(tables.slot_expert[device, layer, slot], expert)
    counts = np.zeros((*loads.shape, placement.devices), int)
    np.add.at(counts, (layer, source, expert, device), tokens[source, layer, expert, q])
    return counts


@pytest.mark.parametrize("seed", range(6))
def test_destinations_match_walked_tokens(seed):
    rng, placement = np.random.default_rng(seed), placement_of(seed)
    loads = rng.integers(0, 30, (3, 8, 8)) * (rng.random((3, 8, 8)) < 0.7)
    counts = counted_destinations(placement, loads)
    np.testing.assert_array_equal(counts, walk_tokens(placement, loads))
    np.testing.assert_array_equal(counts, read_tables(placement, loads))
    many = loads.astype(np.int64) * 35_000  # products with shares of 65,536 pass 32 bits
    np.testing.assert_array_equal(counted_destinations(placement, many), read_tables(placement, many))
    pairs = routing.pair_loads(placement, loads)
    np.testing.assert_array_equal(pairs, counts.sum(2))
    computed, received = routing.expected(placement, loads)  # within one token of a source and expert
    np.testing.assert_allclose(computed, pairs.sum(1), atol=64)
    np.testing.assert_allclose(received, pairs.sum(1) - np.einsum("ldd->ld", pairs), atol=64)
    np.testing.assert_allclose(computed.sum(1), loads.sum((1, 2)))
    largest = {kind: own.max() for kind, own in pairs_by_kind(pairs, 4).items()}
    assert dataclasses.asdict(fullest(placement, loads)) == largest
    largest = {kind: own.max() for kind, own in pairs_by_kind(routing.pair_loads(placement, many), 4).items()}
    assert dataclasses.asdict(fullest(placement, many.astype(np.int32))) == largest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"home": [[0, 2]]}, "layer 0, expert 1, device 2: home outside 1 layers, 2 experts, 2 devices"),
        ({"replicas": [(0, 1, 1)]}, "layer 0, expert 1, device 1: a replica on its own home"),
        ({"shares": [(0, 0, 0, 65535, -1)], "rule": "shares"}, "layer 0, expert 0, device 0: shares .* sum to 65536"),
    ],
)
def test_wrong_placements_name_the_place_and_the_rule(fields, message):
    with pytest.raises(UserError, match=message):
        Placement(**{"home": [[0, 1]], "devices": 2, **fields})


def test_loads_of_another_shape_are_refused():
    with pytest.raises(UserError, match=r"\(1, 2, 3\), but the placement has 1 layers, 2 devices .* and 2 experts"):
        routing.pair_loads(Placement([[0, 1]], devices=2), np.ones((1, 2, 3), int))
    assert Placement.even(2, 4, 2).home.tolist() == [[0, 0, 1, 1]] * 2


def test_even_homes_are_as_even_as_they_can_be():
    for devices, homes in ((3, [3, 3, 2]), (5, [2, 2, 1, 2, 1]), (6, [2, 1, 1, 2, 1, 1]), (12, [1, 1, 0] * 4)):
        even = Placement.even(2, 8, devices).home
        assert (np.diff(even) >= 0).all() and [np.bincount(own, minlength=devices).tolist() for own in even] == [
            homes
        ] * 2
    with pytest.raises(UserError, match=r"^layers \(1\), experts \(6\) and devices \(0\) must be at least 1 each$"):
        Placement.even(1, 6, 0)


SIZES = {"layers": 3, "experts": 8, "devices": 8, "replica_slots": 3, "per_node": 4}


@pytest.mark.parametrize("by_node", [False, True])
def test_a_grown_shape_serves_old_and_new_plans(by_node):
    """Slots, offers and crossings beyond what a plan needs change where things lie, not who is where."""
    first, second = (random_placement(seed, **SIZES) for seed in (0, 1))
    shape = grow(build_shape(first, by_node=by_node), second, replica_slots=4)
    assert misfits(shape, first) == misfits(shape, second) == [] and isinstance(hash(shape), int)
    assert grow(shape, first) == shape
    for placement in (first, second):
        tables, held = fill_tables(shape, placement), np.zeros_like(placement.holds)
        device, layer, slot = np.nonzero(tables.slot_expert >= 0)
        held[layer, tables.slot_expert[device, layer, slot], device] = True
        np.testing.assert_array_equal(held, placement.holds)
        for old, new in zip(_leaves(tables), _leaves(table_shapes(shape)), strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)


def _leaves(tables):
    fields = [getattr(tables, field.name) for field in dataclasses.fields(tables) if field.name != "transfer"]
    return [*fields, tables.transfer.offer, tables.transfer.want]


def test_a_first_transfer_gets_room_and_never_more_offers_than_homes():
    """3 replicas of one expert, from an even shape of one home a device and layer: X = 1, and Cp = 1 + 1."""
    plain = Placement.even(1, 8, 8, 4)
    far = plain.replace(replicas=[(0, 0, 4), (0, 0, 5), (0, 0, 6)])
    need = build_shape(far, by_node=True).ahead
    assert (need.offers, need.slots, need.crossing) == (1, 1, 1)
    grown = grow(build_shape(plain), far, by_node=True, replica_slots=2).ahead
    assert (grown.offers, grown.slots, grown.crossing) == (1, 2, 2)
    assert build_shape(plain).ahead is None and grow(build_shape(plain), plain) == build_shape(plain)


def test_what_does_not_fit_is_named():
    first = random_placement(0, **SIZES)
    plain = build_shape(Placement.even(3, 8, 8, 4))
    assert any(text.startswith("offers: ") and text.endswith("> 0") for text in misfits(plain, first))
    with pytest.raises(UserError, match=r"does not fit the shape of the step \(home_slots: .* build a new shape"):
        fill_tables(plain, first)
    shape = build_shape(first, by_node=True)
    for name in ("offers", "slots", "crossing"):
        small = dataclasses.replace(shape.ahead, **{name: getattr(shape.ahead, name) - 1})
        size = getattr(shape.ahead, name)
        assert misfits(dataclasses.replace(shape, ahead=small), first) == [f"{name}: {size} > {size - 1}"]
    assert misfits(shape, Placement.even(2, 8, 8, 4)) == ["layers: 2 is not 3"]


def counted(placement, layer):
    devices, per_node = placement.devices, placement.devices_per_node
    offers, pairs = [set() for _ in range(devices)], {}
    slots, holders = np.zeros(devices, int), 0
    for at, expert, device in placement.replicas:
        if at == layer:
            home = placement.home[layer, expert]
            offers[home].add(expert)
            slots[device] += 1
            if home // per_node != device // per_node:
                pairs.setdefault((home // per_node, device // per_node), set()).add(expert)
    holders = slots.sum() + sum(len(out) for out in offers)
    return max(map(len, offers)), slots.max(), max(map(len, pairs.values()), default=0), holders


@pytest.mark.parametrize("per_node", [1, 4, 8])
def test_sizes_equal_a_loops(per_node):
    placement = random_placement(3, layers=4, experts=16, devices=8, replica_slots=3, per_node=per_node)
    sizes = placement.sizes
    assert [tuple(int(size[at]) for size in sizes) for at in range(4)] == [counted(placement, at) for at in range(4)]
    # kept by a search
    away, nodes = placement.holds & ~placement.homes, 8 // per_node
    sent = tuple(np.zeros((4, *dims), int) for dims in ((8,), (nodes, nodes), (8,)))
    for expert in range(16):
        sent = sent_with(np, sent, placement.home[:, expert], away[:, expert], per_node)
    for one, two in zip((sizes.offers, sizes.crossing, sizes.slots), sent, strict=True):
        assert (one == two.reshape(4, -1).max(axis=1)).all()
    # nodes of two: experts 0, 1 and 2, at home on devices 0, 0 and 1, on all four devices
    homes = np.array([[0, 0, 1]])[:, :, None] == np.arange(4)
    want = transfer_sizes(homes, ~homes, 2)
    assert [int(size[0]) for size in want] == [2, 3, 3, 12]
    assert want == sizes_everywhere(np.array([[2, 1, 0, 0]]), 2)


@pytest.mark.parametrize(("choices", "share", "rows"), [(40, 0.1, 9), (100, 0.3, 45), (20, 0.5, 19), (30, 0.0, 0)])
def test_the_chance_is_that_of_the_binomial(choices, share, rows):
    exact = sum(math.comb(choices, k) * share**k * (1 - share) ** (choices - k) for k in range(rows + 1, choices + 1))
    got = overflow_chance([choices * share] * 3, choices, rows)
    assert 3 * exact <= got * (1 + 1e-9) and got <= 3 * 1.05 * exact + 1e-250
    assert overflow_chance([choices * share], choices, choices) == 0.0


def test_rows_are_the_fewest_that_hold_it():
    """GPT-MoE-S on 32 devices, 12 layers, one batch and its halves; and unequal means, one of them certain."""
    for mean, choices, chance in ((1024, 32768, 0.01 / 12288), (512, 16384, 0.01 / 24576)):
        rows = expected_rows([mean], choices, chance)
        assert rows % 8 == 0 and overflow_chance([mean], choices, rows) <= chance
        assert overflow_chance([mean], choices, rows - 8) > chance
        assert 1.15 < rows / mean < 1.25
    assert expected_rows([10, 200, 90], 200, 1e-3, step=24) == 216  # all 200 choices may go there
    assert expected_rows([0.0], 64, 1e-3) == 8
