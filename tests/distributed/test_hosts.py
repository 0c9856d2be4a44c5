"""Jobs of two real processes with two CPU devices each, joined by gloo; and what needs no process at all.

A job takes about five seconds, nearly all of it starting Python and jax twice.
"""

import ast
import contextlib
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
from support.tiny_run import finish, finish_pair, start, start_pair

from moe_jax.config.command_line import exit_code_of
from moe_jax.errors import HostLostError, NonFiniteError, UserError
from moe_jax.recovery.rendezvous import machine_id
from moe_jax.training import hosts as hosts_module
from moe_jax.training.hosts import Hosts, HostsConfig, StopSignal, resolve_hosts, start_hosts

WORKER, HERE = Path(__file__).with_name("hosts_worker.py"), socket.gethostname()


@contextlib.contextmanager
def job(*flags: str):
    """Two worker processes; leaving the block kills those that still run."""
    processes = start_pair([sys.executable, str(WORKER), *flags])
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_for_step(processes, step: int) -> None:
    for process in processes:
        while (line := process.stdout.readline()) != f"step {step}\n":
            assert line, process.communicate()


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_process_ends_the_other_with_code_4_and_its_name(victim):
    with job() as processes:
        wait_for_step(processes, 5)
        processes[victim].kill()
        code, out, err = finish(processes[1 - victim], 10)
    assert code == 4 and f"moe_jax: process {victim} ({HERE}) died: its connection closed" in out + err
    assert "Traceback" not in out + err and "oordination" not in err  # jax says nothing, before or after


# Registers as process 1 of another start, which ends a job whose service it reaches.
STRANGER = """
import sys
from jax._src.lib import _jax
_jax.get_distributed_runtime_client(f"127.0.0.1:{sys.argv[1]}", 1, init_timeout=2).connect()
print("registered")
"""


@pytest.mark.parametrize("victim", [1, 0])
def test_strangers_change_nothing_and_a_silent_process_ends_the_other_with_code_4_and_its_name(victim):
    with job(f"--lost_after={2 if victim else 6}") as processes:  # the strangers keep the machine busy
        if victim == 0 and sys.platform == "linux":
            found = ast.literal_eval(processes[0].stdout.readline().removeprefix("open ports "))
            assert {address for address, _ in found} == {"0100007F"}, "jax's service or a relay listens beyond loopback"
            strangers = [start([sys.executable, "-c", STRANGER, str(port)]) for _, port in found]
            for code, out, _ in map(finish, strangers):
                assert (code != 0, out) == (True, "")
        wait_for_step(processes, 5)
        processes[victim].send_signal(signal.SIGSTOP)  # the process lives and keeps its connections: a host gone dark
        code, out, err = finish(processes[1 - victim], 20)
    assert code == 4 and re.search(rf"moe_jax: process {victim} .* is lost: silent for \d+ s", out + err), err


@pytest.mark.parametrize(
    ("mistake", "codes", "line"),
    [
        ("0:user", [2, 2], r"learning_rate \(-1\) must be positive"),  # the outcome of the job: one code everywhere
        ("all:nan", [3, 3], "the loss of step 5 is nan"),
        ("1:bug", [4, 1], rf"moe_jax: process 1 \({HERE}\) ended with exit code 1: KeyError: 'a bug'"),
        ("1:stuck", [4, 4], r"or one that it waits for, is stuck: no step for \d s after step 5"),
        ("1:babble", [4, 4], rf"moe_jax: process 1 \({HERE}\) is lost: it sent a malformed message \(b'GET"),
    ],
)
def test_a_process_that_fails_ends_the_others_with_its_reason(mistake, codes, line):
    with job(f"--mistake={mistake}", *(["--stall_after=3"] if "stuck" in mistake else [])) as processes:
        done = finish_pair(processes)
    assert [code for code, *_ in done] == codes
    assert re.search(line, done[0][1] + done[0][2])


# One process.


def test_the_stall_clock_rests_before_the_first_step_and_on_request(monkeypatch):
    now, ended = [0.0], []
    monkeypatch.setattr(hosts_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Hosts, "_end", lambda self, line: ended.append(line))
    hosts = Hosts(config=HostsConfig(stall_after_seconds=10))
    now[0] = 100.0
    hosts._judge_silence()  # the first compilation is no step
    hosts.touch(0)
    now[0] = 110.0
    hosts._judge_silence()
    hosts.rest()
    now[0] = 1000.0
    hosts._judge_silence()
    assert not ended
    hosts.touch(7)
    now[0] = 1011.0
    hosts._judge_silence()
    assert len(ended) == 1 and "is stuck: no step for 11 s after step 7" in ended[0]
    never = Hosts(config=HostsConfig(stall_after_seconds=0))
    never.touch(0)
    now[0] = 1e9
    never._judge_silence()
    assert len(ended) == 1


def test_jax_aborts_later_than_the_watch_names_a_silent_process(monkeypatch):
    """Its client aborts from half of the heartbeat timeout on; the watch looks every 2 s."""
    given = {}

    def nobody_came(*_, **__):
        return (), ("m", "m"), "epoch", [socket.create_server(("127.0.0.1", 0))]

    monkeypatch.setattr(hosts_module, "gather_peers", nobody_came)
    monkeypatch.setattr(hosts_module.jax.distributed, "initialize", lambda *_, **named: given.update(named))
    for name, value in (
        ("XLA_FLAGS", os.environ.get("XLA_FLAGS", "")),
        ("no_proxy", "10.0.0.1"),
        ("no_grpc_proxy", ""),
    ):
        monkeypatch.setenv(name, value)
    for silence in (0.5, 30.0, 300.0):
        place = HostsConfig(coordinator="localhost:1", num_processes=2, process_id=0, lost_after_seconds=silence)
        start_hosts(place, {"MOE_JAX_JOB_TOKEN": "of all pairs of these tests"})._relay.close()
        assert given["heartbeat_timeout_seconds"] / 2 > silence + 10
        assert given["coordinator_bind_address"].startswith("unix:/") and "127.0.0.1" in os.environ["no_grpc_proxy"]
    with pytest.raises(UserError, match="a job of several processes needs a secret"):
        start_hosts(place, {"SLURM_JOB_ID": "5000"})


def test_start_hosts_without_flags_is_one_process():
    with start_hosts(HostsConfig(), environment={}) as hosts:
        assert (hosts.process_index, hosts.process_count, hosts.is_main) == (0, 1, True)
        assert hosts.gather_text("anything", "a") == ["a"]
        hosts.close()
    with pytest.raises(UserError, match="as it is"), Hosts():
        raise UserError("as it is")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"coordinator": "10.0.0.1"}, r"coordinator \('10.0.0.1'\) must be host:port"),
        ({"coordinator": "a:99999"}, r"must be host:port with a port in 1..65535"),
        ({"coordinator": "a:²"}, r"must be host:port with a port in 1..65535"),
        ({"coordinator": f"{'a' * 64}:8476"}, r"must be host:port"),
        ({"coordinator": "a..b:8476"}, r"coordinator \('a..b:8476'\) must be host:port"),
        ({"num_processes": 0}, r"num_processes \(0\) must be at least 1"),
        ({"num_processes": 2, "process_id": 2}, r"process_id \(2\) must lie in 0..num_processes - 1"),
        ({"process_id": -1}, r"process_id \(-1\)"),
        ({"lost_after_seconds": 0}, r"lost_after_seconds \(0\) must be positive"),
        ({"lost_after_seconds": float("inf")}, r"lost_after_seconds \(inf\) must be positive and at most 1000000"),
        ({"stall_after_seconds": -1}, r"stall_after_seconds \(-1\) must be 0 \(never\) or positive"),
        ({"stall_after_seconds": float("nan")}, r"stall_after_seconds \(nan\) must be 0 \(never\) or positive"),
    ],
)
def test_hosts_config_refuses(fields, words):
    with pytest.raises(UserError, match=words):
        HostsConfig(**fields)


@pytest.mark.parametrize(
    ("processes", "host_ids", "size"),
    [
        ((0, 1, 2, 3), "aabb", 2),  # a process for each device
        ((0, 0, 1, 2, 3, 3), "abbc", 2),
        ((0, 0, 1, 1), "aa", 4),
        ((0, 0, 1), "ab", r"2 hosts of this job have different numbers of devices \(\[2, 1\]\).*or set Mesh"),
        ((0, 1, 2, 3), "abab", r"are not numbered host by host .*srun --distribution=block.*or set Mesh"),
    ],
)
def test_node_size_is_that_of_hosts_that_are_alike(processes, host_ids, size):
    hosts, devices = Hosts(host_ids=host_ids), [types.SimpleNamespace(process_index=index) for index in processes]
    if isinstance(size, int):
        assert hosts.node_size(devices) == size
        return
    with pytest.raises(UserError, match=size):
        hosts.node_size(devices)


def test_machine_id_follows_nccl():
    assert machine_id({}) == machine_id({}) and HERE in machine_id({})
    assert machine_id({"NCCL_HOSTID": "rack 1"}) == "NCCL_HOSTID rack 1"


def test_exit_code_of_each_error():
    errors = [UserError(), NonFiniteError(), HostLostError(), KeyError(), KeyboardInterrupt(), SystemExit(7)]
    assert [exit_code_of(error) for error in errors] == [2, 3, 4, 1, 130, 7]
    assert [exit_code_of(SystemExit(code)) for code in (None, 0, "a line")] == [0, 0, 1]


# What the environment says.

SLURM = {"SLURM_JOB_ID": "5000", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
SLURM |= {"SLURM_LOCALID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
OLD_MPI = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("environment", "flags", "want"),
    [
        # jax: port = 65535 - 2^12 + 1 + job id mod 2^12 = 61440 + 904; one task per device
        (SLURM, {}, ("node07:62344", 4, 3, [1])),
        (SLURM, {"coordinator": "a:1"}, ("a:1", 4, 3, [1])),
        (SLURM | {"SLURM_NTASKS": "1"}, {}, (None, 1, 0, None)),
        ({"SLURM_JOB_ID": "5000", "SLURM_NTASKS": "4"}, {}, (None, 1, 0, None)),  # a login shell of salloc
        # jax: the job id's upper bits modulo 2^12 choose the port
        (OLD_MPI, {}, (f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 4, 2, [0])),
        (OPEN_MPI, {"coordinator": "a:1"}, ("a:1", 4, 2, [0])),
        (OPEN_MPI, {}, "looks like a job of Open MPI"),
        (JAX, {}, ("a:1", 2, 1, None)),
        (JAX, {"process_id": 0}, ("a:1", 2, 0, None)),
        (JAX | {"JAX_PROCESS_ID": "one"}, {}, r"JAX_PROCESS_ID \('one' in the environment\) must be a whole number"),
        (POD, {"coordinator": "a:1", "num_processes": 2, "process_id": 1}, ("a:1", 2, 1, None)),
        (POD, {}, "looks like a job of Kubernetes.*give --coordinator"),
        ({}, {"num_processes": 2}, "num_processes=2 given, but not --coordinator, --process_id, and the env"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Kubernetes")
def test_resolve_hosts_fills_in_from_the_environment_what_flags_leave_open(environment, flags, want, monkeypatch):
    for name, value in environment.items():  # jax reads the real one
        monkeypatch.setenv(name, value)
    if isinstance(want, str):
        with pytest.raises(UserError, match=want):
            resolve_hosts(HostsConfig(**flags), environment)
        return
    config, local_device_ids = resolve_hosts(HostsConfig(**flags), environment)
    assert (config.coordinator, config.num_processes, config.process_id, local_device_ids) == want


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_stop_signal_of_one_process_follows_its_own_flag(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(number)
    with StopSignal() as stop:
        assert (stop.requested, stop.should_stop(0)) == (False, False)
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 5
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (stop.requested, stop.should_stop(1)) == (True, True)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(number)) == before


@pytest.mark.parametrize("nohup", [[], ["nohup"]])
def test_stop_signal_ends_at_once_on_a_second_signal_though_the_main_thread_is_busy_in_c(nohup):
    """Not on a SIGHUP: a closed terminal and its shell send one each, and under nohup it stays ignored."""
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
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with subprocess.Popen([*nohup, sys.executable, "-c", program], **pipes) as process:
        assert process.stdout.readline() == b"up\n"
        for number in (signal.SIGHUP, signal.SIGHUP, *([signal.SIGTERM] if nohup else [])):
            process.send_signal(number)
            time.sleep(0.3)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
        assert process.stderr.read().endswith(b"\nmoe_jax: told to end once more, and ends without saving\n")
