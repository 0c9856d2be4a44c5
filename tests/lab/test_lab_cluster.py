"""The lab as its user runs it (however it ends, nothing may be left behind)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from network import find_missing, lab_names, processes_in, start_ticks

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "lab" / "cluster.py"
_JAX_WORKER = _ROOT / "tests" / "distributed" / "hosts_worker.py"


class Lab:
    """A running scripts/lab/cluster.py."""

    def __init__(self, *arguments: str):
        command, env = [sys.executable, str(_SCRIPT), *arguments], os.environ | {"PYTHONPATH": str(_ROOT)}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []

    def names(self) -> list[str]:
        return [name for name in lab_names() if name.startswith(f"moelab-{self.process.pid}-")]

    def read_until(self, pattern: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern} not in {self.said} {self.process.communicate()[1]}")

    def end(self, seconds: float = 60) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, "".join(self.said) + out, err


@pytest.fixture
def start_lab():
    """Return a function that starts a lab, of which nothing may be left afterwards; skip where none can be built."""
    if missing := find_missing(shaped=True):
        pytest.skip(missing)
    labs = []

    def start(*arguments: str) -> Lab:
        labs.append(Lab(*arguments))
        return labs[-1]

    yield start
    for lab in labs:
        if lab.process.poll() is None:
            lab.process.terminate()
            lab.process.communicate(timeout=70)
    assert not [name for lab in labs for name in lab.names()]


def test_each_host_has_its_name_address_and_output(start_lab, tmp_path):
    script = "hostname; hostname -I; echo $JAX_PROCESS_ID of $JAX_NUM_PROCESSES >&2"
    code, out, err = start_lab("--hosts=2", f"--logs={tmp_path}/logs", "--", "sh", "-c", script).end()
    assert code == 0
    said = {"[host0] 10.99.0.1", "[host0] host0", "[host1] 10.99.1.1", "[host1] host1"}
    assert {" ".join(line.split()[:2]) for line in out.splitlines()} == said
    assert sorted(err.splitlines()) == ["[host0] 0 of 2", "[host1] 1 of 2"]
    assert "1 of 2\n" in (tmp_path / "logs" / "host1.log").read_text()


@pytest.mark.parametrize(
    ("flag", "script", "code", "said"),
    [
        ("--timeout=0.5", "sleep 100", 124, ["killing all hosts: still running after --timeout=0.5 s"]),
        # the first failure decides the code, and the others are killed after their grace
        ("--timeout=60", "[ $JAX_PROCESS_ID = 1 ] && exit 7; sleep 100", 7,
         ["host1: exit code 7", "killing host0: still running after 1 s", "host0: killed by SIGKILL"]),
    ],
)  # fmt: skip
def test_what_does_not_end_is_killed(start_lab, flag, script, code, said):
    got, _, err = start_lab("--hosts=2", "--grace=1", flag, "--", "sh", "-c", script).end(20)
    assert got == code and all(line in err for line in said), err


def test_a_killed_lab_takes_its_hosts_with_it_and_the_next_start_removes_the_rest(start_lab):
    other = start_lab("--hosts=1", "--", "sh", "-c", "echo up; sleep 100")  # must not be touched
    other.read_until("up")
    lab = start_lab("--hosts=2", "--", "sh", "-c", "setsid sleep 100 & echo up; sleep 100")
    for _ in range(2):
        lab.read_until("up")
    left = lab.names()
    pids = [pid for name in left for pid in processes_in(name)]
    lab.process.kill()
    lab.end(20)
    assert lab.names() == left and len(left) == 3  # two hosts and the switch
    code, _, err = start_lab("--clean").end(20)
    assert code == 0 and all(f"removed {name}, left by a lab that was killed" in err for name in left)
    assert not lab.names() and len(other.names()) == 2
    assert pids and all(start_ticks(pid) is None for pid in pids)
    other.process.send_signal(signal.SIGTERM)
    assert other.end(20)[0] == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_host_whose_link_is_down_ends_a_job_of_jax_and_is_named(start_lab):
    lab = start_lab("--hosts=2", "--rate=200mbit", "--", sys.executable, str(_JAX_WORKER), "--lost_after=2")
    lab.read_until(r"host1\] step 5$")
    [name] = [name for name in lab.names() if name.endswith("-h1")]
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)  # no goodbye: only silence
    code, _, err = lab.end(30)
    assert re.search(r"\[host0\] moe_jax: process 1 \(host1\) is lost.*process 0 \(host0\) ends with exit code 4", err)
    assert code == 4 and "host0: exit code 4" in err
