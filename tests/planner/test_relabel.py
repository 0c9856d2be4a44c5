"""New homes keep what they were made for and move fewer experts; the assignment under it against all permutations."""

import itertools

import numpy as np
import pytest

from moe_jax.planning.hecate import best_assignment, relabelled, shard_homes
from moe_jax.planning.placement import Placement

LAYERS, EXPERTS, DEVICES, PER_NODE = 3, 16, 8, 4
OTHER = np.array([5, 7, 4, 6, 2, 0, 1, 3])  # nodes exchanged, and the devices of each


@pytest.mark.parametrize("size", range(1, 6))
def test_assignment_is_the_best_of_all(size):
    rng = np.random.default_rng(size)
    for _ in range(20):
        value = rng.integers(-3, 4, (size, size))
        column = best_assignment(value)
        every = [value[np.arange(size), list(other)].sum() for other in itertools.permutations(range(size))]
        assert sorted(column) == list(range(size)) and value[np.arange(size), column].sum() == max(every)
    np.testing.assert_array_equal(best_assignment(np.zeros((size, size), int)), np.arange(size))


def test_exchanged_nodes_and_devices_come_back():
    """Homes under other labels, and in one layer two equal devices exchanged besides: no expert moves."""
    rng = np.random.default_rng(0)
    old = rng.permutation(np.repeat(np.arange(DEVICES), LAYERS * EXPERTS // DEVICES)).reshape(LAYERS, EXPERTS)
    np.testing.assert_array_equal(relabelled(OTHER[old], old, DEVICES, PER_NODE), old)
    even = np.arange(EXPERTS) * DEVICES // EXPERTS
    old = np.stack([even, even])
    new = np.stack([even, np.array([1, 0, 2, 3, 4, 5, 6, 7])[even]])
    np.testing.assert_array_equal(relabelled(new, old, DEVICES, PER_NODE), old)


def per_device(home, loads):
    """Return [(rows of experts, loads) of each device] of every layer, sorted within nodes, and nodes sorted."""
    found = []
    for of_layer, load in zip(home, loads, strict=True):
        count = np.bincount(of_layer, minlength=DEVICES)
        total = np.bincount(of_layer, load, minlength=DEVICES)
        pairs = list(zip(count.tolist(), total.round(9).tolist(), strict=True))
        found.append(sorted(sorted(pairs[i : i + PER_NODE]) for i in range(0, DEVICES, PER_NODE)))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_loads_counts_and_memory_stay_and_fewer_experts_move(seed):
    rng = np.random.default_rng(seed)
    even = np.repeat(np.arange(DEVICES), LAYERS * EXPERTS // DEVICES)
    old, new = (rng.permutation(even).reshape(LAYERS, EXPERTS) for _ in range(2))
    home, loads = relabelled(new, old, DEVICES, PER_NODE), rng.random((LAYERS, EXPERTS))
    assert (home != old).sum() < (new != old).sum()
    assert per_device(home, loads) == per_device(new, loads)
    np.testing.assert_array_equal(np.bincount(home.ravel()), np.bincount(new.ravel()))
    # Twice the same loads: the second reshard moves nothing, whatever labels the first one's homes have.
    first = shard_homes(loads, Placement.even(LAYERS, EXPERTS, DEVICES, PER_NODE), tau=4)
    exchanged = first.replace(home=OTHER[first.home])
    assert shard_homes(loads, first, tau=4) is first and shard_homes(loads, exchanged, tau=4) is exchanged
