"""Any count of devices: experts and sequences that they cannot share evenly.

Loss, loads and every gradient equal the one-device reference in float64, as in `test_equality.py`: 8 or 4 experts and 8
sequences on 3, 5 and 6 devices, of which the last ones have padding, some nothing else; and runs of 20 steps under
planners, which move homes and replicas between devices of unequal shares.
"""

import jax
import numpy as np
import pytest
from support.equality_cases import assert_equal, model_config, moe_config
from support.marks import slow_but
from support.tiny_run import config_of

from moe_jax.moe.routers import PADDING, RouterInputs, RouterPlace, build_router
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.replan.auto import planners
from moe_jax.training.stepper import build_stepper

# mesh, what differs of the layer, of the model
CASES = {
    "3": ({"expert": 3}, {"bucket_slack": 0.5}, {}),
    "5_hecate": ({"expert": 5}, {"schedule": "s1"}, {"layers": 1, "prefetch": "hecate"}),
    "6_s2_mp2": ({"expert": 6, "model": 2}, {"schedule": "s2"}, {"layers": 1}),
    "3_pairwise": ({"expert": 3}, {"schedule": "pairwise"}, {}),
    "3_deepspeed_mp2_esp2": ({"expert": 3, "expert_shard": 2, "model": 2}, {"schedule": "deepspeed"}, {}),
    "3_s1_pairs": ({"expert": 3}, {"schedule": "s1", "shared_experts": 1}, {"moe_every": 2, "remat": "block"}),
    "5": ({"expert": 5}, {}, {}),
    "5_ring": ({"expert": 5}, {"schedule": "ring"}, {}),
    "5_deduplicated": ({"expert": 5}, {"schedule": "deduplicated", "top_k": 4}, {}),
    "5_halves": ({"expert": 5}, {"schedule": "s1"}, {"overlap": "halves"}),
    "6": ({"expert": 6}, {"bucket_slack": 0.3}, {}),
    "6_dp": ({"data": 6, "expert": 1}, {"schedule": "dp"}, {}),
    "6_two_by_three": ({"data": 2, "expert": 3}, {"schedule": "parm"}, {}),
    "6_split_mp2": ({"expert": 6, "model": 2}, {"schedule": "s1"}, {"sequence_parallel": True}),
    "6_fewer_experts": ({"expert": 6}, {"num_experts": 4}, {}),
    "6_pro_prophet": ({"expert": 6}, {"schedule": "s1"}, {"prefetch": "pro_prophet"}),
}


@pytest.mark.parametrize("case", slow_but(CASES, "3", "6_s2_mp2"))
def test_loss_and_gradients_equal_the_reference(case):
    mesh, layer, model = CASES[case]
    with jax.enable_x64(True):
        assert_equal(case, model_config(**model), moe_config(**layer), mesh)


def steps_of(folder, devices, *bindings):
    config = config_of(folder, "ModelConfig.layers = 1", "train.evaluate_windows = 2", *bindings)
    stepper = build_stepper(config, jax.devices()[:devices])
    return stepper.run(20), stepper


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, [float(record["loss"]) for record in steps_of(folder, 1)[0]]


def assert_runs(alone, devices, planner, *bindings):
    """Compare 20 steps with one device's; every step counts the choices of 8 sequences of 16 tokens, not of padding."""
    folder, want = alone
    records, stepper = steps_of(folder, devices, f"PlannerConfig.name = {planner!r}", *bindings)
    np.testing.assert_allclose([float(record["loss"]) for record in records], want, rtol=2e-4)
    assert {int(record["loads"].sum()) for record in records} == {8 * 16 * 2}
    return stepper


@pytest.mark.parametrize("devices, planner", slow_but([(3, "smartmoe"), (5, "hecate"), (6, "eplb")], (5, "hecate")))
def test_homes_move_between_devices_of_unequal_shares(alone, devices, planner):
    stepper = assert_runs(alone, devices, planner, "PlannerConfig.interval = 5", "PlannerConfig.replica_slots = 1")
    (home,) = stepper.engine.home.values()
    assert np.bincount(home.ravel(), minlength=devices).max() <= -(-8 // devices)


@pytest.mark.slow
@pytest.mark.parametrize("planner", planners(8))
def test_every_planner_runs(alone, planner):
    devices = (3, 5, 6)[planners(8).index(planner) % 3]
    assert_runs(alone, devices, planner, "PlannerConfig.interval = 5")


ROUTERS = {
    "topk": {"drop": "probability", "balance_over": "sequence"},
    "sigmoid_bias": {},
    "gshard": {},
    "topology": {"remote_fraction": 0.5},
}


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_leaves_padding_out(router):
    """Choices, capacities and statistics of 16 tokens are the same with 8 of padding behind them."""
    rng, found = np.random.default_rng(0), []
    x, w_gate = rng.normal(size=(24, 16)).astype(np.float32), rng.normal(size=(16, 8)).astype(np.float32)
    x[16:] *= 3  # padding would come first by probability
    given = {"router": router, "gate_noise": 0.0, "capacity_factor": 0.75, "min_capacity": 1, **ROUTERS[router]}
    config = moe_config(**given)
    for tokens in (24, 16):
        place = RouterPlace(build_mesh(MeshConfig(), jax.devices()[:1]), slots=8, length=8)
        built, ids = build_router(config, place), np.arange(tokens, dtype=np.int32)
        params = {"w_gate": w_gate, **{name: np.zeros(shape, np.float32) for name, shape in built.leaves(16).items()}}
        ids[16:] = PADDING
        found.append(built.choose(x[:tokens], params, RouterInputs(None, ids, padded=tokens == 24)))
    (choice, stats), (want, want_stats) = found
    assert not np.any(choice.keep_mask[16:]) and not np.all(want.keep_mask)
    for got, alone in ((choice.expert_ids, want.expert_ids), (choice.keep_mask, want.keep_mask)):
        np.testing.assert_array_equal(got[:16], alone)
    jax.tree.map(lambda got, alone: np.testing.assert_allclose(got, alone, rtol=1e-5), stats, want_stats)
