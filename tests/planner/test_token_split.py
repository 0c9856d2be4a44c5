"""The token rule whose padded exchange is cheaper, by hand and on both sides of the choice."""

import dataclasses

import numpy as np

from moe_jax.cluster import Cluster
from moe_jax.planning import routing
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import SHARE_ONE, Placement
from moe_jax.planning.plan_session import PlanSession
from moe_jax.planning.shares import choose_split

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
