"""The sizes of a transfer as a loop counts them, and kept by a greedy search."""

import numpy as np
import pytest
from support.placements import random_placement

from moe_jax.planning.sizes import RunningSizes, placement_sizes, transfer_sizes


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
    sizes = placement_sizes(placement)
    assert [tuple(int(size[at]) for size in sizes) for at in range(4)] == [counted(placement, at) for at in range(4)]
    # any leading dims: the layers twice, homes left out of the holders
    away = placement.holds.copy()
    np.put_along_axis(away, placement.home[:, :, None], False, axis=2)
    twice = transfer_sizes(placement.home, np.stack([away, away]), per_node)
    assert all((one == two).all() for one, two in zip(sizes, twice, strict=True))


def test_a_search_keeps_the_same_sizes():
    placement = random_placement(5, layers=3, experts=8, devices=8, replica_slots=3, per_node=2)
    running = RunningSizes(3, 8, 2)
    away = placement.holds.copy()
    np.put_along_axis(away, placement.home[:, :, None], False, axis=2)
    for expert in range(8):
        running.add(placement.home[:, expert], away[:, expert])
    assert all((one == two).all() for one, two in zip(running.sizes(), placement_sizes(placement), strict=True))
