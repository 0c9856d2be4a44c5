"""Plans of every planner on 64 and 256 devices are those that the first, dense code made: digests in plans.json.

    PYTHONPATH=. python tests/planner/test_golden_plans.py

writes the file anew, for a change that is meant to change plans.
"""

import dataclasses
import hashlib
import json
import pathlib

import numpy as np
import pytest
from support.options import planner_config

from moe_jax.cluster import Cluster
from moe_jax.planning.balancer import names
from moe_jax.planning.cost import Cost, LayerPrices
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan import with_rule
from moe_jax.planning.plan_shape import build_shape
from moe_jax.replan.session import PlanSession

FILE = pathlib.Path(__file__).with_name("plans.json")
REFINES = ("balanced", "fastermoe", "hecate", "llep", "pro_prophet")  # what needs no loop over steps to plan again
# devices, experts, layers, replica slots, tau, fields of PlannerConfig
CASES = (
    (64, 128, 2, 3, 40, {}),
    (64, 64, 1, 1, 16, {"split": "plan", "predictor": "window"}),
    (64, 64, 2, 4, 3, {"bounded": False}),
    (256, 256, 1, 4, 24, {}),
)
RUNS = [(name, "ahead") for name in names() if name != "auto"] + [
    (name, "after_gate") for name in names(after_gate=True)
]


def loads_at(step, layers, devices, experts):
    """Draw Zipf-1 loads whose tastes differ by source, int32 [L, S, E]."""
    rng = np.random.default_rng([step, devices, experts])
    share = rng.permuted(np.tile(1 / np.arange(1, experts + 1), (layers, 1)), axis=1)
    tastes = [[rng.dirichlet(one * experts) for _ in range(devices)] for one in share]
    return rng.multinomial(512, tastes).astype(np.int32)


def plans(name, when, devices, experts, layers, slots, tau, fields):
    """Return the plans of three steps, and what they are refined to."""
    links = {"flat": slots != 3, "intra_bandwidth": 3e10, "inter_bandwidth": 2e10, "flops": 3e13}
    cluster = Cluster(nodes=devices // 8, devices_per_node=8, **links)
    prices = LayerPrices(cluster=cluster, model_dim=1024, hidden_dim=2048)
    cost = Cost(prices=prices, replica_slots=slots, attention_seconds=1e-3)
    config = planner_config(name=name, when=when, must_pay=False, overlap_degree=tau, **fields)  # whatever they cost
    session, found = PlanSession(config, Placement.even(layers, experts, devices, 8), cost), []
    late = with_rule(session.planner, build_shape(session.placement), cost).late if slots == 3 else None
    for step in range(3):
        session.predictor.observe(loads_at(step, layers, devices, experts))
        found.append(session.propose(step + 1))
        if name in REFINES:
            true = loads_at(step + 1, layers, devices, experts)
            found.append(session.planner.refine(true, found[-1], dataclasses.replace(cost, late=late)))
    return found


def digest(name, when):
    """Return the hash of all plans of one planner."""
    found = hashlib.blake2b(digest_size=8)
    for case in CASES:
        if name == "flexmoe" and case[0] == 256:
            continue  # half a minute
        for plan in plans(name, when, *case):
            found.update(plan.fingerprint().encode())
    return found.hexdigest()


@pytest.mark.parametrize(("name", "when"), RUNS, ids=["-".join(run) for run in RUNS])
def test_plans_are_those_of_the_dense_code(name, when):
    assert digest(name, when) == json.loads(FILE.read_text())[f"{name}-{when}"]


if __name__ == "__main__":
    FILE.write_text(json.dumps({f"{name}-{when}": digest(name, when) for name, when in RUNS}, indent=1) + "\n")
