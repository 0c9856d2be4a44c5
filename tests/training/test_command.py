"""The command line as a user meets it: exit codes, signals, several processes, a process that dies."""

import json
import os
import signal
import time

import pytest
from support.tiny_run import assert_same_run, command, finish, finish_pair, start, start_pair

from moe_jax.observe.metrics_file import read_metrics
from moe_jax.storage.checkpoint import Checkpointer


def wait_for_steps(work, steps, process, since=0.0):
    """Wait until metrics.jsonl shows `steps` steps, the last of them written after `since`."""
    end, path = time.monotonic() + 120, work / "metrics.jsonl"
    while time.monotonic() < end:
        if path.exists() and path.stat().st_mtime > since and len(path.read_text().splitlines()) >= steps:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("the run did not get going")


def test_sigterm_to_one_of_two_saves_and_stops_both_and_one_process_goes_on(tmp_path):
    work = tmp_path / "work"
    processes = start_pair(command(tmp_path, work, "train.steps = 100000", "train.checkpoint_every = 0"))
    wait_for_steps(work, 4, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    done = finish_pair(processes)
    assert [code for code, *_ in done] == [75, 75] and "stopped by a signal after step" in done[0][1], done
    saved = Checkpointer(work / "checkpoints", keep=3).latest()
    assert saved == read_metrics(work)[-1]["step"] and saved >= 4
    code, out, err = finish(start(command(tmp_path, work, f"train.steps = {saved + 2}")))
    assert code == 0 and f"resuming at step {saved}" in out, err
    assert [record["step"] for record in read_metrics(work)] == list(range(1, saved + 3))


@pytest.mark.slow
def test_process_0_killed_during_a_save_is_named_in_one_line(tmp_path):
    work = tmp_path / "work"
    processes = start_pair(command(tmp_path, work, "train.steps = 100000", "train.checkpoint_every = 1"))
    wait_for_steps(work, 2, processes[0])
    while all(name.isdecimal() for name in os.listdir(work / "checkpoints")):
        assert processes[0].poll() is None
    processes[0].kill()
    code, _, err = finish(processes[1], 20)
    finish(processes[0])
    said = [line for line in err.splitlines() if not line.startswith(("WARNING", "W0", "I0"))]
    # jax may abort it first, from C++
    assert code == -signal.SIGABRT or (code == 4 and len(said) == 1 and "moe_jax: process 0 (" in said[0]), err


def test_two_processes_give_the_curve_of_one(tmp_path):
    """Two run optimistic steps, and those whose buckets overflow again; one runs complete steps."""
    one, two, changes = tmp_path / "one", tmp_path / "two", ("MoEConfig.bucket_slack = 1.1", "MoEConfig.top_k = 1")
    code, _, err = finish(start(command(tmp_path, one, *changes, devices=4)))
    assert code == 0, err
    done = finish_pair(start_pair(command(tmp_path, two, *changes, "train.optimistic = True")))
    assert [code for code, *_ in done] == [0, 0], done
    assert "4 devices a node (2 processes on 1 host(s))" in done[0][1]
    want, got = read_metrics(one), read_metrics(two)
    assert [record["step"] for record in got] == [record["step"] for record in want]
    for a, b in zip(want, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["device_load_max_over_mean"] == pytest.approx(a["device_load_max_over_mean"], rel=1e-6)
    assert sum(record["run_again"] for record in got) > 0
    assert json.loads((two / "environment.json").read_text())["processes"] == 2


SWAP = (
    "PlannerConfig.name = 'hecate'", "PlannerConfig.replica_slots = 1", "Hecate.overlap_degree = 2",
    "Hecate.shard_every = 50", "Hecate.calibrate = False", "PlannerConfig.interval = 5",
    "train.loads_every = 1000", "train.checkpoint_every = 0", "train.log_every = 1000",
)  # fmt: skip


@pytest.mark.slow
def test_two_processes_swap_when_both_are_ready(tmp_path):
    for code, out, err in finish_pair(start_pair(command(tmp_path, tmp_path / "work", *SWAP, "train.steps = 3000"))):
        assert code == 0, out[-2000:] + err[-4000:]
    records = read_metrics(tmp_path / "work")
    replicas = [record["replicas"] > 0 for record in records]
    assert not any(replicas[:3]) and replicas[-1], "the compilation did not end within the run"
    assert sum(record["rejit_stall_seconds"] for record in records) < 0.1


# homes move every four steps; what is planned during one step is due three steps later, behind a checkpoint
PLANNER = (
    "PlannerConfig.name = 'hecate'", "PlannerConfig.replica_slots = 1", "Hecate.overlap_degree = 4",
    "Hecate.shard_every = 4", "PlannerConfig.swap_after = 3", "Hecate.calibrate = False",
    "PlannerConfig.predictor = 'window'", "MoEConfig.num_experts = 16", "MoEConfig.bucket_slack = 16.0",
)  # fmt: skip


@pytest.mark.slow
def test_three_kills_change_nothing(tmp_path):
    """Killed while it saves, trains and starts, a run whose experts move ends bit for bit as an undisturbed one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    checkpoints, words = killed / "checkpoints", (*PLANNER, "train.steps = 60", "train.checkpoint_every = 3")
    assert finish(start(command(tmp_path, whole, *words, devices=4)))[0] == 0
    for moment in ("save", "step", "start"):
        newest, began = Checkpointer(checkpoints, keep=3).latest() or 0, time.time()
        process = start(command(tmp_path, killed, *words, devices=4))
        while moment == "save" and all(path.name.isdecimal() for path in checkpoints.glob("*")):
            assert process.poll() is None, "the run ended before its first checkpoint"
        if moment == "step":
            wait_for_steps(killed, newest + 2, process, since=began)
        elif moment == "start":
            time.sleep(2)
        process.kill()
        out = finish(process)[1]
        assert (Checkpointer(checkpoints, keep=3).latest() or 0) >= newest
        assert "resuming" not in out or f"resuming at step {newest}" in out
    code, _, err = finish(start(command(tmp_path, killed, *words, devices=4)))
    assert code == 0, err
    assert_same_run(whole, killed, 60, "replicas")
    records = read_metrics(whole)
    assert records[-1]["replicas"] > 0 and any("reshard_seconds" in record for record in records)
