"""An even split keeps the device loads of a plan and makes its fullest bucket small."""

import numpy as np

from moe_jax.planning import routing
from moe_jax.planning.placement import SHARE_ONE, Placement
from moe_jax.planning.shares import split_evenly


def test_by_hand():
    """Expert 0 lives on device 0 and has a replica on 1; near tokens stay, so each device serves its own 12 and 4."""
    placement = Placement(np.array([[0, 1]]), replicas=[(0, 0, 1)], devices=2, devices_per_node=2)
    loads = np.array([[[12, 0], [4, 0]]])  # [L, S, E]
    even = split_evenly(placement, loads)
    assert even.shares.tolist() == [[0, 0, 0, SHARE_ONE * 3 // 4, -1], [0, 0, 1, SHARE_ONE // 4, -1]]
    for one in (even, placement):
        assert routing.pair_loads(one, loads).sum(axis=1).tolist() == [[12, 4]]
    assert (
        split_evenly(placement, loads + 0.25).shares.tolist() == even.shares.tolist()
    )  # predicted loads are not whole
    assert split_evenly(Placement.even(1, 2, 2), loads).shares.size == 0


def test_device_loads_stay_and_the_fullest_bucket_shrinks():
    rng = np.random.default_rng(0)
    loads = rng.multinomial(4096, np.r_[0.5, np.full(15, 0.5 / 15)], size=(2, 8))
    replicas = [(layer, 0, device) for layer in range(2) for device in range(1, 8)]
    near = Placement.even(2, 16, 8, 2, replicas=replicas)
    even = split_evenly(near, loads)
    assert (
        np.abs(routing.pair_loads(even, loads).sum(axis=1) - routing.pair_loads(near, loads).sum(axis=1)).max() <= 8 * 2
    )  # rounding, of one per source
    assert routing.pair_loads(even, loads).max() < 0.4 * routing.pair_loads(near, loads).max()
