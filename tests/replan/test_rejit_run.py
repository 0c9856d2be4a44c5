"""A real run whose plans change, stopped between a proposal and its swap: the rest is the same bit for bit."""

import numpy as np
import pytest
from support.tiny_run import run_here

from moe_jax.observe import read_metrics
from moe_jax.training.checkpoint import Checkpointer

# slow: nine compilations
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")]

PLAN = (
    "PlannerConfig.name = 'hecate'", "PlannerConfig.replica_slots = 1", "PlannerConfig.overlap_degree = 4",
    "PlannerConfig.shard_every = 4", "PlannerConfig.swap_after = 3", "PlannerConfig.calibrate = False",
    "PlannerConfig.predictor = 'window'", "MeshConfig.expert = 8", "MoEConfig.num_experts = 16", "train.steps = 10",
    "train.checkpoint_every = 0", "train.learning_rate = 1e-3", "train.final_learning_rate = 1.0",
    "train.warmup_steps = 0",
)  # fmt: skip


def test_a_stop_between_proposal_and_swap_changes_nothing(tmp_path):
    assert run_here(tmp_path, tmp_path / "whole", *PLAN)
    # planned during step 2, due with step 5: the run stops after step 3, and once more behind the swap
    for steps in (3, 7, 10):
        assert run_here(tmp_path, tmp_path / "parts", *PLAN, f"train.steps = {steps}")
    whole, parts = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts")
    for name in ("step", "loss", "grad_norm", "plan_id", "replicas", "passes", "device_load_max_over_mean"):
        assert [record[name] for record in whole] == [record[name] for record in parts], name
    assert [record["replicas"] > 0 for record in whole] == 4 * [False] + 6 * [True]
    assert any("reshard_seconds" in record for record in whole)
    ends = [Checkpointer(tmp_path / name / "checkpoints", keep=1).read_arrays(10) for name in ("whole", "parts")]
    for name, leaf in ends[0].items():
        np.testing.assert_array_equal(leaf, ends[1][name], err_msg=name)
