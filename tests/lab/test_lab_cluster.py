"""The lab as its user runs it (however it ends, nothing may be left behind), and its network, names and flags."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import network
import pytest
from network import find_missing, lab_names, processes_in, start_ticks
from processes import host_command, host_environment

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "lab" / "cluster.py"
_FOREVER = "echo up; while :; do sleep 0.05; done"
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
    ("arguments", "words"),
    [
        (["--hosts=2"], "no command: give it after --"),
        (["--hosts=0", "--", "true"], r"hosts \(0\) must lie in 1..200"),
        (["--rate=fast", "--", "true"], r"rate \('fast'\) must be a number and kbit"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(start_lab, arguments, words):
    code, out, err = start_lab(*arguments).end()
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert re.search(f"^lab_cluster: {words}", err)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_host_which_may_end_well(start_lab, number):
    name = signal.Signals(number).name[3:]
    lab = start_lab("--hosts=2", "--", "bash", "-c", f"trap 'echo saved; exit 0' {name}; {_FOREVER}")
    for _ in range(2):
        lab.read_until("up")
    lab.process.send_signal(number)
    code, out, _ = lab.end(20)
    assert code == 0 and out.count("saved") == 2


def test_a_second_signal_kills(start_lab):
    lab = start_lab("--hosts=2", "--", "bash", "-c", f"trap '' INT; {_FOREVER}")
    for _ in range(2):
        lab.read_until("up")
    lab.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert lab.process.poll() is None
    lab.process.send_signal(signal.SIGINT)
    code, _, err = lab.end(20)
    assert code == 128 + signal.SIGKILL and "host0: killed by SIGKILL" in err


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


def test_a_host_whose_link_is_down_ends_a_job_of_jax_and_is_named(start_lab):
    lab = start_lab("--hosts=2", "--rate=200mbit", "--", sys.executable, str(_JAX_WORKER), "--lost_after=2")
    lab.read_until(r"host1\] step 5$")
    [name] = [name for name in lab.names() if name.endswith("-h1")]
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)  # no goodbye: only silence
    code, _, err = lab.end(30)
    assert re.search(r"\[host0\] moe_jax: process 1 \(host1\) is lost.*process 0 \(host0\) ends with exit code 4", err)
    assert code == 4 and "host0: exit code 4" in err


def lab_hosts(count: int) -> list[network.LabHost]:
    names = [{"namespace": f"n{i}", "host_name": f"host{i}", "address": f"10.99.{i}.1"} for i in range(count)]
    return [network.LabHost(**name) for name in names]


def test_host_command_gives_flags_to_programs_of_moe_jax_only():
    ours = host_command(["python", "-m", "moe_jax.train", "--workdir=a"], lab_hosts(3), 2, 4)
    place = ["--coordinator=10.99.0.1:8476", "--num_processes=3", "--process_id=2", "--host_devices=4"]
    assert ours == ["python", "-m", "moe_jax.train", "--workdir=a", *place]
    for other in (["python", "bench.py", "--m"], ["python", "-m", "moe_jax_tools"], ["-m"]):
        assert host_command(other, lab_hosts(3), 2, 4) == other


def test_host_environment_says_who_the_process_is():
    given = {"HOME": "/h", "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"}
    environment = host_environment(given, lab_hosts(3), 1, 4)
    assert environment["JAX_COORDINATOR_ADDRESS"] == "10.99.0.1:8476"
    assert (environment["JAX_NUM_PROCESSES"], environment["JAX_PROCESS_ID"]) == ("3", "1")
    assert environment["JAX_NUM_CPU_DEVICES"] == "4" and environment["HOME"] == "/h"
    assert environment["XLA_FLAGS"].split() == ["--xla_cpu_enable_fast_math=false"]  # the two counts would clash


def test_find_missing_asks_for_root(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert find_missing(shaped=False) == "a lab needs root (this is user 1000): run it with sudo"


_SEND = """
import os, socket, time
if os.environ["JAX_PROCESS_ID"] == "1":
    with socket.create_server(("", 5000)) as listener, listener.accept()[0] as connection:
        left = 300_000
        while left: left -= len(connection.recv(left))
        connection.sendall(b"k")
else:
    connection = None
    while not connection:
        try: connection = socket.create_connection(("host1", 5000))
        except ConnectionRefusedError: time.sleep(0.1)
    start = time.perf_counter()
    connection.sendall(bytes(300_000))
    connection.recv(1)
    print(time.perf_counter() - start)
"""


def test_bytes_between_hosts_take_the_time_of_the_rate(start_lab):
    code, out, err = start_lab("--hosts=2", "--rate=8mbit", "--", sys.executable, "-c", _SEND).end()
    assert code == 0 and 0.28 < float(out.split()[-1]) < 3, err  # 300 ms, and a busy machine
