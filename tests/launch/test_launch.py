"""The launch files without a cluster: what Slurm's script does with codes and nodes, and the commands of the JobSet.

`tests/slurm` runs the script on a real Slurm.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # orbax brings it
from support.tiny_run import bindings_of, finish_pair, free_port, start

_LAUNCH = Path(__file__).parents[2] / "scripts" / "launch"
_SBATCH = _LAUNCH / "train.sbatch"
_JOBSET = (_LAUNCH / "jobset.yaml").read_text()

# Stands in for Slurm's commands: all nodes of ANSWER answer; an attempt ends with the codes of its line of `attempts`,
# one a node, and with the step that stands behind them.
SRUN = """#!/bin/bash
echo $(echo "$@" | tr "\n" " ") >> calls
for word in "$@"; do case $word in --nodelist=*) nodes=${word#*=} ;; esac; done
if [[ ${!#} = true ]]; then [[ " $ANSWER " = *" $nodes "* ]]; exit; fi
read -r line < attempts; sed -i 1d attempts
for code in ${line% *}; do echo "0: moe_jax code $code"; ((code > ${most:=0})) && most=$code; done
echo '{"step": '"${line##* }"', "loss": 1}' > run/metrics.jsonl
exit $most
"""


def run_script(tmp_path, attempts, answer="n1 n2 n3", **environment):
    """Return (exit code, output, calls of srun that trained, calls of scontrol) with these attempts' ends."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "attempts").write_text("".join(f"{line}\n" for line in attempts))
    listed = 'if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; else echo "$@" >> requeued; fi'
    texts = {"srun": SRUN, "scontrol": f"#!/bin/sh\n{listed}\n", "hostname": "#!/bin/sh\necho n1\n"}
    texts["squeue"] = '#!/bin/sh\ncase "$*" in *%T) echo "${STATE:-RUNNING}" ;; *%N) echo "n[1-3]" ;; esac\n'
    for name, text in (texts | {"sleep": "#!/bin/sh\n"}).items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "SLURM_JOB_ID": "17", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-3]", "ANSWER": answer,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    } | environment  # fmt: skip
    command = ["bash", str(_SBATCH), "--gin_file=a b.gin", "--workdir=run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if not line.endswith(" true")]
    requeued = (tmp_path / "requeued").read_text() if (tmp_path / "requeued").exists() else ""
    return done.returncode, done.stdout + done.stderr, calls, requeued


def test_sbatch_asks_for_whole_nodes_and_for_a_signal_before_the_end():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", _SBATCH.read_text(), re.MULTILINE))
    assert options["gres"].startswith("gpu:") and options["ntasks-per-node"] == "1" and "exclusive" in options
    assert "no-kill" in options  # the others go on without a lost node
    assert options["signal"] == "B:TERM@300" and "requeue" in options


@pytest.mark.parametrize(
    ("attempts", "code", "starts"),
    [
        (["0 0 9"], 0, 1),
        (["137 2 0"], 2, 1),  # srun itself says 137
        (["4 3 5"], 3, 1),
        (["4 137 5", "4 1 9", "0 0 20"], 0, 3),
        (["134 137 5", "4 1 5", "4 1 5", "4 4 5"], 4, 4),  # three in a row without a new step
        (["4 4 5", "4 4 3", "4 4 4", "4 4 6", "0 0 9"], 0, 5),  # resumed at an earlier one, then beyond
        (["4 4 1", "4 4 2", "4 4 3"], 4, 3),  # MAX_RESTARTS
    ],
)
def test_sbatch_starts_again_what_a_restart_can_heal(tmp_path, attempts, code, starts):
    most = "2" if attempts[-1] == "4 4 3" else "100"
    found, said, calls, requeued = run_script(tmp_path, attempts, MAX_RESTARTS=most)
    assert (found, len(calls), requeued) == (code, starts, ""), said
    ports = [re.search(r" n2 n3 n1 (\d+) --gin_file=a b.gin --workdir=run$", call)[1] for call in calls]
    assert len(set(ports)) == starts  # the last attempt's process 0 may still hold its own


def test_sbatch_takes_the_nodes_that_answer_with_its_own_last(tmp_path):
    _, said, (call,), _ = run_script(tmp_path, ["0 0 9"], answer="n1 n3", WANT="2")
    assert "attempt 0 on 2 nodes: n3 n1" in said and " --nodelist=n3,n1 " in call and "--overlap" in call


@pytest.mark.parametrize(
    ("restarts", "state", "code", "told"),
    [("3", "RUNNING", 0, "requeue 17\n"), ("100", "RUNNING", 75, ""), ("3", "COMPLETING", 0, "")],  # by scancel
)
def test_sbatch_returns_to_the_queue_what_a_signal_stopped(tmp_path, restarts, state, code, told):
    found, said, _, requeued = run_script(tmp_path, ["75 75 9"], SLURM_RESTART_COUNT=restarts, STATE=state)
    assert (found, requeued) == (code, told), said


def test_jobset_restarts_all_but_mistakes():
    jobset = yaml.safe_load(_JOBSET)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2, 3]
    assert job["backoffLimit"] == 0 and job["completionMode"] == "Indexed"
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # the policy demands Never
    [at_failure] = jobset["spec"]["failurePolicy"]["rules"]
    assert (at_failure["action"], at_failure["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.slow
def test_jobset_commands_train_on_cpus(tmp_path):
    """Of two pods, as its header says how; each name of a pod is this machine here."""
    places = ("parallelism: ", "completions: ", "--num_processes=")
    for place in places:
        assert _JOBSET.count(f"{place}4\n") == 1
    text = re.sub(f"({'|'.join(places)})4\n", r"\g<1>2\n", _JOBSET)
    jobset = yaml.safe_load(text)
    [workers] = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8 and job["parallelism"] == job["completions"] == 2
    [port] = [port["containerPort"] for port in container["ports"]]
    first, here = f"{jobset['metadata']['name']}-{workers['name']}-0-0.{jobset['metadata']['name']}:{port}", free_port()
    assert any(entry["name"] == "POD_INDEX" and "valueFrom" in entry for entry in container["env"])
    python, *command = container["command"]
    assert python == "python" and f"--coordinator={first}" in command
    command = [word.replace(first, f"127.0.0.1:{here}") for word in command] + ["--host_devices=1"]
    command += [f"--gin_bindings={binding}" for binding in bindings_of(tmp_path)] + [f"--workdir={tmp_path / 'run'}"]
    pods = [
        start([sys.executable, *(word.replace("$(POD_INDEX)", str(index)) for word in command)]) for index in range(2)
    ]
    done = finish_pair(pods)
    assert [code for code, *_ in done] == [0, 0], done
    assert (tmp_path / "run" / "checkpoints" / "00000006").is_dir() and "(2 processes on" in done[0][1]
