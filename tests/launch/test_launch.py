"""The launch files: their syntax, that their parts agree, and what Slurm's script does with exit codes."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml  # orbax brings it

from moe_jax.recovery.links import parse_hosts
from moe_jax.recovery.workers import STOPPED
from moe_jax.supervise import find_index

_LAUNCH = Path(__file__).parents[2] / "scripts" / "launch"
_SBATCH = _LAUNCH / "train.sbatch"
_JOBSET = yaml.safe_load((_LAUNCH / "jobset.yaml").read_text())


def test_sbatch_asks_for_gpus_by_node_and_for_a_signal_before_the_end():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", _SBATCH.read_text(), re.MULTILINE))
    assert options["gres"].startswith("gpu:") and options["ntasks-per-node"] == "1"  # one supervisor, all GPUs
    assert "no-kill" in options  # the others go on without a lost node
    assert options["signal"] == "TERM@300"
    assert "requeue" in options and "gpus-per-task" not in options


@pytest.mark.parametrize(
    ("exit_code", "restarts", "requeued"),
    [(0, 0, False), (2, 0, False), (3, 0, False), (75, 0, True), (4, 0, True), (137, 0, True), (75, 100, False)],
)
def test_sbatch_requeues_what_a_restart_can_heal(tmp_path, exit_code, restarts, requeued):
    expected = 0 if requeued else exit_code
    (tmp_path / "bin").mkdir()
    listed = 'if [ "$1" = show ]; then printf "n0\\nn1\\n"; exit; fi; '
    ends = {"srun": ("", f"; exit {exit_code}"), "scontrol": (listed, "")}
    for name, (begin, end) in ends.items():
        body = f'{begin}echo "$@" > {tmp_path}/{name}; echo "$MOE_JAX_JOB_TOKEN" >> {tmp_path}/secrets{end}'
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_RESTART_COUNT": str(restarts)}
    slurm |= {
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_GPUS_ON_NODE": "4",
        "MOE_JAX_JOB_TOKEN": "",
    }  # the last: of whoever runs this test
    environment = os.environ | slurm | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    command = ["bash", str(_SBATCH), "--workdir=runs/a b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == expected, done.stdout + done.stderr
    assert (tmp_path / "scontrol").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    assert (
        "--hosts=n0:8475,n1:8475 --spares=0 --workers_per_host=4 -- python -u -m moe_jax.train --workdir=runs/a b"
        in (tmp_path / "srun").read_text()
    )
    secret = (tmp_path / "secrets").read_text().splitlines()[0]
    assert re.fullmatch("[0-9a-f]{64}", secret) and secret not in (tmp_path / "srun").read_text() + done.stdout


@pytest.mark.parametrize("code", [0, 2, 3, 75])
def test_sbatch_starts_a_supervisor_again_that_was_lost(tmp_path, code):
    """What srun runs on each node: after codes 137 and 4 again, on the same arguments; and not after its last ones."""
    script = re.search(r"bash -c '\n(.*?)' supervise", _SBATCH.read_text(), re.DOTALL)
    (tmp_path / "python").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\n'
        f"case $(wc -l < {tmp_path}/starts) in 1) kill -9 $$;; 2) exit 4;; *) exit {code};; esac\n"
    )
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for name in ("python", "sleep"):
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", script[1], "supervise", "--hosts=n0:8475", "--", "python", "a b"]
    assert subprocess.run(command, env=environment, timeout=60).returncode == code
    starts = (tmp_path / "starts").read_text().splitlines()
    assert starts == ["-u -m moe_jax.supervise --hosts=n0:8475 -- python a b"] * 3


def test_jobset_parts_agree():
    assert (_JOBSET["apiVersion"], _JOBSET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [workers] = _JOBSET["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    name = _JOBSET["metadata"]["name"]
    port, above = (port["containerPort"] for port in container["ports"])
    assert above == port + 1  # process 0's
    [hosts] = [word.partition("=")[2] for word in container["command"] if word.startswith("--hosts=")]
    pods = [f"{name}-{workers['name']}-0-{index}.{name}" for index in range(job["completions"])]
    assert parse_hosts(hosts) == [(pod, port) for pod in pods] and job["parallelism"] == job["completions"]
    assert find_index(parse_hosts(hosts), {"JOB_COMPLETION_INDEX": "2"}) == 2
    assert environment["MOE_JAX_JOB_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "moe-jax", "key": "token"}
    assert "kubectl create secret generic moe-jax --from-literal=token=" in (_LAUNCH / "jobset.yaml").read_text()
    assert job["completionMode"] == "Indexed"
    command = container["command"]
    assert command[:4] == ["python", "-u", "-m", "moe_jax.supervise"]
    assert command[command.index("--") + 1 :][:4] == ["python", "-u", "-m", "moe_jax.train"]
    assert f"--workers_per_host={container['resources']['limits']['nvidia.com/gpu']}" in command  # one a GPU


def test_jobset_restarts_all_but_mistakes():
    job = _JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2, 3]
    assert job["backoffLimit"] > 0  # a lost pod is made again, while the others go on
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # the policy demands Never
    [at_failure] = _JOBSET["spec"]["failurePolicy"]["rules"]
    assert (at_failure["action"], at_failure["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert _JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert STOPPED not in rule["onExitCodes"]["values"]
