import getpass
import json
import platform
import socket
import subprocess
from datetime import datetime
from pathlib import Path

from moe_jax.observe import environment_record, git_state

DEVICES = [{"platform": "cpu", "kind": "cpu", "id": index} for index in range(8)]


def test_environment_record_states_versions_devices_and_mesh():
    record = environment_record(devices=DEVICES, mesh={"data": 2, "expert": 4}, processes=2, now=datetime(2026, 11, 20))
    assert record["date"] == "2026-11-20"
    assert record["python"] == platform.python_version()
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"} <= set(record["packages"])
    assert record["machine"]["cpu_count"] >= 1 and record["machine"]["architecture"] == platform.machine()
    assert record["devices"] == [{"platform": "cpu", "kind": "cpu", "count": 8}]
    assert record["mesh"] == {"data": 2, "expert": 4} and record["processes"] == 2


def test_environment_record_names_no_host_user_or_path():
    text = json.dumps(environment_record(devices=DEVICES))
    assert f'"{socket.gethostname()}"' not in text
    assert str(Path.home()) not in text and "/" not in text
    assert f'"{getpass.getuser()}"' not in text


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_git_state_of_a_checkout(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    unknown = {"commit": None, "uncommitted_changes": None}
    assert git_state(package) == unknown
    git(tmp_path, "init", "-q")
    # Inside a checkout but not tracked, as in a virtual environment of another project.
    assert git_state(package) == unknown
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert git_state(package) == {"commit": commit, "uncommitted_changes": False}
    (package / "__init__.py").write_text("x = 1\n")
    (tmp_path / "elsewhere.txt").write_text("")
    assert git_state(package) == {"commit": commit, "uncommitted_changes": True}
