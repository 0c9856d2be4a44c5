"""Jobs of two real processes with two CPU devices each, joined by gloo; and what needs no process at all.

A job takes about five seconds, nearly all of it starting Python and jax twice.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from support.ports import free_port

from moe_jax.errors import HostLostError, NonFiniteError, UserError
from moe_jax.training.hosts import HostsConfig, StopSignal, find_launcher, resolve_hosts, start_hosts
from moe_jax.training.rendezvous import held_port, machine_id
from moe_jax.training.watchdog import Hosts, exit_code_of

_ROOT = Path(__file__).parents[2]
_WORKER = Path(__file__).with_name("hosts_worker.py")


@dataclasses.dataclass
class Job:
    """Two worker processes and their logs."""

    folder: Path
    port: int
    processes: list[subprocess.Popen]

    def log(self, index: int) -> str:
        return (self.folder / f"log{index}").read_text()

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 60
        while not all(f"step {step}\n" in self.log(i) for i in range(2)):
            assert time.monotonic() < deadline and self.processes[0].poll() is None, self.log(0) + self.log(1)
            time.sleep(0.05)

    def wait(self, index: int, seconds: float) -> int:
        return self.processes[index].wait(seconds)


@pytest.fixture
def start_job(tmp_path):
    """Return a function that starts a job of two processes; none of them outlives the test."""
    started = []

    def start(*flags: str) -> Job:
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(_ROOT)}
        job = Job(tmp_path, free_port(), [])
        coordinator = f"--coordinator=127.0.0.1:{job.port}"
        for index in range(2):
            command = [sys.executable, str(_WORKER), coordinator, "--num_processes=2", f"--process_id={index}", *flags]
            with open(tmp_path / f"log{index}", "w") as log:
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            job.processes.append(process)
            started.append(process)
        return job

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_process_ends_the_other_with_code_4_and_its_name(start_job, victim):
    job = start_job()
    job.wait_for_step(5)
    job.processes[victim].kill()
    assert job.wait(1 - victim, 10) == 4
    assert f"moe_jax: process {victim} ({socket.gethostname()}) died: its connection closed" in job.log(1 - victim)
    assert "Traceback" not in job.log(1 - victim)


def test_a_silent_process_ends_the_other_with_code_4_and_its_name(start_job):
    job = start_job("--lost_after=2")
    job.wait_for_step(5)
    job.processes[1].send_signal(signal.SIGSTOP)  # the process lives and keeps its connections: a host gone dark
    assert job.wait(0, 10) == 4
    assert "is lost: silent for 2 s" in job.log(0) and "moe_jax: process 1" in job.log(0)


def test_a_signal_to_one_process_stops_all_at_the_same_step(start_job):
    job = start_job("--exit_code=75")
    job.wait_for_step(5)
    job.processes[1].send_signal(signal.SIGTERM)
    assert [job.wait(i, 10) for i in range(2)] == [75, 75]
    stopped = [line for i in range(2) for line in job.log(i).splitlines() if line.startswith("stopped at")]
    assert len(stopped) == 2 and stopped[0] == stopped[1]
    assert "moe_jax:" not in job.log(0) + job.log(1)


@pytest.mark.parametrize(
    ("mistake", "codes", "line"),
    [
        ("0:user", (2, 2), "learning_rate (-1) must be positive"),  # the outcome of the job: the same code everywhere
        ("all:nan", (3, 3), "the loss of step 5 is nan"),
        ("1:bug", (4, 1), "moe_jax: process 1 ({host}) ended with exit code 1: KeyError: 'a bug'"),
    ],
)
def test_a_process_that_fails_ends_the_others_with_its_reason(start_job, mistake, codes, line):
    job = start_job(f"--mistake={mistake}")
    assert tuple(job.wait(i, 40) for i in range(2)) == codes
    assert line.format(host=socket.gethostname()) in job.log(0)


def test_a_stuck_process_ends_the_job(start_job):
    job = start_job("--mistake=1:stuck", "--stall_after=3")
    assert [job.wait(i, 40) for i in range(2)] == [4, 4]
    assert re.search(r"or one that it waits for, is stuck: no step for \d s after step 5", job.log(0))


def test_strangers_at_the_port_do_not_keep_a_job_from_starting(start_job):
    job = start_job("--steps=6")
    strangers = []
    while not strangers:  # the first to come, before process 1 can be there
        assert job.processes[0].poll() is None, job.log(0)
        with contextlib.suppress(ConnectionRefusedError):
            strangers.append(socket.create_connection(("127.0.0.1", job.port)))
    for words in (b"", b"GET / HTTP/1.1\n", b"a" * 20000, b'{"kind": "hello", "index": 1, "count": 3, "name": "a"}\n'):
        with contextlib.suppress(OSError):  # too late: the job has started
            strangers.append(socket.create_connection(("127.0.0.1", job.port)))
            strangers[-1].sendall(words)
    assert [job.wait(i, 60) for i in range(2)] == [0, 0], job.log(0) + job.log(1)
    assert job.log(0).count("a stranger at the rendezvous port") <= 1
    assert "start with 4 devices, ['0 of 2', '1 of 2'], nodes of 4" in job.log(0)  # two processes on one machine
    for stranger in strangers:
        stranger.close()


def test_a_line_that_is_no_message_ends_the_job_with_the_name_of_its_sender(start_job):
    job = start_job("--mistake=1:babble")
    assert job.wait(0, 40) == 4
    words = rf"moe_jax: process 1 \({socket.gethostname()}\) is lost: it sent a malformed message \(b'GET"
    assert re.search(words, job.log(0))


# One process.


def test_start_hosts_without_flags_is_one_process():
    with start_hosts(HostsConfig(), environment={}) as hosts:
        assert (hosts.process_index, hosts.process_count, hosts.is_main) == (0, 1, True)
        assert hosts.gather_text("anything", "a") == ["a"]
        hosts.touch(3)
        hosts.close()
    with pytest.raises(UserError, match="as it is"), Hosts():
        raise UserError("as it is")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"coordinator": "10.0.0.1"}, r"coordinator \('10.0.0.1'\) must be host:port"),
        ({"coordinator": "a:99999"}, r"must be host:port with a port in 1..65535"),
        ({"coordinator": "a..b:8476"}, r"coordinator \('a..b:8476'\) must be host:port"),
        ({"num_processes": 0}, r"num_processes \(0\) must be at least 1"),
        ({"num_processes": 2, "process_id": 2}, r"process_id \(2\) must lie in 0..num_processes - 1"),
        ({"lost_after_seconds": 0}, r"lost_after_seconds \(0\) must be positive"),
        ({"stall_after_seconds": float("nan")}, r"stall_after_seconds \(nan\) must be 0 \(never\) or positive"),
        ({"job_token": ""}, r"job_token \(''\) must not be empty"),
    ],
)
def test_hosts_config_refuses_and_does_not_show_its_token(fields, words):
    with pytest.raises(UserError, match=words):
        HostsConfig(**fields)
    assert "secret" not in repr(HostsConfig(job_token="secret"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the port is only looked up")
def test_port_of_the_service_is_kept_until_it_is_opened():
    """Nobody is given it while processes join; what gRPC opens, with SO_REUSEPORT, may share it."""
    with held_port() as port:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("", int(port)))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)))
        with (
            socket.create_server(("::", int(port)), family=socket.AF_INET6, reuse_port=True, dualstack_ipv6=True),
            socket.create_connection(("127.0.0.1", int(port))),
        ):
            pass
    socket.create_server(("", int(port))).close()


# Nodes.


def gpus(*processes: int) -> list:
    """Return a device for each of these process indices."""
    return [types.SimpleNamespace(process_index=index) for index in processes]


@pytest.mark.parametrize(
    ("processes", "host_ids", "size"),
    [
        ((0, 1, 2, 3), ["a", "a", "b", "b"], 2),  # a process for each device
        ((0, 0, 1, 2, 3, 3), ["a", "b", "b", "c"], 2),
        ((0, 0, 1, 1), ["a", "a"], 4),
    ],
)
def test_node_size_is_that_of_a_host(processes, host_ids, size):
    assert Hosts(host_ids=host_ids).node_size(gpus(*processes)) == size


@pytest.mark.parametrize(
    ("processes", "host_ids", "words"),
    [
        (
            (0, 0, 1),
            ["a", "b"],
            r"2 hosts of this job have different numbers of devices \(\[2, 1\]\).*or set Mesh",
        ),
        ((0, 1, 2, 3), ["a", "b", "a", "b"], r"are not numbered host by host .*srun --distribution=block.*or set Mesh"),
    ],
)
def test_node_size_refuses_nodes_that_are_not_alike(processes, host_ids, words):
    with pytest.raises(UserError, match=words) as error:
        Hosts(host_ids=host_ids).node_size(gpus(*processes))
    assert "\n" not in str(error.value)


def test_machine_id_follows_nccl():
    assert machine_id({}) == machine_id({}) and socket.gethostname() in machine_id({})
    assert machine_id({"NCCL_HOSTID": "rack 1"}) == "NCCL_HOSTID rack 1"


def test_exit_code_of_each_error():
    errors = [UserError(), NonFiniteError(), HostLostError(), KeyError(), KeyboardInterrupt(), SystemExit(7)]
    assert [exit_code_of(error) for error in errors] == [2, 3, 4, 1, 130, 7]
    assert [exit_code_of(SystemExit(code)) for code in (None, 0, "a line")] == [0, 0, 1]


# What the environment says.

_SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
_OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


def resolved(monkeypatch, environment: dict[str, str], **fields) -> tuple:
    for name, value in environment.items():  # jax reads the real one
        monkeypatch.setenv(name, value)
    config, local_device_ids = resolve_hosts(HostsConfig(**fields), environment)
    return config.coordinator, config.num_processes, config.process_id, local_device_ids


def test_resolve_hosts_reads_slurm(monkeypatch):
    # jax: port = 65535 - 2^12 + 1 + job id mod 2^12 = 61440 + 904; one task per device
    assert resolved(monkeypatch, _SLURM) == ("node07:62344", 4, 3, [1])
    assert resolved(monkeypatch, _SLURM, coordinator="a:1") == ("a:1", 4, 3, [1])


def test_resolve_hosts_takes_one_slurm_task_as_alone(monkeypatch):
    assert resolved(monkeypatch, _SLURM | {"SLURM_NTASKS": "1"}) == (None, 1, 0, None)
    assert find_launcher({"SLURM_JOB_ID": "5000", "SLURM_NTASKS": "4"}) is None  # a login shell of salloc: no srun


def test_resolve_hosts_reads_open_mpi(monkeypatch):
    old = _OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    # jax: the job id's upper bits modulo 2^12 choose the port
    assert resolved(monkeypatch, old) == (f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 4, 2, [0])


def test_resolve_hosts_under_open_mpi_5_needs_the_coordinator_alone(monkeypatch):
    assert resolved(monkeypatch, _OPEN_MPI, coordinator="a:1")[:3] == ("a:1", 4, 2)
    with pytest.raises(UserError, match="looks like a job of Open MPI"):
        resolved(monkeypatch, _OPEN_MPI)


def test_resolve_hosts_reads_its_own_variables(monkeypatch):
    own = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert resolved(monkeypatch, own) == ("a:1", 2, 1, None)
    assert resolved(monkeypatch, own, process_id=0) == ("a:1", 2, 0, None)
    with pytest.raises(UserError, match=r"JAX_PROCESS_ID \('one' in the environment\) must be a whole number"):
        resolved(monkeypatch, own | {"JAX_PROCESS_ID": "one"})


@pytest.mark.filterwarnings("ignore:.*Kubernetes")
def test_resolve_hosts_takes_flags_inside_kubernetes_or_says_what_it_needs(monkeypatch):
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    flags = {"coordinator": "a:1", "num_processes": 2, "process_id": 1}
    assert resolved(monkeypatch, pod, **flags) == ("a:1", 2, 1, None)
    with pytest.raises(UserError, match="looks like a job of Kubernetes.*give --coordinator"):
        resolved(monkeypatch, pod)


def test_resolve_hosts_names_the_flags_that_are_missing():
    with pytest.raises(UserError, match="num_processes=2 given, but not --coordinator, --process_id, and the env"):
        resolve_hosts(HostsConfig(num_processes=2), {})


# Stopping.


def test_stop_signal_stops_at_the_step_that_all_processes_know():
    # lag 2: before step s the flag of step s - 2 is read. Step 3 returned 1, so the first step not made is 5.
    allowed = []
    with StopSignal(processes=2, lag=2) as stop:
        for step in range(10):
            if step >= 2:
                stop.observe(int(step - 2 >= 3), step - 2)
            if stop.should_stop(step):
                break
            allowed.append(step)
    assert allowed == [0, 1, 2, 3, 4]
    with StopSignal(processes=2, lag=2) as stop:
        assert not stop.should_stop(5)
        with pytest.raises(RuntimeError, match="flag of step 3 must be observed before step 5 is allowed"):
            stop.observe(1, 3)


def test_stop_signal_of_one_process_follows_its_own_flag():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert (stop.requested, stop.should_stop(0)) == (False, False)
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (stop.requested, stop.should_stop(1)) == (True, True)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_stop_signal_ends_at_once_on_a_second_signal_though_the_main_thread_is_busy_in_c():
    program = """
import ctypes
from moe_jax.training.hosts import StopSignal
stop = StopSignal()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
libc.pthread_mutex_init(mutex, None)
libc.pthread_mutex_lock(mutex)
print("up", flush=True)
libc.pthread_mutex_lock(mutex)  # for ever, like a collective whose other end is gone: no signal interrupts it
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=_ROOT)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    process.stdout.close()
