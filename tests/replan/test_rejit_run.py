"""Real runs whose plans change: one that stops between proposal and swap, and two processes that swap together."""

import pytest
from support.tiny_run import assert_same_run, command, finish_pair, run_here, start_pair

from moe_jax.observe import read_metrics

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
    fields = ("plan_id", "replicas", "passes", "device_load_max_over_mean")
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 10, *fields)
    whole = read_metrics(tmp_path / "whole")
    assert [record["replicas"] > 0 for record in whole] == 4 * [False] + 6 * [True]
    assert any("reshard_seconds" in record for record in whole)


SWAP = (
    "PlannerConfig.name = 'hecate'", "PlannerConfig.replica_slots = 1", "PlannerConfig.overlap_degree = 2",
    "PlannerConfig.shard_every = 50", "PlannerConfig.calibrate = False", "PlannerConfig.interval = 5",
    "train.loads_every = 1000", "train.checkpoint_every = 0", "train.log_every = 1000",
)  # fmt: skip


def test_two_processes_swap_when_both_are_ready(tmp_path):
    for code, out, err in finish_pair(start_pair(command(tmp_path, tmp_path / "work", *SWAP, "train.steps = 3000"))):
        assert code == 0, out[-2000:] + err[-4000:]
    records = read_metrics(tmp_path / "work")
    replicas = [record["replicas"] > 0 for record in records]
    assert not any(replicas[:3]) and replicas[-1], "the compilation did not end within the run"
    assert sum(record["rejit_stall_seconds"] for record in records) < 0.1
