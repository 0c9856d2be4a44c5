"""The launch files: their syntax, that their parts agree, and what Slurm's script does with exit codes."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml  # orbax brings it

_LAUNCH = Path(__file__).parents[2] / "scripts" / "launch"
_SBATCH = _LAUNCH / "train.sbatch"
_JOBSET = yaml.safe_load((_LAUNCH / "jobset.yaml").read_text())


def test_sbatch_asks_for_gpus_by_node_and_for_a_signal_before_the_end():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", _SBATCH.read_text(), re.MULTILINE))
    assert options["gres"] == f"gpu:{options['ntasks-per-node']}"  # one process per GPU
    assert options["signal"] == "TERM@300"
    assert "requeue" in options and "gpus-per-task" not in options


@pytest.mark.parametrize(
    ("exit_code", "restarts", "requeued"),
    [(0, 0, False), (2, 0, False), (3, 0, False), (75, 0, True), (4, 0, True), (137, 0, True), (75, 100, False)],
)
def test_sbatch_requeues_what_a_restart_can_heal(tmp_path, exit_code, restarts, requeued):
    expected = 0 if requeued else exit_code
    (tmp_path / "bin").mkdir()
    ends = {"srun": f"; exit {exit_code}", "scontrol": ""}
    for name, end in ends.items():
        body = f'echo "$@" > {tmp_path}/{name}; echo "$MOE_JAX_JOB_TOKEN" >> {tmp_path}/secrets{end}'
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_RESTART_COUNT": str(restarts)}
    slurm |= {"MOE_JAX_JOB_TOKEN": ""}  # of whoever runs this test
    environment = os.environ | slurm | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    command = ["bash", str(_SBATCH), "--workdir=runs/a b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == expected, done.stdout + done.stderr
    assert (tmp_path / "scontrol").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    assert "moe_jax.train --preempt_exit_code=75 --workdir=runs/a b" in (tmp_path / "srun").read_text()
    secret = (tmp_path / "secrets").read_text().splitlines()[0]
    assert re.fullmatch("[0-9a-f]{64}", secret) and secret not in (tmp_path / "srun").read_text() + done.stdout


def test_jobset_parts_agree():
    assert (_JOBSET["apiVersion"], _JOBSET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [workers] = _JOBSET["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    name = _JOBSET["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert job["parallelism"] == job["completions"] == int(environment["JAX_NUM_PROCESSES"]["value"])
    assert environment["JAX_COORDINATOR_ADDRESS"]["value"] == f"{name}-{workers['name']}-0-0.{name}:{port}"
    assert environment["MOE_JAX_JOB_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "moe-jax", "key": "token"}
    assert "kubectl create secret generic moe-jax --from-literal=token=" in (_LAUNCH / "jobset.yaml").read_text()
    assert "job-completion-index" in environment["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert job["completionMode"] == "Indexed"
    assert container["command"][:4] == ["python", "-u", "-m", "moe_jax.train"]


def test_jobset_restarts_all_but_mistakes():
    job = _JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2, 3]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"  # the policy demands Never
    [at_failure] = _JOBSET["spec"]["failurePolicy"]["rules"]
    assert (at_failure["action"], at_failure["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert _JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0
    # the code of an agreed stop must not be one of those that end the JobSet
    command = job["template"]["spec"]["containers"][0]["command"]
    [preempt] = [argument for argument in command if argument.startswith("--preempt_exit_code=")]
    assert int(preempt.split("=")[1]) not in rule["onExitCodes"]["values"]
