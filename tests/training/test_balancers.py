"""Every balancer trains the same model: one loss curve, while plans change, experts move and runs stop.

The tolerance of 1e-4 relative over 40 steps is what rounding grows to in float32 when sums run in another order. Slow:
two dozen compilations.
"""

import jax
import numpy as np
import pytest
from support.tiny_run import assert_same_run, command, finish_pair, run_here, start_pair

from moe_jax.config.gin_files import parse_run_config
from moe_jax.observe import read_metrics
from moe_jax.training.hosts import Hosts
from moe_jax.training.run import run

pytestmark = pytest.mark.slow

# planned ahead, whatever the file says
BALANCERS = {
    "fastermoe": ("PlannerConfig.when = 'ahead'",),
    "llep": ("PlannerConfig.when = 'ahead'",),
    **dict.fromkeys(("pro_prophet", "hecate", "smartmoe", "flexmoe", "eplb", "balanced"), ()),
}
# a cosine ends at train.steps: runs that stop early are compared at one rate
FLAT = ("train.learning_rate = 1e-3", "train.final_learning_rate = 1.0", "train.warmup_steps = 0")
MOVES_HOMES = ("hecate", "smartmoe", "eplb")


def train(name, folder, cache, *bindings):
    files = [f"configs/run/{name}.gin"]
    config, text, operative = parse_run_config(files, [f"DataConfig.cache_dir = {str(cache)!r}", *bindings])
    assert run(config, text, operative, Hosts(), workdir=str(folder))
    return read_metrics(folder)


def losses(records):
    return np.array([record["loss"] for record in records])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    assert len(jax.devices()) == 8
    folder = tmp_path_factory.mktemp("balancers")
    return folder, losses(train("deepspeed_moe", folder / "deepspeed_moe", folder / "cache"))


@pytest.mark.parametrize("name", BALANCERS)
def test_loss_curve_equals_that_of_plain_expert_parallelism(base, name, capsys):
    folder, want = base
    records = train(name, folder / name, folder / "cache", *BALANCERS[name])
    assert len(want) == 40
    np.testing.assert_allclose(losses(records), want, rtol=1e-4)
    assert records[-1]["plan_id"] >= 10
    assert any("reshard_seconds" in record for record in records) == (name in MOVES_HOMES)
    assert {record.get("plan_remark") for record in records} == {"tau 8" if name == "hecate" else None}
    assert ("| tau 8 |" in capsys.readouterr().out) == (name == "hecate")
    assert all(record["dropped_fraction"] == 0 for record in records)


# what each decides with the counts of the step: replicas, shares, more replicas beside those planned ahead
AFTER_GATE = {
    "fastermoe": ("PlannerConfig.when = 'after_gate'",),
    "balanced": ("PlannerConfig.when = 'after_gate'",),
    "llep": (),
    "hecate": ("PlannerConfig.calibrate = True", "PlannerConfig.replica_slots = 3", "ModelConfig.prefetch = 'none'"),
}


@pytest.mark.parametrize("name", AFTER_GATE)
def test_loss_curve_with_decisions_after_the_gate(base, name):
    folder, want = base
    records = train(name, folder / f"{name}_late", folder / "cache", *AFTER_GATE[name])
    np.testing.assert_allclose(losses(records), want, rtol=1e-4)
    assert len({record["replicas"] for record in records}) > 1
    assert all(record["dropped_fraction"] == 0 for record in records)


def test_a_checkpoint_goes_on_under_other_placements(base):
    """20 steps with hecate, 10 with eplb, 10 without a planner: still the same curve."""
    folder, want = base
    work = folder / "mixed"
    for steps, name in ((20, "hecate"), (30, "eplb"), (40, "deepspeed_moe")):
        records = train(name, work, folder / "cache", f"train.steps = {steps}", *FLAT)
    flat = losses(train("deepspeed_moe", folder / "flat", folder / "cache", *FLAT))
    np.testing.assert_allclose(losses(records), flat, rtol=1e-4)
    assert len(want) == len(flat)


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
