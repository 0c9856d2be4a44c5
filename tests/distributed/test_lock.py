"""The lock of a run folder: who has it, who is refused, and who takes it from whom."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from moe_jax.errors import UserError
from moe_jax.jobs import lock
from moe_jax.jobs.lock import FolderLock
from moe_jax.storage.run_folder import RunFolder

FAR = {"host": "far", "pid": 5, "machine": "far", "id": "later", "beats": 0}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "STALE_SECONDS", 2.0)


def write(folder, **changed):
    folder.lock.write_text(json.dumps(FAR | changed))


def seconds_to_take(folder):
    began = time.monotonic()
    with FolderLock(folder, pytest.fail):
        assert json.loads(folder.lock.read_text())["pid"] == os.getpid()
        return time.monotonic() - began


def test_a_folder_is_held_by_one_job_and_given_back(quick, tmp_path):
    folder = RunFolder(tmp_path)
    folder.environment.write_text("{}")  # of a run that began
    with FolderLock(folder, pytest.fail):
        with pytest.raises(UserError, match=rf"is held by process {os.getpid()} on .*; wait"):
            FolderLock(folder, pytest.fail).__enter__()
    assert seconds_to_take(folder) < 1 < lock.STALE_SECONDS
    folder.environment.unlink()
    seconds_to_take(folder)
    assert not list(tmp_path.iterdir())  # nothing began


def test_a_folder_is_taken_again_unless_it_is_renamed_or_of_another_job(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with FolderLock(folder, pytest.fail):
        assert not folder.retake()
        shutil.rmtree(folder.path)
        assert folder.retake() and not folder.retake() and folder.lock.exists()
        folder.path.rename(tmp_path / "moved")
        with pytest.raises(UserError, match="was renamed under a job; name its new place"):
            folder.retake()
        shutil.rmtree(tmp_path / "moved")
        folder.path.mkdir(parents=True)
        write(folder, beats=1)
        beats = iter(range(2, 10))
        beating = threading.Timer(1.0, lambda: write(folder, beats=next(beats)))
        beating.start()
        with pytest.raises(UserError, match=r"is held by process 5 on far"):
            folder.retake()
        beating.join()
    assert json.loads(folder.lock.read_text())["id"] == "later"


def test_a_dead_job_of_this_host_is_replaced_at_once(tmp_path):
    code = "import sys, time; from moe_jax.jobs.lock import *; FolderLock(RunFolder(sys.argv[1]), print).__enter__()"
    code += "; print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    holder.kill()  # and nobody waits for it: a zombie
    assert seconds_to_take(RunFolder(tmp_path)) < 5 < lock.STALE_SECONDS
    holder.communicate()


@pytest.mark.parametrize("lives", [True, False])
def test_a_job_of_another_host_is_judged_by_its_count_alone(quick, tmp_path, lives):
    """Its clock, and the times of its files, are those of another century."""
    folder, ended = RunFolder(tmp_path), threading.Event()

    def beat(beats):
        write(folder, beats=beats)
        os.utime(folder.lock, (10, 10))
        return beats + 1

    def keep():
        beats = 8
        while not ended.wait(0.05):
            beats = beat(beats)

    beat(7)
    other = threading.Thread(target=keep)
    if lives:
        other.start()
        with pytest.raises(UserError, match="process 5 on far"):
            FolderLock(folder, pytest.fail).__enter__()
        ended.set()
        other.join()
        assert json.loads(folder.lock.read_text())["host"] == "far"
    else:
        assert 2.0 <= seconds_to_take(folder) < 10


def test_a_job_that_finds_a_later_record_writes_nothing_more(quick, tmp_path):
    """It slept, or its folder was deleted and begun anew."""
    folder, lost, told = RunFolder(tmp_path), [], threading.Event()
    with FolderLock(folder, lambda error: (lost.append(error), told.set())):
        write(folder)
        assert told.wait(5)
    assert "is held by process 5 on far; wait" in str(lost[0]) and json.loads(folder.lock.read_text()) == FAR
