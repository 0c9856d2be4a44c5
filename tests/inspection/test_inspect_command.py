"""The command line, as far as it works without a GPU and without the CUDA wheels."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from support.tiny_run import bindings_of

SAVED = pathlib.Path(__file__).parent / "fixtures" / "expert_parallel.hlo.xz"
ROOT = pathlib.Path(__file__).parents[2]


def inspect(*flags, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "moe_jax.inspect", *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def refused(*flags, **environment):
    """Return the one line that a refused command prints."""
    code, out, err = inspect(*flags, **environment)
    assert code == 2 and out == "" and "Traceback" not in err, (code, out, err)
    lines = [line for line in err.splitlines() if not line.startswith("installing ")]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


def without_wheels(tmp_path):
    """Return flags and environment of a command that finds no CUDA wheels, whatever this Python has."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    # a file of this name comes first on the path: the command then believes that no plugin is installed
    (blocked / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "real = metadata.version\n"
        "def version(name):\n"
        "    if 'cuda' in name:\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.version = version\n"
    )
    return {"PYTHONPATH": str(blocked), "MOE_JAX_VENV": str(tmp_path / "none")}


def test_missing_wheels_are_one_line_with_their_size(tmp_path):
    line = refused("--target=h200:1x4", f"--out={tmp_path / 'out'}", **without_wheels(tmp_path))
    assert "CUDA wheels of jax" in line and "GB on disk" in line and "--install" in line
    assert not (tmp_path / "out").exists() and not (tmp_path / "none-cuda").exists()


@pytest.mark.slow
def test_a_failed_installation_leaves_nothing(tmp_path):
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    line = refused("--target=h200:1x4", f"--out={tmp_path / 'out'}", "--install", **without_wheels(tmp_path), **nothing)
    assert "cannot be had" in line and "nothing was left behind" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocked"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--target=h200:4x8",), "--out is needed"),
        (("--out=x", "--target=h200:1x8", "--profile"), "--profile and --host_devices need real devices"),
        (("--out=x", "--target=h200:4x8", "--gin_bindings=MeshConfig.expert = 16"), "has 32 devices, but"),
        (("--out=x", f"--hlo={SAVED}", "--target=h200:1x2"), "the target has 2 devices"),
        (("--out=x", "--host_devices=2"), "no GPU that is known here (2 x cpu)"),
    ],
)
def test_bad_input_is_one_line(flags, message, tmp_path):
    assert message in refused(*flags, MOE_JAX_VENV=str(tmp_path / "none"), JAX_PLATFORMS="cpu")


def test_a_saved_schedule_is_read_without_wheels(tmp_path):
    code, out, err = inspect(
        f"--hlo={SAVED}",
        "--target=h200:2x2",
        f"--out={tmp_path}",
        MOE_JAX_VENV="/nowhere",
    )
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert "all-to-all" in {total["role"] for total in report["totals"]["by_role"]} and "all-to-all" in out
    assert "rows" not in report and [record["taken"] for record in report["cores"]] == [0, 16, 32]
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_real_devices_are_run_and_measured(tmp_path):
    """On CPU devices, the only real ones here: the rates are an H200's and mean nothing, the path is that of a GPU."""
    bindings = [f"--gin_bindings={binding}" for binding in bindings_of(tmp_path)]
    code, out, err = inspect(
        *bindings, "--host_devices=2", "--rates=h200", "--profile", f"--out={tmp_path / 'out'}", JAX_PLATFORMS="cpu"
    )
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    measured = report["measured"]
    assert measured["devices"] == 2 and measured["steps"] == 5
    assert 0 < measured["exposed_seconds"] <= measured["collective_seconds"] < measured["step_seconds"]
    found = [record for record in report["collectives"] if record["measured"]]
    assert found and all(record["measured"]["executions"] >= 1 for record in found)
    assert "measured over 5 steps on 2 devices" in out
    instructions = report["instructions"]
    assert instructions["step_seconds"] > 0 and instructions["launches"] > 10
    assert {"matmul", "fusion", "collective"} <= {group["group"] for group in instructions["groups"]}
    assert len(instructions["worst"]) == 20 and "instructions that differ most" in out
    again = tmp_path / "again"
    constants = f"--constants={tmp_path / 'out' / 'report.json'}"
    code, _, err = inspect(
        f"--hlo={tmp_path / 'out' / 'schedule.hlo.gz'}", "--target=h200:1x2", constants, f"--out={again}", *bindings
    )
    assert code == 0, err
    saved = json.loads((again / "report.json").read_text())
    model = saved["model"]
    assert saved["rows"]["buckets"] == report["rows"]["buckets"] and "thunks" not in report  # CPUs have none
    assert saved["rows"]["step_seconds"] < saved["step"]["modelled_seconds"]
    assert report["constants"] and {name: model[name] for name in report["constants"]} == report["constants"]
    assert report["target"]["per_node"] == 2 and report["memory"]["arguments"] > 0


def test_unknown_compiler_options_are_refused(tmp_path):
    bindings = [f"--gin_bindings={binding}" for binding in bindings_of(tmp_path)]
    flags = (*bindings, "--host_devices=2", "--rates=h200", f"--out={tmp_path / 'out'}")
    line = refused(*flags, "--compiler_option=xla_gpu_nonsense=1", JAX_PLATFORMS="cpu")
    assert "No such compile option: 'xla_gpu_nonsense'" in line and not (tmp_path / "out").exists()
