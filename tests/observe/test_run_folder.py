import errno
import getpass
import json
import platform
import socket
import subprocess
from pathlib import Path

import pytest

from moe_jax.errors import UserError
from moe_jax.storage.run_folder import (
    RunFolder,
    atomic_file,
    environment_record,
    git_state,
    write_atomically,
)

DEVICES = [{"platform": "cpu", "kind": "cpu", "id": index} for index in range(8)]


def test_an_unused_run_folder_goes_with_what_was_made_for_it_alone(tmp_path):
    folder, found = RunFolder(tmp_path / "runs" / "one"), RunFolder(tmp_path / "runs")
    folder.config.write_text("train.steps = 3")
    folder.remove_if_unused()
    assert folder.config.exists()
    folder.config.unlink()
    found.remove_if_unused()
    assert folder.path.is_dir()
    folder.remove_if_unused()
    assert not (tmp_path / "runs").exists() and tmp_path.is_dir()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomically(path, "old")
    assert write_atomically(path, "né") == path and path.read_bytes() == "né\n".encode()
    with pytest.raises(KeyError), atomic_file(path) as file:
        file.write(b"half")
        raise KeyError

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "né\n" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_environment_record_states_versions_devices_and_mesh():
    record = environment_record(devices=DEVICES, mesh={"data": 2, "expert": 4}, processes=2)
    assert record["python"] == platform.python_version()
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"} <= set(record["packages"])
    assert record["machine"]["cpu_count"] >= 1 and record["machine"]["architecture"] == platform.machine()
    assert record["devices"] == [{"platform": "cpu", "kind": "cpu", "count": 8}]
    assert record["mesh"] == {"data": 2, "expert": 4} and record["processes"] == 2
    text = json.dumps(record)  # names no host, user or path
    assert f'"{socket.gethostname()}"' not in text and f'"{getpass.getuser()}"' not in text
    assert str(Path.home()) not in text and "/" not in text


def test_git_state_of_a_checkout(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    unknown = {"commit": None, "uncommitted_changes": None}
    assert git_state(package) == unknown
    git("init", "-q")
    # Inside a checkout but not tracked, as in a virtual environment of another project.
    assert git_state(package) == unknown
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert git_state(package) == {"commit": commit, "uncommitted_changes": False}
    (package / "__init__.py").write_text("x = 1\n")
    (tmp_path / "elsewhere.txt").write_text("")
    assert git_state(package) == {"commit": commit, "uncommitted_changes": True}
