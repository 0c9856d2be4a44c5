"""A run whose layers differ: steps, metrics, recorded loads, and checkpoints that any number of devices reads."""

import numpy as np
import pytest
from support.tiny_run import one_step, run_here, session_of

from moe_jax.analysis.replay_inputs import build_inputs
from moe_jax.errors import UserError
from moe_jax.observe.loads import read_loads
from moe_jax.observe.metrics_file import read_metrics
from moe_jax.storage.checkpoint import Checkpointer

LAYERS = ("layers=1 num_experts=2 top_k=1", "layers=2 num_experts=8 hidden_dim=8 dense_hidden_dim=24")
PYRAMID = (
    "ModelConfig.layers = 3",
    f"ModelConfig.segments = {LAYERS}",
    "MoEConfig.router = 'sigmoid_bias'",
    "SigmoidBias.bias_rate = 0.125",  # exact in float32
    "train.loads_every = 1",
    "train.final_learning_rate = 1.0",  # so that runs of several lengths compare at one rate
)
PLANNER = ("PlannerConfig.name = 'balanced'", "PlannerConfig.replica_slots = 2", "PlannerConfig.swap_after = 1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run's data, in which `run` is a finished run of 4 steps on 8 devices, with a planner."""
    folder = tmp_path_factory.mktemp("segments")
    assert run_here(folder, folder / "run", *PYRAMID, *PLANNER, "train.steps = 4")
    return folder


def test_a_checkpoint_of_eight_devices_is_read_on_any_number(folder):
    """Read on 2 devices and on 1 and written again, every leaf has the same bits; and the next step has the same loss.

    The router has a state, which each segment moves by its own loads.
    """
    written = Checkpointer(folder / "run" / "checkpoints", keep=3)
    want = written.read_arrays(3)
    assert want["params/bank/segment_0/w_in"].shape == (1, 2, 16, 16)
    assert want["params/bank/segment_1/w_in"].shape == (2, 8, 16, 8)
    counts = read_loads(folder / "run" / "loads.npz").loads[:3].sum(axis=2)
    for name, own in (("segment_0", counts[:, :1, :2]), ("segment_1", counts[:, 1:])):
        moved = 0.125 * np.sign(own.mean(axis=2, keepdims=True) - own).sum(axis=0)
        np.testing.assert_array_equal(want[f"params/dense/units/{name}/gate/choice_bias"], moved)
        assert moved.any()
    for devices in (2, 1):
        session = session_of(folder, devices, *PYRAMID)
        state = written.restore(3, session.abstract_state(), session.model.even_homes)
        again = Checkpointer(folder / f"on_{devices}", keep=1)
        again.save(3, state, session.model.even_homes, {})
        again.wait()
        got = again.read_arrays(3)
        assert got.keys() == want.keys()
        for name, array in want.items():
            assert np.asarray(got[name]).tobytes() == np.asarray(array).tobytes(), name
        again.close()
    _, metrics = one_step(session, session.compile_step()[0], state, 3)
    planned = read_metrics(folder / "run")[3]["loss"]
    assert float(metrics["loss"]) == pytest.approx(planned, rel=1e-5)  # float32, sums in another order
    written.close()


def test_a_run_records_each_segment(folder):
    """Loads of a layer are those of its own experts and sources; replay takes one segment, metrics have all layers."""
    records = read_metrics(folder / "run")
    assert all(len(record["device_load_max_over_mean"]) == len(record["passes"]) == 3 for record in records)
    assert records[-1]["dropped_fraction"] == 0 and max(records[-1]["dead_experts"]) <= 8
    assert records[3]["replicas"] > 0
    trace = read_loads(folder / "run" / "loads.npz")
    assert trace.loads.shape == (4, 3, 8, 8) and trace.origins[0].segments == ((1, 2, 16, 1), (2, 8, 8, 2))
    assert trace.origins[0].preceding == ((1, 64), (1, 24))
    assert trace.loads.sum(axis=(2, 3)).tolist() == [[8 * 16, 8 * 16 * 2, 8 * 16 * 2]] * 4
    assert not trace.loads[:, 0, 2:].any() and not trace.loads[:, 0, :, 2:].any()
    given = {"trace": str(folder / "run"), "segment": 0}
    inputs = build_inputs(given)
    assert inputs.trace.loads.shape == (4, 1, 2, 2) and (inputs.hidden_dim, inputs.top_k) == (16, 1)
    assert (inputs.cluster.nodes, inputs.cluster.devices_per_node) == (1, 2)
    with pytest.raises(UserError, match=r"2 segments \(0: 1 MoE layers of 2 experts; 1: .*name one by --segment=0"):
        build_inputs({"trace": str(folder / "run")})


# homes move of layers that have two experts a device; replicas come window by window, and after the gate
HECATE = (
    "ModelConfig.segments = ('layers=1 num_experts=2 top_k=1', 'layers=2 num_experts=16 hidden_dim=8')",
    "PlannerConfig.name = 'hecate'", "Hecate.calibrate = True", "PlannerConfig.replica_slots = 2",
    "Hecate.overlap_degree = 4", "Hecate.shard_every = 2", "PlannerConfig.swap_after = 1",
    "PlannerConfig.cluster = 'configs/cluster/host_devices.gin'", "ModelConfig.prefetch = 'hecate'",
)  # fmt: skip


@pytest.mark.slow
def test_each_segment_has_a_plan(folder, tmp_path):
    """With a planner the losses are those without one, also where the run goes on from a checkpoint of its plans."""
    assert run_here(folder, tmp_path / "plain", *PYRAMID, HECATE[0])
    for steps in (3, 6):
        assert run_here(folder, tmp_path / "planned", *PYRAMID, *HECATE, f"train.steps = {steps}")
    want, got = read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "planned")
    losses = ([record["loss"] for record in records] for records in (got, want))
    np.testing.assert_allclose(*losses, rtol=1e-4)  # float32, sums in another order
    assert any("reshard_seconds" in record for record in got) and got[-1]["replicas"] > 0
