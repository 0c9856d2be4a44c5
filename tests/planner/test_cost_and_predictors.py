"""The cost model on numbers done by hand, predictors, a session's memory, and the split of tokens that is cheaper."""

import dataclasses

import numpy as np
import pytest
from support.options import planner_config

from moe_jax.cluster import Cluster
from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning import routing
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import PRICES, Cost, LayerPrices, predicted_layer_seconds
from moe_jax.planning.placement import SHARE_ONE, Placement, TransferSizes
from moe_jax.planning.plan import choose_split
from moe_jax.planning.plan_shape import build_shape
from moe_jax.replan.session import PlanSession, Predictor


def make_prices(price="executor", cluster=None, form="auto"):
    """M = 2, F = 3, 4 bytes: a token 8 bytes, an expert 48; v = 48 / 24 = 2 tokens/s, W = 16 bytes/s."""
    if cluster is None:
        cluster = Cluster(name="hand", nodes=1, devices_per_node=4, intra_bandwidth=16.0, flops=48.0)
    return PRICES[price](cluster=cluster, model_dim=2, hidden_dim=3, form=form)


def make_cost(price="executor", cluster=None, form="auto", **fields):
    return Cost(prices=make_prices(price, cluster, form), **fields)


PAPER = {"price": "paper", "prefetch": Prefetch(schedule="pro_prophet")}


def sizes(offers=0, slots=0, crossing=0, holders=0):
    return TransferSizes(*(np.array(size) for size in (offers, slots, crossing, holders)))


def test_papers_layer_time_by_hand():
    # H max 10: T_FEC = 5 s. R max 6: T_A2A = 6 x 8 / 16 = 3 s. s (D - n) = 8 holders: 8 x 48 / (4 x 16) = 6 s.
    cost = make_cost(**PAPER)
    computed, received, moved = np.array([10.0, 2, 4, 4]), np.array([6.0, 0, 1, 1]), sizes(9, 9, 9, holders=8)
    assert cost.prices.compute(computed) == 5 and cost.prices.exchange(received) == 3
    assert cost.prices.transfer(moved, 4) == 6
    # Scheduler: 12 + 15 + max(0, 6 - 5) + max(0, 6 - 10) = 28; off: 12 + 15 + 6 + 6 = 39.
    assert cost.layer(computed, received, moved) == 28
    assert make_cost(price="paper").layer(computed, received, moved) == 39
    # One second of attention hides the last exposed second of Trans.
    assert make_cost(**PAPER, attention_seconds=1.0).layer(computed, received, moved) == 27


def two_level(**fields):
    """Two nodes of two devices: 16 bytes/s a device, 8 bytes/s a node, starts of 1 and 2 seconds."""
    sizes = {"nodes": 2, "devices_per_node": 2, "intra_bandwidth": 16.0, "inter_bandwidth": 8.0, "flops": 48.0}
    return Cluster(**{**sizes, "intra_latency": 1.0, "inter_latency": 2.0, **fields})


def test_a_transfer_costs_what_the_executor_sends():
    # One node of four, flat: (2 + 3) 3/4 experts of 48 bytes over 16 bytes/s; holders play no part.
    assert make_prices().transfer(sizes(2, 3, 9, 99), 4) == 5 * 0.75 * 48 / 16
    # 2 x 2, flat: of X = 2 half crosses nodes: 48 bytes a device, 96 a node: 12 s and 2 to start; m = 3: 18 and 2.
    # By node: A 2 x 1/2 x 48 / 16 = 3 and 1; B Cp = 2: (2 - 1) 2 / 2 x 48 = 48 a device, 96 a node: 12 and 2; C 4.5, 1.
    for form, seconds in (("flat", 34.0), ("by_node", 23.5), ("auto", 23.5)):
        prices = make_prices(cluster=two_level(), form=form)
        assert prices.transfer(sizes(2, 3, 2), 4) == seconds
    assert make_prices(cluster=two_level()).transfer(sizes(1, 1, 8), 4) == 16  # flat: 6 + 2 twice; by node: 50 and more
    assert make_prices(cluster=two_level()).transfer(sizes(), 4) == 0


def test_schedules_hide_what_their_programs_hide():
    # Trans = Agg = 11.25 s, experts 5 and 10 s, attention 4 and 8 s, exchange 4 x 3 s and experts 3 x 5 s next to.
    computed, received, moved = np.array([10.0, 2, 4, 4]), np.array([6.0, 0, 1, 1]), sizes(2, 3)
    hides = {"none": 0.0, "hecate": 4 + 8, "pro_prophet": 4 + 5 + 11.25}
    for schedule, hidden in hides.items():
        cost = make_cost(attention_seconds=4.0, prefetch=Prefetch(schedule=schedule))
        assert cost.layer(computed, received, moved) == pytest.approx(27 + 22.5 - hidden), schedule
    # in halves no exchange of 1.5 s outlasts attention's 2 or experts' 2.5; next to attention a are 0.5 and 2.5 left
    halves = make_cost(attention_seconds=4.0, prefetch=Prefetch(halves=True))
    assert halves.layer(computed, received, moved) == pytest.approx(15 + 22.5 - 0.5 - 2.5)


def run(kind, history, **fields):
    predictor = Predictor(build_planner(PlannerConfig(predictor=kind, **fields)).config)
    for value in history:
        predictor.observe(np.array([[[value, 100 - value]]]))
    return predictor


def test_predictions_by_hand_and_their_error():
    for kind, history, expected in (
        ("last", [20, 40], 40.0),
        ("window", [90, 0, 20, 40], 20.0),  # mean of 0, 20, 40
    ):
        found = run(kind, history, window=3).predict()[0, 0]
        np.testing.assert_allclose(found, [expected, 100 - expected], err_msg=f"{kind} {history}")
    # last: 10 -> 20 is |10| + |-10| over 100 = 0.2, then 20 -> 20 is 0: mean 0.1. Before any guess: 1.
    assert run("last", [10]).error().tolist() == [1.0]
    np.testing.assert_allclose(run("last", [10, 20, 20]).error(), [0.1])
    # five steps later only what the window of six still reaches is left, and no error is that of a step
    found = run("window", [90, 40], window=6)
    found.observe(np.array([[[80, 20]]]), apart=5)
    assert found.predict()[0, 0].tolist() == [60.0, 40.0] and len(found.errors) == 1


def session(**fields):
    cluster = Cluster(nodes=2, devices_per_node=2, flat=True, intra_bandwidth=3e9, flops=3e13)
    prices = LayerPrices(cluster=cluster, model_dim=64, hidden_dim=128)
    cost = Cost(prices=prices, replica_slots=2)
    return PlanSession(planner_config(overlap_degree=4, **fields), Placement.even(2, 8, 4, 2), cost)


def loads_at(step):
    return np.random.default_rng(step).multinomial(500, np.random.default_rng(step // 3).dirichlet(np.ones(8)), (2, 4))


def test_session_plans_and_reshards_at_its_own_intervals():
    planning, sharding = session(name="balanced", interval=10), session(name="hecate", shard_every=8)
    planned, resharded = [], []
    for iteration in range(1, 32):
        before = sharding.placement.home
        for one in (planning, sharding):
            one.predictor.observe(loads_at(iteration))
            one.propose(iteration)
        planned += [iteration] if planning.last_planned == iteration else []
        resharded += [iteration] if (sharding.placement.home != before).any() else []
    assert (planned, resharded) == ([1, 10, 20, 30], [8, 16, 24])


def test_predicted_seconds_follow_the_placement():
    # Four devices, one expert each, 8 tokens of expert 0 from every source: H = 32, R = 24, no replicas: 4 x 24 x 8 /
    # 16 + 3 x 32 / 2 = 48 + 48. On all devices: H = 8, R = 0, X = m = 1: 3 x 4 and twice (1 + 1) 3/4 x 48 / 16. Under a
    # compiled shape of three offers and slots all of it is paid: twice 6 x 3/4 x 3.
    loads = np.zeros((1, 4, 4))
    loads[0, :, 0] = 8
    start = Placement.even(1, 4, 4)
    assert predicted_layer_seconds(start, loads, make_cost()).tolist() == [96]
    shadowed = start.replace(replicas=[(0, 0, 1), (0, 0, 2), (0, 0, 3)])
    assert predicted_layer_seconds(shadowed, loads, make_cost()).tolist() == [12 + 9]
    transfer = TransferShape(devices=4, devices_per_node=4, offers=3, slots=3)
    shape = dataclasses.replace(build_shape(start), ahead=transfer)
    assert predicted_layer_seconds(shadowed, loads, make_cost(), shape).tolist() == [12 + 27]
    # The same replica after the gate, in a quarter of (4, 4): twice (1 + 1) 3/4 x 3, which no schedule hides.
    late = dataclasses.replace(build_shape(start), late=dataclasses.replace(transfer, offers=4, slots=4))
    hiding = make_cost(attention_seconds=99.0, prefetch=Prefetch(schedule="pro_prophet"))
    assert predicted_layer_seconds(shadowed, loads, hiding, late, start).tolist() == [12 + 9]


CLUSTER = Cluster(name="two nodes of two", nodes=2, devices_per_node=2, intra_bandwidth=100.0, inter_bandwidth=10.0)
COST = Cost(prices=LayerPrices(cluster=CLUSTER, model_dim=1, hidden_dim=1, dtype_bytes=1))


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
    level = dataclasses.replace(CLUSTER, inter_bandwidth=2e9, intra_bandwidth=1e9)
    level = Cost(prices=dataclasses.replace(COST.prices, cluster=level))
    assert choose_split(near, TOGETHER, level, "even")[1] == "even"  # 12 rows against 10
    assert choose_split(near.replace(replicas=None), TOGETHER, COST, "even")[1] == "even"  # nothing to choose
