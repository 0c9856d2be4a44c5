"""Pro-Prophet's search next to algorithm 1 of its paper, written down once more in plain loops.

As in the paper: one expert a device, one bandwidth (`price = 'paper'`), and no bound on what a device holds or a node
sends (`bounded = False`).
"""

import numpy as np
import pytest
from support.options import planner_config

from moe_jax.cluster import Cluster
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.cost import Cost, PaperPrices
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape, grow, misfits

D, NODE, ALPHA = 16, 4, 0.5  # devices, of a node; the paper's alpha
W, FLOPS, M, F, BYTES = 12e9, 12e12, 1024, 2048, 4
ATTENTION = 1e-3  # T_FNEC
HOT = range(NODE)  # experts whose homes are all on the first node


def make_loads(kind, rng):
    """Return tokens [S, E] of 1,024 tokens a source: of any popularity, or four experts of one node with most."""
    popularity = rng.dirichlet(np.full(D, 0.3))
    if kind == "hot":
        popularity = rng.uniform(0.1, 1.0, D)
        popularity[list(HOT)] += rng.uniform(8.0, 16.0, NODE)
    return rng.multinomial(1024, popularity / popularity.sum(), size=D)


def seconds(loads, holders, hides):
    """T'(R, H, s, n) by equations 1 to 6, and 8 where Trans and Agg hide: holders {expert: devices}, its home's too."""
    computed, received = [0] * D, [0] * D
    for expert in range(D):
        for source in range(D):
            at = source if source in holders.get(expert, ()) else expert
            computed[at] += loads[source][expert]
            received[at] += loads[source][expert] if at != source else 0
    exchange = max(received) * M * BYTES / W
    forward = max(computed) / (FLOPS / (4 * M * F))
    trans = sum(len(devices) for devices in holders.values()) * 2 * M * F * BYTES / (D * W)
    shown = (trans, trans)
    if hides:
        shown = (max(0.0, trans - forward - ATTENTION), max(0.0, trans - 2 * forward - 2 * ATTENTION))
    return 4 * exchange + 3 * forward + sum(shown), computed


def algorithm_1(loads, n, hides):
    """Return (T_output, {expert: devices}) of the greedy search with n devices left out for each expert."""
    least, computed = seconds(loads, {}, hides)
    used, holders, kept = [], {}, {}
    while not max(computed) - min(computed) < ALPHA * sum(map(sum, loads)) / D:
        heaviest = computed.index(max(computed))
        if heaviest in used:
            break
        used.append(heaviest)
        # the home has the expert anyway and is not among those left out
        others = sorted((device for device in range(D) if device != heaviest), key=lambda d: (loads[d][heaviest], d))
        holders = {**holders, heaviest: {heaviest, *others[n:]}}
        changed, computed = seconds(loads, holders, hides)
        if changed < least:
            least, kept = changed, holders
    return least, kept


def planned(loads, **knobs):
    """Return (planner, cost, even homes, the plan) for loads [S, E] of one layer."""
    cluster = Cluster(name="one W", nodes=D // NODE, devices_per_node=NODE, flat=True, intra_bandwidth=W, flops=FLOPS)
    prices = PaperPrices(cluster=cluster, model_dim=M, hidden_dim=F, dtype_bytes=BYTES)
    hiding = {"attention_seconds": ATTENTION, "prefetch": Prefetch(schedule="pro_prophet")}
    cost = Cost(prices=prices, replica_slots=4, **hiding)
    planner = build_planner(planner_config(name="pro_prophet", bounded=False, balance_threshold=ALPHA, **knobs))
    start = Placement.even(1, loads.shape[1], D, NODE)
    return planner, cost, start, planner.propose(loads[None], start, cost)


@pytest.mark.parametrize("hides", [True, False], ids=["scheduler", "planner_alone"])
@pytest.mark.parametrize("kind", ["random", "hot"])
def test_the_unbounded_search_is_algorithm_1(kind, hides):
    rng, differ, most = np.random.default_rng(5), 0, 0
    for _ in range(30):
        loads = make_loads(kind, rng)
        by_n = [algorithm_1(loads.tolist(), n, hides) for n in range(D)]
        best = min(by_n, key=lambda found: found[0])
        for n, (_, kept) in [("search", best), (0, by_n[0]), (3, by_n[3])]:
            plan = planned(loads, skipped_devices=n, scheduler=hides)[-1]
            wanted = {(0, e, d) for e, devices in kept.items() for d in devices if d != e}
            differ += {tuple(row) for row in plan.replicas.tolist()} != wanted
            most = max(most, sum(expert in kept for expert in HOT))
    assert differ == 0
    assert most == NODE or kind == "random", "no case sends all experts of a node"


def test_the_transfer_of_an_unbounded_search_grows_with_its_plans():
    """Of two experts a device five of one node go to the others: the shape takes them, with room for one more."""
    tokens = np.ones((D, 2 * D), int)
    tokens[:, :5] = 1000
    planner, cost, start, plan = planned(tokens, skipped_devices=0)
    need = build_shape(plan, by_node=True).ahead
    shape = grow(build_shape(start), plan, by_node=True, replica_slots=4, most=planner.ahead_most(start, cost))
    assert need.crossing == 5 and not misfits(shape, plan)
    assert (shape.ahead.offers, shape.ahead.slots, shape.ahead.crossing) == (2, 5, 6)
