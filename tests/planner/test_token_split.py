"""An even split of tokens keeps the device loads of a plan; and the token rule whose padded exchange is cheaper."""

import dataclasses

import numpy as np

from moe_jax.cluster import Cluster
from moe_jax.planning import routing
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import SHARE_ONE, Placement
from moe_jax.planning.plan_session import PlanSession
from moe_jax.planning.shares import choose_split, split_evenly

CLUSTER = Cluster(name="two nodes of two", nodes=2, devices_per_node=2, intra_bandwidth=100.0, inter_bandwidth=10.0)
COST = Cost(cluster=CLUSTER, model_dim=1, hidden_dim=1, dtype_bytes=1)


def placed(replicas):
    """Four experts at home on four devices."""
    return Placement(np.arange(4)[None], np.array(replicas), devices=4, devices_per_node=2, rule="nearest")


# every source has 8 tokens for expert 0; device 2, on the other node, has a replica
TOGETHER = np.zeros((1, 4, 4), int)
TOGETHER[0, :, 0] = 8
# devices 0 and 3 have 16 tokens each for expert 2
APART = np.zeros((1, 4, 4), int)
APART[0, [0, 3], 2] = 16


def test_an_even_split_is_cheaper_where_one_pair_is_full():
    """Node 0 sends all to device 2, node 1 to device 3: 16 rows from 0 to 2; evenly, 8 to each of both."""
    shares = [(0, 2, 2, SHARE_ONE, 0), (0, 2, 3, SHARE_ONE, 1)]
    near = placed([(0, 2, 3)]).replace(rule="shares", shares=shares)
    plan, split = choose_split(near, APART, COST)
    assert split == "even"
    assert [routing.pair_loads(one, APART).max() for one in (near, plan)] == [16, 8]


def test_the_split_in_use_stays_until_the_other_is_clearly_cheaper():
    near = placed([(0, 0, 2)])
    assert choose_split(near, TOGETHER, COST, "even")[1] == "plan"
    level = dataclasses.replace(COST, cluster=dataclasses.replace(CLUSTER, inter_bandwidth=2e9, intra_bandwidth=1e9))
    assert choose_split(near, TOGETHER, level, "even")[1] == "even"  # 12 rows against 10
    assert choose_split(near.replace(replicas=None), TOGETHER, COST, "even")[1] == "even"  # nothing to choose


def test_the_choice_is_in_the_saved_state():
    def session():
        config = PlannerConfig(name="topk_all", replica_slots=1, top_k=1)
        return PlanSession(config, Placement.even(1, 4, 4, 2), COST)

    first, second = session(), session()
    first.predictor.observe(TOGETHER)
    first.propose(1)
    assert first.split in ("plan", "even")
    second.restore(first.state())
    assert second.split == first.split


def test_an_even_split_keeps_device_loads_and_shrinks_the_fullest_bucket():
    # Expert 0 lives on device 0 and has a replica on 1; near tokens stay, so each device serves its own 12 and 4.
    placement = Placement(np.array([[0, 1]]), replicas=[(0, 0, 1)], devices=2, devices_per_node=2)
    loads = np.array([[[12, 0], [4, 0]]])  # [L, S, E]
    even = split_evenly(placement, loads)
    assert even.shares.tolist() == [[0, 0, 0, SHARE_ONE * 3 // 4, -1], [0, 0, 1, SHARE_ONE // 4, -1]]
    assert split_evenly(placement, loads + 0.25) == even  # predicted loads are not whole
    assert split_evenly(Placement.even(1, 2, 2), loads).shares.size == 0
    loads = np.random.default_rng(0).multinomial(4096, np.r_[0.5, np.full(15, 0.5 / 15)], size=(2, 8))
    replicas = [(layer, 0, device) for layer in range(2) for device in range(1, 8)]
    near = Placement.even(2, 16, 8, 2, replicas=replicas)
    before, after = (routing.pair_loads(one, loads) for one in (near, split_evenly(near, loads)))
    assert np.abs((after - before).sum(axis=1)).max() <= 8 * 2  # rounding, of one per source
    assert after.max() < 0.4 * before.max()
