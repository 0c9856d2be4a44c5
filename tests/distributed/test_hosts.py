"""Jobs of two real processes with two CPU devices each, joined by gloo; and what needs no process at all.

A job takes about five seconds, nearly all of it starting Python and jax twice.
"""

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
from support.marks import slow_but
from support.tiny_run import finish, finish_pair, start, start_pair

from moe_jax.config.command_line import exit_code_of
from moe_jax.errors import HostLostError, NonFiniteError, UserError
from moe_jax.jobs import hosts as hosts_module
from moe_jax.jobs.hosts import Hosts, Watch
from moe_jax.jobs.start import bind_address, find_place
from moe_jax.jobs.stop import StopSignal
from moe_jax.parallel.mesh import node_size

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


def test_a_killed_process_ends_the_other_with_code_4_and_its_name():
    with job() as processes:
        wait_for_step(processes, 5)
        processes[1].kill()
        code, out, err = finish(processes[0], 10)
    assert code == 4 and re.search(rf"moe_jax: process 1 \({HERE}\) is lost: silent for [34] s", out + err)
    assert "Traceback" not in out + err


@pytest.mark.parametrize("victim", slow_but([1, 0], 0))
def test_a_silent_process_ends_the_other_with_code_4_and_its_name(victim):
    with job("--lost_after=2") as processes:
        wait_for_step(processes, 5)
        processes[victim].send_signal(signal.SIGSTOP)  # the process lives and keeps its connections: a host gone dark
        code, out, err = finish(processes[1 - victim], 20)
    assert code == 4 and re.search(rf"moe_jax: process {victim} .* is lost: silent for \d+ s", out + err), err


MISTAKES = {
    mistake: (codes, line)
    for mistake, codes, line in (
        ("0:user", [2, 2], r"learning_rate \(-1\) must be positive"),  # the outcome of the job: one code everywhere
        ("all:nan", [3, 3], "the loss of step 5 is nan"),
        ("1:bug", [4, 1], rf"moe_jax: process 1 \({HERE}\) ended with exit code 1: KeyError: 'a bug'"),
        ("1:stuck", [4, 4], r"or one that it waits for, is stuck: no step for \d s after step 5"),
        ("1:differs", [2, 2], "the text is b on process 1, and a on process 0"),
        ("1:late", [4, 4], "process 1 did not reach 'the text' within 2 s"),
        ("1:counts", [2, 2], r"have --num_processes = \(2, 3\); give all the same"),
        ("1:program", [4, 4], "process 1 has compiled another program than process 0, so the two cannot run together"),
        ("1:absent", [4, 4], r"error: not all came to \S+ within 8 s; give all its --num_processes"),
    )
}


@pytest.mark.parametrize("mistake", slow_but(MISTAKES, "0:user", "1:bug", "1:stuck"))
def test_a_process_that_fails_ends_the_others_with_its_reason(mistake):
    codes, line = MISTAKES[mistake]
    with job(f"--mistake={mistake}", *(["--stall_after=3"] if "stuck" in mistake else [])) as processes:
        done = finish_pair(processes)
    assert "Traceback" not in done[0][2] + done[1][2] * ("bug" not in mistake)
    assert [code for code, *_ in done] == codes
    assert re.search(line, done[0][1] + done[0][2])
    if "program" in mistake:
        assert done[1][1].count("process 0's seconds") == 2 and done[1][1].count("result") == 1, done[1]


@pytest.mark.slow
def test_a_coordinator_that_cannot_be_had_is_a_line_and_tried_again():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        here = f"127.0.0.1:{taken.getsockname()[1]}"
        places = (here, 0, f"nothing starts at {here} "), ("nowhere.invalid:1", 1, "not all came to nowhere.invalid:1 ")
        command = [sys.executable, str(WORKER), "--num_processes=2"]
        started = [start([*command, f"--coordinator={to}", f"--process_id={index}"]) for to, index, _ in places]
        for (code, _, err), (*_, line) in zip(finish_pair(started), places, strict=True):
            assert code == 4 and line in err and "Traceback" not in err


# One process.


def test_the_stall_clock_rests_before_the_first_step_and_on_request(monkeypatch):
    now, ended = [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=None)
    monkeypatch.setattr(hosts_module, "time", clock)
    monkeypatch.setattr(hosts_module.threading, "Thread", lambda **_: types.SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(Watch, "_end", lambda self, line: ended.append(line))
    hosts = Hosts()
    hosts.watch = Watch(0, ["a"], 1e9, 10.0)

    def look(at):
        now[0] = at
        turns = iter([False, True])
        monkeypatch.setattr(hosts.watch.stopped, "wait", lambda _: next(turns))
        hosts.watch._judge()

    look(100.0)  # the first compilation is no step
    hosts.touch(0)
    look(110.0)
    hosts.touch(None)
    look(1000.0)
    assert not ended
    hosts.touch(7)
    look(1011.0)
    assert len(ended) == 1 and "process 0 (a), or one that it waits for, is stuck: no step for 11 s after" in ended[0]
    hosts.watch = Watch(0, ["a"], 1e9, 0.0)  # never
    hosts.touch(0)
    look(1e9)
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("10.0.0.1", 2, 0), r"coordinator \('10.0.0.1'\) must be host:port"),
        (("a:99999", 2, 0), "must be host:port"),
        (("a:²", 2, 0), "must be host:port"),
        ((f"{'a' * 64}:8476", 2, 0), "must be host:port"),
        (("a..b:8476", 2, 0), "must be host:port"),
        (("u@a:1", 2, 0), "must be host:port"),
        (("a:1", 0, 0), r"--process_id \(0\) must lie in 0..num_processes - 1, and --num_processes is 0"),
        (("a:1", 2, 2), r"--process_id \(2\) must lie in 0"),
        (("a:1", 2, -1), r"--process_id \(-1\)"),
    ],
)
def test_a_place_that_cannot_be_is_one_line(given, words):
    with pytest.raises(UserError, match=words):
        find_place(given, {})


@pytest.mark.parametrize(
    ("processes", "machines", "size"),
    [
        ((0, 1, 2, 3), "aabb", 2),  # a process for each device
        ((0, 0, 1, 2, 3, 3), "abbc", 2),
        ((0, 0, 1, 1), "aa", 4),
        ((0, 0, 1), "ab", r"2 hosts of this job have different numbers of devices \(\[2, 1\]\).*or set Mesh"),
        ((0, 1, 2, 3), "abab", r"are not numbered host by host .*srun --distribution=block.*or set Mesh"),
    ],
)
def test_node_size_is_that_of_hosts_that_are_alike(processes, machines, size):
    devices = [types.SimpleNamespace(process_index=index) for index in processes]
    if isinstance(size, int):
        assert node_size(devices, machines) == size
        return
    with pytest.raises(UserError, match=size):
        node_size(devices, machines)


def test_exit_code_of_each_error():
    errors = [UserError(), NonFiniteError(), HostLostError(), KeyError(), KeyboardInterrupt(), SystemExit(7)]
    assert [exit_code_of(error) for error in errors] == [2, 3, 4, 1, 130, 7]
    assert [exit_code_of(SystemExit(code)) for code in (None, 0, "a line")] == [0, 0, 1]


# What the environment says.

SLURM = {"SLURM_JOB_ID": "5000", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
SLURM |= {"SLURM_LOCALID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
NOTHING = (None, None, None)
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("environment", "flags", "want"),
    [
        # jax: port = 65535 - 2^12 + 1 + job id mod 2^12 = 61440 + 904; one task per device
        (SLURM, NOTHING, ("node07:62344", 4, 3, [1])),
        (SLURM, ("a:1", None, None), ("a:1", 4, 3, [1])),
        (SLURM, ("a:1", 2, 0), ("a:1", 2, 0, [1])),
        (SLURM | {"SLURM_NTASKS": "1"}, NOTHING, (None, 1, 0, None)),
        ({"SLURM_JOB_ID": "5000", "SLURM_NTASKS": "4"}, NOTHING, (None, 1, 0, None)),  # a login shell of salloc
        (SLURM | {"SLURM_LOCALID": "one"}, NOTHING, "jax cannot read Slurm's variables"),
        (OPEN_MPI, ("a:1", None, None), ("a:1", 4, 2, [0])),
        (OPEN_MPI, NOTHING, "--num_processes=4, --process_id=2 is given, but not --coordinator: give all three"),
        (JAX, NOTHING, ("a:1", 2, 1, None)),
        (JAX, (None, None, 0), ("a:1", 2, 0, None)),
        (
            JAX | {"JAX_PROCESS_ID": "one"},
            NOTHING,
            r"JAX_PROCESS_ID \('one' in the environment\) must be a whole number",
        ),
        (POD, ("a:1", 2, 1), ("a:1", 2, 1, None)),
        (POD, NOTHING, "a pod of an indexed Job is given, but not --coordinator, --num_processes, --process_id"),
        ({}, (None, 2, None), "--num_processes=2 is given, but not --coordinator, --process_id: give all three"),
    ],
)
def test_find_place_fills_in_from_the_environment_what_flags_leave_open(environment, flags, want, monkeypatch):
    for name, value in environment.items():  # jax reads the real one
        monkeypatch.setenv(name, value)
    if isinstance(want, str):
        with pytest.raises(UserError, match=want):
            find_place(flags, environment)
        return
    assert find_place(flags, environment) == (want[:3], want[3])


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_stop_signal_of_one_process_follows_its_own_flag(number):
    if signal.getsignal(number) == signal.SIG_IGN:  # the tests run under nohup
        pytest.skip("a signal that is ignored stays ignored")
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
from moe_jax.jobs.stop import StopSignal
stop = StopSignal()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
libc.pthread_mutex_init(mutex, None)
libc.pthread_mutex_lock(mutex)
print("up", flush=True)
libc.pthread_mutex_lock(mutex)  # for ever, like a collective whose other end is gone: no signal interrupts it
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    at_terminal = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # the tests may run under nohup
    program = program if nohup else at_terminal + program
    with subprocess.Popen([*nohup, sys.executable, "-c", program], **pipes) as process, contextlib.ExitStack() as end:
        end.callback(process.kill)
        assert process.stdout.readline() == b"up\n"
        for number in (signal.SIGHUP, signal.SIGHUP, *([signal.SIGTERM] if nohup else [])):
            process.send_signal(number)
            time.sleep(0.3)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
        assert process.stderr.read().endswith(b"\nmoe_jax: told to end once more, and ends without saving\n")


def test_process_0_listens_at_its_own_address():
    assert bind_address("10.0.0.1:8476") == "10.0.0.1:8476" and bind_address("[::1]:1") == "[::1]:1"
    assert bind_address("localhost:1") in ("127.0.0.1:1", "[::1]:1")
    assert bind_address("nowhere.invalid:1") == "[::]:1"
