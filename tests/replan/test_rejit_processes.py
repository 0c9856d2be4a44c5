"""Two processes swap executables at the same step, agreed on by the metrics alone, while one of them compiles later."""

import pytest
from support.ports import free_port
from support.tiny_run import command, finish, start

from moe_jax.observe import read_metrics

PLAN = (
    "PlannerConfig.name = 'hecate'", "PlannerConfig.replica_slots = 1", "PlannerConfig.overlap_degree = 2",
    "PlannerConfig.shard_every = 50", "PlannerConfig.calibrate = False", "PlannerConfig.interval = 5",
    "train.loads_every = 1000", "train.checkpoint_every = 0", "train.log_every = 1000",
)  # fmt: skip


def train_on_two(folder, *changes):
    """Run two processes of two devices each; return the records of process 0."""
    port = free_port()
    processes = []
    for index in range(2):
        flags = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}"]
        processes.append(start(command(folder, folder / "work", *PLAN, *changes, flags=flags)))
    for process in processes:
        code, out, err = finish(process)
        assert code == 0, out[-2000:] + err[-4000:]
    return read_metrics(folder / "work")


@pytest.mark.slow
def test_two_processes_swap_after_two_steps(tmp_path):
    records = train_on_two(tmp_path, "train.steps = 10", "PlannerConfig.swap_after = 2")
    assert records[-1]["step"] == 10
    assert [record["replicas"] > 0 for record in records[:5]] == [False, False, False, True, True]


@pytest.mark.slow
def test_two_processes_swap_when_both_are_ready(tmp_path):
    records = train_on_two(tmp_path, "train.steps = 3000")
    replicas = [record["replicas"] > 0 for record in records]
    assert not any(replicas[:3]) and replicas[-1], "the compilation did not end within the run"
    assert sum(record["rejit_stall_seconds"] for record in records) < 0.1
