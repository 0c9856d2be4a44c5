"""Measure how far the planners are from the optimum on small cases, and print a table and one JSON line.

    python scripts/checks/planner_optimum.py [--cases=40] [--replica_slots=2]

Two nodes of two devices, eight experts, Zipf-like loads. The optimum is solved as a mixed integer programme (scipy's
HiGHS): first the least possible maximum of the device loads over all homes-fixed placements with at most mu replicas
per device and free shares; then the fewest replicas that reach it; then the fewest replicas across nodes. No placement
can beat the first figure, so it is a floor for every planner that keeps homes. Pro-Prophet and FasterMoE are also held
against the best subset of experts by their own predicted time, found by trying all subsets.
"""

import itertools
import json

import numpy as np
from absl import app, flags

from moe_jax.cluster import Cluster
from moe_jax.planning import routing
from moe_jax.planning.balancer import build_planner, replicated_everywhere
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement
from moe_jax.planning.transfer_sizes import placement_sizes

E, D, PER_NODE = 8, 4, 2

FLAGS = flags.FLAGS
flags.DEFINE_integer("cases", 40, "random cases")
flags.DEFINE_integer("replica_slots", 2, "mu")
PLANNERS = ("none", "fastermoe", "pro_prophet", "hecate", "flexmoe", "topk_all", "llep", "balanced")


def solve(totals, home, mu):
    """Return (least maximum load, fewest replicas for it, fewest of those across nodes) for totals [E], home [E]."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    x, y, peak = np.arange(E * D).reshape(E, D), E * D + np.arange(E * D).reshape(E, D), 2 * E * D
    size = 2 * E * D + 1
    rows, low, high = [], [], []

    def add(terms, least, most):
        row = np.zeros(size)
        for at, value in terms:
            row[at] += value
        rows.append(row)
        low.append(least)
        high.append(most)

    for e in range(E):
        add([(x[e, d], 1) for d in range(D)], totals[e], totals[e])
        for d in range(D):
            add([(x[e, d], 1), (y[e, d], -totals[e])], -np.inf, 0)
    for d in range(D):
        add([(x[e, d], 1) for e in range(E)] + [(peak, -1)], -np.inf, 0)
        add([(y[e, d], 1) for e in range(E) if home[e] != d], 0, mu)
    away = np.array([[home[e] != d for d in range(D)] for e in range(E)], float)
    across = np.array([[home[e] // PER_NODE != d // PER_NODE for d in range(D)] for e in range(E)], float)
    integrality = np.r_[np.zeros(E * D), np.ones(E * D), 0]
    answers = []
    for weight in (None, away, across):
        goal = np.zeros(size)
        if weight is None:
            goal[peak] = 1
        else:
            goal[E * D : 2 * E * D] = weight.ravel()
        result = milp(
            goal,
            constraints=LinearConstraint(np.array(rows), low, high),  # pyright: ignore[reportArgumentType]
            integrality=integrality,
            bounds=Bounds(0, np.r_[np.full(E * D, np.inf), np.ones(E * D), np.inf]),
            options={"mip_rel_gap": 1e-9},
        )
        assert result.success, result.message
        answers.append(float(result.fun))
        if weight is None:
            add([(peak, 1)], 0, result.fun * (1 + 1e-7) + 1e-6)
        else:
            add([(y[e, d], weight[e, d]) for e in range(E) for d in range(D)], 0, round(result.fun))
    return answers[0], round(answers[1]), round(answers[2])


def own_seconds(name, loads, start, cost, chosen):
    """Return the time that a planner's own model predicts when `chosen` bool [E] are replicated on all devices."""
    placement = start.replace(replicas=replicated_everywhere(start, chosen[None]), rule="home")
    computed, received = (part[0].astype(float) for part in routing.computed_and_received(placement, loads))
    forward = computed.max() / cost.tokens_per_second(name)
    if name == "pro_prophet":
        return cost.layer(computed, received, placement_sizes(placement), name).item()
    shadow = 2 * chosen.sum() * cost.expert_bytes / cost.bandwidth(name)
    exchange = 4 * cost.token_bytes / cost.bandwidth(name)
    return 3 * forward + exchange * received.max() + shadow


def main(argv):
    del argv
    cluster = Cluster(name="small", nodes=2, devices_per_node=PER_NODE, flat=True, intra_bandwidth=3e9, flops=3e13)
    cost = Cost(cluster=cluster, model_dim=1024, hidden_dim=2048, replica_slots=FLAGS.replica_slots, overlap_degree=4)
    free = Cost(cluster=cluster, model_dim=1024, hidden_dim=2048, replica_slots=E, overlap_degree=4, price="paper")
    start = Placement.even(1, E, D, PER_NODE)
    subsets = [np.array(bits, bool) for bits in itertools.product((0, 1), repeat=E)]
    above, own, replicas, across, floor = {n: [] for n in PLANNERS}, {}, [], [], []
    for case in range(FLAGS.cases):
        rng = np.random.default_rng(case)
        popularity = rng.permutation(np.arange(1, E + 1) ** -rng.uniform(0.5, 3.0))
        loads = rng.multinomial(4096, popularity / popularity.sum(), size=(1, D))
        totals = loads[0].sum(axis=0)
        best, fewest, fewest_across = solve(totals, start.home[0], FLAGS.replica_slots)
        floor.append(best / (totals.sum() / D))
        for name in PLANNERS:
            placement = build_planner(PlannerConfig(name=name)).propose(loads, start, cost)
            above[name].append(routing.device_loads(placement, loads).max() / best)
            if name == "balanced":
                replicas.append(len(placement.replicas) - fewest)
                home = start.home[0, placement.replicas[:, 1]]
                across.append(int((home // PER_NODE != placement.replicas[:, 2] // PER_NODE).sum()) - fewest_across)
        for name in ("fastermoe", "pro_prophet"):
            placement = build_planner(PlannerConfig(name=name, bounded=False)).propose(loads, start, free)
            chosen = np.isin(np.arange(E), placement.replicas[:, 1])
            least = min(own_seconds(name, loads, start, free, subset) for subset in subsets)
            own.setdefault(name, []).append(own_seconds(name, loads, start, free, chosen) / least)
    print(
        f"{FLAGS.cases} cases, {E} experts, {D} devices, mu {FLAGS.replica_slots}; optimum max/mean "
        f"{np.mean(floor):.4f}"
    )
    print(f"{'planner':20s}{'max load / optimum':>20s}{'worst':>10s}{'own time / best':>18s}{'worst':>10s}")
    table = {}
    for name in PLANNERS:
        row = {"load_over_optimum": float(np.mean(above[name])), "load_worst": float(np.max(above[name]))}
        if name in own:
            row |= {"own_time_over_best": float(np.mean(own[name])), "own_time_worst": float(np.max(own[name]))}
        table[name] = {key: round(value, 4) for key, value in row.items()}
        print(f"{name:20s}" + "".join(f"{v:{w}.4f}" for v, w in zip(row.values(), (20, 10, 18, 10), strict=False)))
    extra = {"replicas_above_fewest": float(np.mean(replicas)), "across_above_fewest": float(np.mean(across))}
    print(f"balanced: {np.mean(replicas):.3f} replicas and {np.mean(across):.3f} across nodes more than the fewest")
    print(
        json.dumps({"cases": FLAGS.cases, "replica_slots": FLAGS.replica_slots, "planners": table, "balanced": extra})
    )


if __name__ == "__main__":
    app.run(main)
