"""What every planner must do, whatever the loads: one class, run for each name and each way of deciding."""

import numpy as np
import pytest

from moe_jax.cluster import Cluster
from moe_jax.errors import UserError
from moe_jax.planning import AFTER_GATE, NAMES, routing
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement

L, S, E, D = 4, 8, 16, 8
CLUSTER = Cluster(name="test", nodes=2, devices_per_node=4, flat=True, intra_bandwidth=3e9, flops=3e13)
COST = Cost(cluster=CLUSTER, model_dim=64, hidden_dim=128, replica_slots=2, overlap_degree=8)
CASES = [(name, "ahead") for name in NAMES] + [(name, "after_gate") for name in AFTER_GATE]


def make_loads(kind, seed=0):
    rng = np.random.default_rng(seed)
    loads = rng.multinomial(1000, rng.dirichlet(np.full(E, 0.3), size=(L, 1)).repeat(S, axis=1))
    if kind == "uniform":
        loads = np.full((L, S, E), 60)
    elif kind == "one_hot":
        loads = np.zeros((L, S, E), int)
        loads[:, :, 3] = 1000
    elif kind == "half_unused":
        loads[:, :, ::2] = 0
    elif kind == "ragged":
        loads = loads * rng.integers(0, 2, (L, S, 1))
    elif kind == "empty":
        loads = np.zeros((L, S, E), int)
    return loads


def most_replicas(placement):
    """The most replicas that one device has in one layer."""
    return (placement.holds & ~placement.homes).sum(axis=1).max()


KINDS = ("skewed", "uniform", "one_hot", "half_unused", "ragged", "empty")


@pytest.mark.parametrize(("name", "when"), CASES, ids=["-".join(case) for case in CASES])
class TestEveryPlanner:
    def plan(self, name, when, loads, placement=None, **fields):
        planner = build_planner(PlannerConfig(name=name, when=when, **fields))
        start = Placement.even(L, E, D, 4) if placement is None else placement
        return planner.propose(loads, start, COST)

    @pytest.mark.parametrize("kind", KINDS)
    def test_tokens_go_to_holders_and_slots_hold(self, name, when, kind):
        loads = make_loads(kind)
        placement = self.plan(name, when, loads)
        counts = routing.destinations(placement, loads)
        np.testing.assert_array_equal(counts.sum(3), loads)
        assert not counts.sum(1)[~placement.holds].any()
        if name == "eplb":  # homes and replicas share slots
            assert placement.holds.sum(axis=1).max() <= E // D + COST.replica_slots
        else:
            assert most_replicas(placement) <= COST.replica_slots
        assert np.bincount(placement.home.ravel(), minlength=D).max() <= L * E // D
        if (kind, when) == ("one_hot", "ahead") and name not in ("none", "smartmoe"):  # lighter than homes alone
            assert counts.sum(axis=(1, 2)).max() < loads.sum(axis=(1, 2)).max()

    @pytest.mark.parametrize("kind", KINDS)
    def test_refined_placement_is_valid_for_the_true_loads(self, name, when, kind):
        planner = build_planner(PlannerConfig(name=name, when=when, calibrate=True))
        ahead = planner.propose(make_loads("skewed"), Placement.even(L, E, D, 4), COST)
        true = make_loads(kind, seed=1)
        late = planner.refine(true, ahead, COST)
        counts = routing.destinations(late, true)
        np.testing.assert_array_equal(counts.sum(3), true)
        if name != "eplb":
            assert most_replicas(late) <= COST.replica_slots + planner.slots_after_gate(COST)

    def test_plans_chain_without_growing_and_take_real_loads(self, name, when):
        placement = Placement.even(L, E, D, 4)
        for loads in (make_loads("skewed", seed) for seed in range(4)):
            real = self.plan(name, when, loads.astype(float), placement)
            placement = self.plan(name, when, loads, placement)
            assert real == placement
        if name != "eplb":
            assert most_replicas(placement) <= COST.replica_slots

    def test_a_single_device_needs_no_replicas(self, name, when):
        cluster = Cluster(nodes=1, devices_per_node=1, intra_bandwidth=1e9, flops=1e12)
        cost = Cost(cluster=cluster, model_dim=64, hidden_dim=128, overlap_degree=4)
        planner = build_planner(PlannerConfig(name=name, when=when))
        assert not len(planner.propose(np.array([[[5, 0, 7, 1]]]), Placement.even(1, 4, 1), cost).replicas)


@pytest.mark.parametrize("name", ["fastermoe", "pro_prophet", "smartmoe", "flexmoe", "hecate"])
def test_absent_figures_are_an_error_that_names_planner_and_field(name):
    bare = Cost(cluster=Cluster(name="bare", nodes=2, devices_per_node=4), model_dim=64, hidden_dim=128)
    needs = "overlap_degree, or attention_seconds" if name == "hecate" else "Cluster.(flops|inter_bandwidth), .* 'bare'"
    with pytest.raises(UserError, match=f"planner '{name}' needs {needs}"):
        build_planner(PlannerConfig(name=name)).propose(make_loads("skewed"), Placement.even(L, E, D, 4), bare)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "best"}, r"PlannerConfig.name \('best'\) must be one of none, balanced, eplb, fastermoe"),
        ({"replica_slots": -1}, r"PlannerConfig.replica_slots \(-1\) must be a whole number of at least 0"),
        ({"overlap_degree": "ours"}, r"overlap_degree \('ours'\) must be a whole number of at least 0 or 'executor'"),
        ({"name": "eplb", "when": "after_gate"}, r"'after_gate' works with balanced, fastermoe, .*, not with 'eplb'"),
        ({"name": "hecate", "split": "even"}, r"decides after it \(when = 'after_gate' or calibrate = True\)"),
    ],
)
def test_wrong_choices_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        PlannerConfig(**fields)


def test_more_replica_slots_than_memory_names_the_most_that_fit():
    # An expert has 2 x 64 x 128 x 4 = 65,536 bytes; 300,000 bytes hold 4 of them.
    small = Cluster(nodes=2, devices_per_node=4, memory_bytes=300_000)
    words = r"every device: 5 replica_slots x 1 layers alive x 65536 .* at most replica_slots = 4"
    with pytest.raises(UserError, match=words):
        Cost(cluster=small, model_dim=64, hidden_dim=128, replica_slots=5)
