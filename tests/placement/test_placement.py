"""Placement against an oracle that walks over single tokens, and every way to get one wrong."""

import numpy as np
import pytest
from support.placements import random_placement

from moe_jax.errors import UserError
from moe_jax.planning import routing
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape, fill_tables


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
    tokens = np.diff(np.minimum(tables.dest_num * n // tables.dest_den[..., None], n).astype(int), axis=3, prepend=0)
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
    counts = routing.destinations(placement, loads)
    np.testing.assert_array_equal(counts, walk_tokens(placement, loads))
    np.testing.assert_array_equal(counts, read_tables(placement, loads))
    pairs = routing.pair_loads(placement, loads)
    np.testing.assert_array_equal(pairs, counts.sum(2))
    computed, received = routing.expected(placement, loads)  # within one token of a source and expert
    np.testing.assert_allclose(computed, pairs.sum(1), atol=64)
    np.testing.assert_allclose(received, pairs.sum(1) - np.einsum("ldd->ld", pairs), atol=64)
    np.testing.assert_allclose(computed.sum(1), loads.sum((1, 2)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"home": [[0, 2]]}, "layer 0, expert 1, device 2: home outside 1 layers, 2 experts, 2 devices"),
        ({"replicas": [(0, 1, 1)]}, "layer 0, expert 1, device 1: a replica on its own home"),
        ({"shares": [(0, 0, 0, 65535)], "rule": "shares"}, "layer 0, expert 0, device 0: shares .* sum to 65536"),
    ],
)
def test_wrong_placements_name_the_place_and_the_rule(fields, message):
    with pytest.raises(UserError, match=message):
        Placement(**{"home": [[0, 1]], "devices": 2, **fields})


def test_loads_of_another_shape_and_uneven_homes_are_refused():
    with pytest.raises(UserError, match=r"\(1, 2, 3\), but the placement has 1 layers, 2 devices .* and 2 experts"):
        routing.pair_loads(Placement([[0, 1]], devices=2), np.ones((1, 2, 3), int))
    assert Placement.even(2, 4, 2).home.tolist() == [[0, 0, 1, 1]] * 2
    with pytest.raises(UserError, match=r"experts \(6\) must be a positive multiple of devices \(4\)"):
        Placement.even(1, 6, 4)
