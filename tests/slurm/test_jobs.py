"""What a job of scripts/launch/train.sbatch does on a real Slurm whose nodes are lost, stopped, or too few.

Two nodes of two CPU devices train by `hecate`, which moves homes; a third stands by. Each attempt takes about 20 s.
"""

import re
import subprocess
import sys
import time

import numpy as np
import pytest
from slurm_jobs import Job
from support.quick_compiles import QUICK
from support.tiny_run import assert_same_run, bindings_of

from moe_jax.observe.metrics_file import read_metrics

pytestmark = pytest.mark.slurm

HECATE = (
    "PlannerConfig.name = 'hecate'", "PlannerConfig.replica_slots = 2", "Hecate.overlap_degree = 2",
    "PlannerConfig.cluster = 'configs/cluster/host_devices.gin'", "PlannerConfig.swap_after = 1",
    "PlannerConfig.interval = 1", "Hecate.shard_every = 4", "ModelConfig.prefetch = 'hecate'",
    "train.steps = 40", "train.checkpoint_every = 5", "train.keep_checkpoints = 2",
)  # fmt: skip
LOST_AFTER = 10


def submit(shared, workdir, *changes, nodes=3, flags=(), lost_after=LOST_AFTER, **environment):
    bindings = [f"--gin_bindings={binding}" for binding in bindings_of(shared, *HECATE, *changes)]
    flags = [f"--workdir={workdir}", "--host_devices=2", f"--lost_after_seconds={lost_after}", *flags]
    job_folder = shared / f"job_{workdir.name}"
    return Job(job_folder, [*bindings, *flags], nodes=nodes, XLA_FLAGS=QUICK, **{"WANT": "2", **environment})


def train(shared, name, *changes, **options):
    """Return the run folder of a job that ends well."""
    with submit(shared, shared / name, *changes, **options) as job:
        assert job.end(300) == 0, job.text()
    return shared / name


def step_of(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines() if (workdir / "metrics.jsonl").exists() else []
    return int(re.match(r'{"step": (\d+)', lines[-1])[1]) if lines else 0


def wait_for_step(job, workdir, step, seconds=240.0):
    end = time.monotonic() + seconds
    while step_of(workdir) < step:
        assert time.monotonic() < end and not job.has_ended(), job.text()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(nodes, shared):
    """The run that nobody disturbs."""
    return train(shared, "whole", nodes=2)


def test_two_nodes_train_with_hecate(whole):
    records = read_metrics(whole)
    assert [record["step"] for record in records] == list(range(1, 41))
    assert sum("reshard_seconds" in record for record in records) > 3  # homes moved
    assert records[-1]["loss"] < records[0]["loss"] - 1


def test_a_spare_takes_the_place_of_a_node_that_is_lost_during_a_step(lab, shared, whole):
    """Process 1's node goes; the third one, which ran nothing, is taken; losses are those of the whole run."""
    workdir = shared / "step"
    with submit(shared, workdir) as job:
        wait_for_step(job, workdir, 12)
        assert "attempt 0 on 2 nodes: n2 n3" in job.text()
        lab.lose("n3")
        code, text = job.end(), job.text()
    assert code == 0, text
    assert re.search(r"moe_jax: process 1 \(n3\) (is lost: silent for \d+ s|ended)|Gloo", text), text
    assert "n3 does not answer any more" in text and "attempt 1 on 2 nodes: n2 n1" in text
    assert "resuming at step" in text
    assert_same_run(whole, workdir, 40)


def test_a_node_lost_during_a_save_costs_the_steps_since_the_one_before(lab, shared, whole):
    workdir = shared / "save"
    with submit(shared, workdir) as job:
        wait_for_step(job, workdir, 9)
        folder, end = workdir / "checkpoints", time.monotonic() + 60
        while not any("tmp" in path.name or path.name == "10" for path in folder.iterdir()):
            assert time.monotonic() < end
        lab.lose("n3")
        assert job.end() == 0, job.text()
    assert re.search(r"resuming at step (5|10)\b", job.text()), job.text()
    assert_same_run(whole, workdir, 40)


def test_a_node_lost_during_the_first_compilation_costs_nothing(lab, shared, whole):
    workdir = shared / "compilation"
    with submit(shared, workdir) as job:
        job.wait(r"0: mesh ")
        assert step_of(workdir) == 0
        lab.lose("n3")
        assert job.end() == 0, job.text()
    assert "attempt 1 on 2 nodes: n2 n1" in job.text()
    assert_same_run(whole, workdir, 40)


def test_the_node_of_process_0_is_named_by_the_loop(lab, shared, whole):
    """jax may abort the others before they can say who is lost; code 134 is as 4."""
    workdir = shared / "first"
    with submit(shared, workdir) as job:
        wait_for_step(job, workdir, 12)
        lab.lose("n2")
        assert job.end() == 0, job.text()
    text = job.text()
    assert "n2 does not answer any more" in text and "attempt 1 on 2 nodes: n3 n1" in text
    assert_same_run(whole, workdir, 40)


def test_the_node_of_the_batch_script_is_lost_and_the_job_returns_to_the_queue(lab, shared, whole):
    workdir = shared / "script"
    with submit(shared, workdir, nodes=2) as job:
        wait_for_step(job, workdir, 7)
        lab.lose("n1")
        end = time.monotonic() + 120
        while job.shown("Restarts") == "0":
            assert time.monotonic() < end, job.text()
            time.sleep(0.2)
        lab.restore()
        job.hurry()
        assert job.end() == 0, job.text()
    assert_same_run(whole, workdir, 40)


def test_sigterm_saves_and_returns_to_the_queue(lab, shared, whole):
    workdir = shared / "signal"
    with submit(shared, workdir) as job:
        wait_for_step(job, workdir, 12)
        lab.enter("n1", "pkill", "-TERM", "-f", "slurm_script").wait()  # as Slurm does before the time limit
        job.wait("stopped by a signal: back into the queue")
        assert "codes 75," in job.text()
        stopped, saved = step_of(workdir), max(int(path.name) for path in (workdir / "checkpoints").iterdir())
        assert stopped == saved
        job.hurry()
        assert job.end() == 0, job.text()
    assert f"resuming at step {stopped}" in job.text() and job.shown("Restarts") == "1"
    assert_same_run(whole, workdir, 40)


def test_a_wrong_flag_on_one_node_ends_all_with_a_line_and_no_restart(lab, shared):
    """A config file in the home folder, which each node has for itself."""
    for node, rate in (("n2", 1e-3), ("n1", 2e-3)):
        line = f"echo 'train.learning_rate = {rate}' > ~/moe_jax_slurm_test.gin"
        assert lab.enter(node, "sh", "-c", line).wait() == 0
    began = time.monotonic()
    with submit(shared, shared / "flag", nodes=2, flags=["--gin_file=~/moe_jax_slurm_test.gin"]) as job:
        assert job.end(120) == 2, job.text()
    assert len(re.findall(r"\d: error: train.learning_rate .*0\.002.* on process 1", job.text())) >= 1, job.text()
    assert "attempt 1" not in job.text() and time.monotonic() - began < 60 and "Traceback" not in job.text()


def test_a_folder_that_not_all_nodes_see_is_a_line(lab, shared):
    with submit(shared, shared / "private", nodes=2, flags=["--workdir=/tmp/run"], MAX_RESTARTS="0") as job:
        assert job.end(180) == 4, job.text()
    assert re.search(r"error: process 1 does not see process 0's run folder /tmp/run; give", job.text()), job.text()
    assert re.search(r"moe_jax: process 1 .* ended with exit code 4: .*/tmp/run", job.text()), job.text()
    assert "Traceback" not in job.text()


def test_two_nodes_go_on_where_three_were(lab, shared):
    """On another mesh sums are rounded otherwise: 1e-9 in float64; the first resumed loss 1e-5 in float32."""
    sizes = ("MoEConfig.num_experts = 12", "train.batch_size = 12", "train.steps = 30", "train.checkpoint_every = 10")
    for dtype, steps, tolerance in (("float64", 20, 1e-9), ("float32", 1, 1e-5)):
        changes = (*sizes, f"ModelConfig.dtype = '{dtype}'")
        undisturbed, workdir = train(shared, f"three_{dtype}", *changes, WANT="3"), shared / f"two_{dtype}"
        with submit(shared, workdir, *changes, WANT="3", MIN_NODES="2") as job:
            wait_for_step(job, workdir, 12)
            lab.lose("n3")
            assert job.end() == 0, job.text()
        lab.restore()
        assert "attempt 1 on 2 nodes: n2 n1" in job.text() and "resuming at step 10" in job.text()
        want, got = ([record["loss"] for record in read_metrics(folder)] for folder in (undisturbed, workdir))
        resumed = slice(10, 10 + steps)
        np.testing.assert_allclose(got[resumed], want[resumed], rtol=tolerance)


def test_where_too_few_nodes_answer_the_job_waits(lab, shared, whole):
    """For the one that boots again, or in the queue where Slurm has taken it back."""
    workdir = shared / "waits"
    with submit(shared, workdir, nodes=2, MIN_NODES="2") as job:
        wait_for_step(job, workdir, 7)
        lab.lose("n2")
        at = job.wait("waiting for 2 nodes; n1 answer")
        lab.restore()
        at = job.wait("attempt 1 on 2 nodes: n2 n1", after=at)
        wait_for_step(job, workdir, 20)
        lab.lose("n2")
        job.wait("fewer than 2 nodes are left of the allocation: back into the queue", after=at)
        lab.restore()
        job.hurry()
        assert job.end() == 0, job.text()
    assert_same_run(whole, workdir, 40)


def test_a_folder_whose_holder_died_is_taken_on_another_node_within_a_minute(lab, shared):
    folder = shared / "locked"
    code = "import sys, time; from moe_jax.jobs.lock import *; FolderLock(RunFolder(sys.argv[1]), print).__enter__()"
    hold = [sys.executable, "-c", f"{code}; print('held', flush=True); time.sleep(100)", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with lab.enter("n1", *hold, **pipes) as first:
        assert first.stdout.readline() == "held\n"
        second = lab.enter("n2", *hold, **pipes)
        assert second.wait(60) == 1 and re.search(r"held by process \d+ on n1; wait", second.communicate()[1])
        lab.enter("n1", "pkill", "-9", "-f", "moe_jax.jobs.lock").wait()
    began = time.monotonic()
    with lab.enter("n2", *hold, **pipes) as second:
        assert second.stdout.readline() == "held\n"
        assert 20 < time.monotonic() - began < 60
        lab.enter("n2", "pkill", "-9", "-f", "moe_jax.jobs.lock").wait()
