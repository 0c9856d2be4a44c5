import errno
import getpass
import json
import os
import platform
import socket
import threading
from pathlib import Path

import pytest

from moe_jax.config.run_config import bindings_as_begun
from moe_jax.errors import UserError
from moe_jax.observe.metrics_file import MetricsWriter
from moe_jax.storage.run_folder import RunFolder, atomic_file, environment_record, write_atomically

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


@pytest.mark.parametrize("name", ["environment.json", "metrics.jsonl", "run.json"])
def test_a_pipe_in_place_of_a_file_is_waited_for_by_nobody(tmp_path, name):
    os.mkfifo(tmp_path / name)
    run, pipe = RunFolder(tmp_path), os.open(tmp_path / name, os.O_RDWR)
    late = threading.Timer(5, os.close, (pipe,))  # who waits does so until then
    late.start()
    if name == "run.json":
        assert bindings_as_begun(tmp_path) == []
    else:
        read = run.read_environment if name == "environment.json" else lambda: MetricsWriter(run)
        with pytest.raises(UserError, match=rf"cannot (read|write) .*{name} \(.*it is a pipe or a device"):
            read()
    assert not late.finished.is_set()
    late.cancel()
    os.close(pipe)
