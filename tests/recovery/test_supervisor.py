"""Supervisors as their users run them, with processes that only count; and one job that trains."""

import json
import os
import pathlib
import signal
import threading
import time

import pytest
from machines import children_of
from support.quick_compiles import QUICK
from support.supervised_job import SECRET, Job
from support.tiny_run import assert_same_run, command, finish_pair, start_pair

from moe_jax.errors import HostLostError, UserError
from moe_jax.observe import lease
from moe_jax.observe.lease import Lease
from moe_jax.observe.run_folder import RunFolder
from moe_jax.recovery.copies import note_start
from moe_jax.recovery.links import parse_hosts
from moe_jax.recovery.supervisor import SupervisorConfig
from moe_jax.supervise import find_index, find_workdir

SOON = ("--lost_after_seconds=2", "--start_timeout_seconds=20")


@pytest.fixture
def start_job(tmp_path):
    """Return a function that makes a job with all its supervisors started; what runs in the end is killed."""
    jobs = []

    def start(count: int, *flags: str) -> Job:
        jobs.append(Job(tmp_path, count, *SOON, *flags))
        jobs[-1].start(*range(count))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def is_gone(pid: int) -> bool:
    """Say whether a process has ended, its parent having heard of it or not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_killed_process_starts_all_again_in_a_later_epoch_with_another_secret(start_job):
    job = start_job(2, "--workers_per_host=2")
    first = job.epoch_of(4)
    assert job.hosts_of(first) == [0, 0, 1, 1]
    before = job.placed()[first]
    os.kill(before[3]["pid"], signal.SIGKILL)
    second = job.epoch_of(4, after=first)
    after = job.placed()[second]
    assert job.hosts_of(second) == [0, 0, 1, 1] and all(is_gone(place["pid"]) for place in before.values())
    assert len({place["secret"] for place in after.values()}) == 1
    assert after[0]["secret"] not in (before[0]["secret"], SECRET) and len(after[0]["secret"]) == 64
    assert "the processes of host 1 ended with exit code 137" in job.log(0)
    job.tell("exit", "0")
    assert [job.end(index) for index in range(2)] == [0, 0]
    assert is_gone(after[0]["pid"]) and not list(job.workdir.glob("lease/*.part"))


def test_a_spare_takes_the_place_of_a_killed_host_which_returns_as_a_spare(start_job):
    job = start_job(3, "--spares=1")
    first = job.epoch_of(2)
    assert job.hosts_of(first) == [0, 1]
    orphan = job.placed()[first][0]["pid"]
    job.kill(0)  # who leads, and has process 0
    second = job.epoch_of(2, after=first)
    assert job.hosts_of(second) == [2, 1] and "host 1 leads" in job.log(1)
    assert is_gone(orphan)
    job.start(0)
    job.wait(lambda: "host 0 is here" in job.log(1).partition("host 0 has closed")[2])
    os.kill(job.placed()[second][0]["pid"], signal.SIGKILL)
    third = job.epoch_of(2, after=second)
    assert job.hosts_of(third) == [2, 1], "a host that returns takes nobody's place"
    job.tell("exit", "0")
    assert [job.end(index) for index in range(3)] == [0, 0, 0]
    assert max(job.placed()) == third, "the spare has not heard of the end"


def test_without_a_spare_fewer_hosts_train_until_the_lost_one_returns(start_job):
    job = start_job(3)
    first = job.epoch_of(3)
    job.kill(2)
    second = job.epoch_of(2, after=first)
    assert job.hosts_of(second) == [0, 1]
    job.start(2)
    third = job.epoch_of(3, after=second)
    assert job.hosts_of(third) == [0, 1, 2]
    assert "host 2 joins; the processes save and stop" in job.log(0)
    job.supervisors[1].send_signal(signal.SIGTERM)  # its machine is drained: the others lose no step, and go on
    fourth = job.epoch_of(2, after=third)
    assert job.end(1) == 75 and job.hosts_of(fourth) == [0, 2]
    for index in (0, 2):
        job.supervisors[index].send_signal(signal.SIGTERM)
    assert [job.end(index) for index in (0, 2)] == [75, 75]


@pytest.mark.parametrize("victim", [1, 0])
def test_a_silent_host_is_left_out_and_comes_back_without_harm(start_job, victim):
    job = start_job(2)
    first = job.epoch_of(2)
    job.supervisors[victim].send_signal(signal.SIGSTOP)
    second = job.epoch_of(1, after=first)
    other = 1 - victim
    assert job.hosts_of(second) == [other] and f"host {victim} is silent for" in job.log(other)
    job.supervisors[victim].send_signal(signal.SIGCONT)
    if victim == 0:  # it led: it has lost the lease, and its launcher starts it again
        assert job.end(0) == 4 and "supervisor 0" in job.log(0).splitlines()[-1]
        job.start(0)
    assert sorted(job.hosts_of(job.epoch_of(2, after=second))) == [0, 1]


@pytest.mark.parametrize("code", [2, 3])
def test_what_a_restart_cannot_mend_ends_all_hosts_with_its_code_and_one_line(start_job, code, tmp_path, monkeypatch):
    """Copies in RAM go with code 3; with 2 the same run may go on from them, once the mistake is mended."""
    monkeypatch.setenv("MOE_JAX_COPIES", str(tmp_path / "memory"))
    job = start_job(2)
    job.epoch_of(2)
    note_start(job.workdir / "run.json", {"id": "ab" * 8, "starts": []}, 0, -1)
    (tmp_path / "memory" / ("ab" * 8)).mkdir(parents=True)
    job.tell("exit", str(code))
    assert [job.end(index) for index in range(2)] == [code, code]
    for index in range(2):
        assert f"ended with exit code {code}, which a restart cannot mend" in job.log(index).splitlines()[-1]
    assert len(job.placed()) == 1
    assert (tmp_path / "memory" / ("ab" * 8)).exists() == (code == 2)


def test_starts_that_fail_again_and_again_stop_with_the_reason(start_job):
    job = start_job(2)
    job.epoch_of(2)
    job.tell("broken")
    os.kill(job.placed()[1][0]["pid"], signal.SIGKILL)  # of an epoch that had finished a step: it does not count
    assert [job.end(index) for index in range(2)] == [2, 2]
    assert "3 starts in a row failed before a step was finished; the last time the processes of host" in job.log(1)
    assert len(job.placed()) == 4


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_whose_processes_always_fail_leaves_to_the_spare(start_job, host):
    job = start_job(3, "--spares=1")
    first = job.epoch_of(2)
    job.tell("broken", str(host))
    os.kill(job.placed()[first][host]["pid"], signal.SIGKILL)
    assert job.end(host) == 2
    (job.workdir / "broken").unlink()
    assert f"the processes of host {host} ended with exit code 1" in job.log(host).splitlines()[-1]
    assert set(job.hosts_of(job.epoch_of(2, after=first))) == {1 - host, 2}


def test_all_hosts_killed_and_started_again_go_on_in_a_later_epoch(start_job):
    job = start_job(2)
    first = job.epoch_of(2)
    for index in range(2):
        job.kill(index)
    job.start(0, 1)
    assert job.hosts_of(job.epoch_of(2, after=first)) == [0, 1]


OTHER_VERSION = "import moe_jax.recovery.rendezvous as r; r.VERSIONS['jax'] = '0.0.1'"
OTHER_CODE = "import moe_jax.recovery.supervisor as s; s.code_version = lambda: 'another'"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"MOE_JAX_JOB_TOKEN": "of another job than that"}, "holds another secret than this host"),
        ({"code": OTHER_VERSION}, "but host 2 runs protocol 2, jax 0.0.1"),
        ({"code": OTHER_CODE}, "moe_jax another; install the same everywhere"),
        ({"flags": "--min_hosts=2"}, "were started with other flags or another command"),
    ],
)
def test_a_spare_that_does_not_fit_ends_with_code_2_and_one_line_and_the_job_goes_on(start_job, changed, line):
    job = start_job(3, "--spares=1")
    first = job.epoch_of(2)
    job.kill(2)
    if "flags" in changed:
        job.flags = (*job.flags, changed.pop("flags"))
    (job.logs / "2").unlink()
    job.start(2, **changed)
    assert job.end(2) == 2
    [error] = [text for text in job.log(2).splitlines() if "error: " in text]
    assert line in error
    time.sleep(0.5)
    assert max(job.placed()) == first and job.supervisors[0].poll() is None


def test_another_job_has_the_run_folder(start_job, tmp_path):
    job = start_job(1)
    job.epoch_of(1)
    (tmp_path / "other").mkdir()
    other = Job(tmp_path / "other", 1, *SOON, command=job.command)
    try:
        other.start(0, MOE_JAX_JOB_TOKEN="of another job than that")
        assert other.end(0) == 2
        assert "is held by another job (process" in other.log(0).splitlines()[-1]
        assert max(job.placed()) == 1 and job.supervisors[0].poll() is None
    finally:
        other.close()


def test_a_run_whose_process_0_is_killed_ends_as_an_undisturbed_one(tmp_path):
    changes = ("train.steps = 150", "train.checkpoint_every = 30", "MoEConfig.num_experts = 2")
    pair = start_pair(command(tmp_path, tmp_path / "whole", *changes, devices=1))
    job = Job(tmp_path, 2, command=command(tmp_path, tmp_path / "run", *changes, devices=1))
    try:
        job.start(0, 1, XLA_FLAGS=QUICK)
        job.wait(lambda: (job.workdir / "checkpoints" / "00000030").exists(), 240)
        process, *_ = children_of(job.supervisors[0].pid)  # older than the one that stands by
        os.kill(process, signal.SIGKILL)
        assert [job.end(index, 240) for index in range(2)] == [0, 0]
        assert "resuming at step" in job.log(0) and "its processes ended with exit code 137" in job.log(0)
        assert [code for code, *_ in finish_pair(pair)] == [0, 0]
    finally:
        job.close()
        for process in pair:
            process.kill()
            process.communicate()
    assert_same_run(tmp_path / "whole", job.workdir, 150)


# The flags, and the lease as supervisors use it.


def test_the_flags_of_a_host():
    hosts = parse_hosts("node0:8475, [fd00::1]:8475,127.0.0.1:8475")
    assert hosts == [("node0", 8475), ("fd00::1", 8475), ("127.0.0.1", 8475)]
    for wrong in ("", "node0", "node0:0", "node0:65535", ":8475", "node0:8475,node0:8475"):
        with pytest.raises(UserError, match="--hosts"):
            parse_hosts(wrong)
    assert find_index(hosts, {"SLURM_NODEID": "1"}) == find_index(hosts, {"JOB_COMPLETION_INDEX": "1"}) == 1
    assert find_index([("192.0.2.1", 8475), ("127.0.0.1", 8475)], {}) == 1
    for unclear in ([("192.0.2.1", 8475)], [("127.0.0.1", 8475), ("127.0.0.1", 8476)]):
        with pytest.raises(UserError, match="give --host_index"):
            find_index(unclear, {})
    assert find_workdir(["python", "--workdir=a b"]) == find_workdir(["python", "--workdir", "a b"]) == "a b"
    with pytest.raises(UserError, match="needs --workdir"):
        find_workdir(["python", "-m", "moe_jax.train", "--workdir"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"index": 3},
        {"spares": 3},
        {"min_hosts": 3, "spares": 1},
        {"workers_per_host": 0},
        {"lost_after_seconds": 0.0},
        {"start_timeout_seconds": -1.0},
    ],
)
def test_a_config_that_cannot_be_is_refused(wrong):
    good = {"hosts": [("a", 1), ("b", 1), ("c", 1)], "index": 0, "command": ["x"], "workdir": "w"}
    SupervisorConfig(**good)
    with pytest.raises(UserError, match=next(iter(wrong))):
        SupervisorConfig(**{**good, **wrong})


def test_every_start_is_an_epoch_of_the_lease_and_a_stale_process_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    folder, ended, lost = RunFolder(tmp_path), threading.Event(), []
    leading = Lease(folder, pytest.fail, "group")
    leading.look()
    assert leading.is_free(10.0)
    leading.take(leading.seen[0])
    monkeypatch.setenv(lease.EPOCH_VARIABLE, "1")
    with Lease(folder, lambda error: (lost.append(error), ended.set())) as process:
        assert process.epoch == 1 and not ended.wait(0.3)
        next_one = Lease(folder, pytest.fail, "group")
        moves = next_one.moves
        deadline = time.monotonic() + 20
        while next_one.moves < moves + 3:  # it lives
            next_one.look()
            assert time.monotonic() < deadline and not next_one.is_free(5.0) and next_one.is_own()
        leading.take(1)
        assert ended.wait(20) and isinstance(lost[0], HostLostError) and "epoch 2" in str(lost[0])
    leading.__exit__()


def test_who_takes_the_lease_over_waits_until_it_stands_still(tmp_path):
    folder = RunFolder(tmp_path)
    folder.lease.mkdir()
    for group, free in (("group", True), ("another", False)):
        record = {"host": "far", "process": 5, "beats": 7, "group": group}
        (folder.lease / "00000041.json").write_text(json.dumps(record))
        next_one = Lease(folder, pytest.fail, "group")
        next_one.look()
        assert not next_one.is_free(0.4) and "process 5 on far, epoch 41" in next_one.holder()
        time.sleep(0.5)
        next_one.look()
        assert next_one.is_free(0.4) == free, "of another job it takes STALE_SECONDS"
