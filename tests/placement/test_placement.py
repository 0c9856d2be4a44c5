"""Placement against an oracle that walks over single tokens, and every way to get one wrong."""

import numpy as np
import pytest

from moe_jax.errors import UserError
from moe_jax.planning import routing
from moe_jax.planning.placement import Placement


def random_placement(rng, layers=3, experts=8, devices=8, per_node=4, rule=None):
    """Draw homes, 0-3 replicas of an expert, and shares for some (expert, node) pairs."""
    home = rng.integers(0, devices, (layers, experts))
    rule = tuple(rng.choice(["nearest", "home", "shares"], layers)) if rule is None else (rule,) * layers
    replicas, shares = [], []
    for layer in range(layers):
        for expert in range(experts):
            others = [d for d in range(devices) if d != home[layer, expert]]
            extra = rng.choice(others, rng.integers(0, 4), replace=False).tolist()
            replicas += [(layer, expert, d) for d in extra]
            if rule[layer] == "shares" and rng.random() < 0.7:
                holders = [int(home[layer, expert]), *extra]
                for node in range(-1, devices // per_node):
                    if rng.random() < 0.6:
                        cut = np.sort(rng.integers(0, 65537, len(holders) - 1))
                        part = np.diff(np.r_[0, cut, 65536])
                        shares += [(layer, expert, d, p, node) for d, p in zip(holders, part, strict=True)]
    return Placement(home, np.array(replicas), np.array(shares) if shares else None, rule, devices, per_node)


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


@pytest.mark.parametrize("seed", range(6))
def test_destinations_match_walked_tokens(seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng)
    loads = rng.integers(0, 30, (3, 8, 8)) * (rng.random((3, 8, 8)) < 0.7)
    counts = routing.destinations(placement, loads)
    np.testing.assert_array_equal(counts, walk_tokens(placement, loads))
    np.testing.assert_array_equal(counts.sum(3), loads)
    pairs = routing.pair_loads(placement, loads)
    np.testing.assert_array_equal(pairs, counts.sum(2))
    computed, received = routing.expected(placement, loads)  # within one token of a source and expert
    np.testing.assert_allclose(computed, pairs.sum(1), atol=64)
    np.testing.assert_allclose(received, pairs.sum(1) - np.einsum("ldd->ld", pairs), atol=64)
    np.testing.assert_allclose(computed.sum(1), loads.sum((1, 2)))


def test_even_homes_neighbouring_experts_and_needs_a_multiple():
    np.testing.assert_array_equal(Placement.even(2, 4, 2).home, [[0, 0, 1, 1]] * 2)
    with pytest.raises(UserError, match=r"experts \(6\) must be a positive multiple of devices \(4\)"):
        Placement.even(1, 6, 4)


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


def test_loads_of_another_shape_are_refused():
    with pytest.raises(UserError, match=r"\(1, 2, 3\), but the placement has 1 layers, 2 devices .* and 2 experts"):
        routing.pair_loads(Placement([[0, 1]], devices=2), np.ones((1, 2, 3), int))
