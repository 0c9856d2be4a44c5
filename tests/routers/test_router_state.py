"""The bias of `sigmoid_bias` in a run: moved once per step by the step's loads, saved, resumed bit for bit."""

import numpy as np
import pytest
from support.tiny_run import run_here

from moe_jax.observe import read_loads, read_metrics
from moe_jax.training.checkpoint import Checkpointer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")

RUN = (
    "MoEConfig.router = 'sigmoid_bias'", "MoEConfig.bias_rate = 0.125", "train.loads_every = 1",
    "train.grad_accum_steps = 2", "train.batch_size = 16", "train.ema_decay = 0.5", "train.steps = 4",
    "train.checkpoint_every = 2",
    # the cosine ends at train.steps, so runs of several lengths compare at one rate
    "train.learning_rate = 1e-3", "train.final_learning_rate = 1.0", "train.warmup_steps = 0",
)  # fmt: skip
LEAF = "dense/units/segment_0/gate/choice_bias"


def arrays_of(folder, step):
    return Checkpointer(folder / "checkpoints", keep=3).read_arrays(step)


def bias_after(loads):
    """Return [L, E] after steps with loads [steps, L, sources, E]; 0.125 is exact in float32."""
    bias = np.zeros(loads.shape[1::2])
    for of_layers in loads.sum(axis=2).astype(np.int64):
        for layer, counts in enumerate(of_layers):
            for expert, count in enumerate(counts):
                bias[layer, expert] += 0.125 * np.sign(counts.sum() - count * len(counts))
    return bias


@pytest.mark.slow
def test_bias_follows_the_loads_and_resumes(tmp_path):
    assert run_here(tmp_path, tmp_path / "whole", *RUN)
    assert run_here(tmp_path, tmp_path / "parts", *RUN, "train.steps = 2")
    assert run_here(tmp_path, tmp_path / "parts", *RUN)
    whole, parts = arrays_of(tmp_path / "whole", 4), arrays_of(tmp_path / "parts", 4)
    assert whole.keys() == parts.keys()
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)
    loads = read_loads(tmp_path / "whole" / "loads.npz").loads
    assert loads.shape[0] == 4 and len(read_metrics(tmp_path / "parts")) == 4
    want = bias_after(loads)
    assert np.any(want != 0) and np.max(np.abs(want)) > 0.125
    np.testing.assert_array_equal(whole[f"params/{LEAF}"], want)
    np.testing.assert_array_equal(whole[f"ema/{LEAF}"], want)  # the average is of parameters, and this is none
    np.testing.assert_array_equal(arrays_of(tmp_path / "whole", 2)[f"params/{LEAF}"], bias_after(loads[:2]))


@pytest.mark.slow
def test_a_change_of_homes_leaves_the_bias_with_its_expert(tmp_path):
    """Under a planner that moves homes the bias follows the loads by expert id, and loads stay those without."""
    plain = (*RUN, "MoEConfig.num_experts = 16", "MeshConfig.expert = 8", "train.steps = 8")
    assert run_here(tmp_path, tmp_path / "plain", *plain)
    assert run_here(
        tmp_path, tmp_path / "moved", *plain, "PlannerConfig.name = 'hecate'", "PlannerConfig.replica_slots = 1",
        "PlannerConfig.overlap_degree = 4", "PlannerConfig.shard_every = 4", "PlannerConfig.swap_after = 3",
        "PlannerConfig.calibrate = False", "PlannerConfig.predictor = 'window'",
    )  # fmt: skip
    assert any("reshard_seconds" in record for record in read_metrics(tmp_path / "moved"))
    plain, moved = (read_loads(tmp_path / name / "loads.npz").loads for name in ("plain", "moved"))
    np.testing.assert_array_equal(arrays_of(tmp_path / "moved", 8)[f"params/{LEAF}"], bias_after(moved))
    # sums in another order may flip a choice between two that are almost equal
    assert np.sum(np.abs(plain.sum(axis=2) - moved.sum(axis=2))) <= 0.01 * np.sum(plain)
