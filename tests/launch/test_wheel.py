"""What a wheel holds: the package finds its configs, traces and results where no checkout is."""

import os
import pathlib
import subprocess
import sys

import pytest

from moe_jax.__main__ import COMMANDS

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder as pip would fill it from the wheel, without the requirements."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder), "build_py"]
    subprocess.run([*build, "--build-lib", str(folder)], cwd=ROOT, check=True, capture_output=True)
    return folder


def in_wheel(folder, *arguments):
    """Run Python in an empty folder, with the package of the wheel alone."""
    (folder / "empty").mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder / "empty", env=environment, capture_output=True, text=True)


def test_configs_traces_and_results_come_along(installed):
    code = (
        "import moe_jax, moe_jax.shipped as s;"
        "from moe_jax.config.gin_files import parse_run_config;"
        "from moe_jax.cluster.cluster import read_cluster;"
        "from moe_jax.papers import deepspeed_moe, loads;"
        "parse_run_config(['configs/run/hecate.gin']); read_cluster('configs/cluster/johnny.gin');"
        "loads.find_loads('top_1'); assert deepspeed_moe.TRAINED.exists();"
        "print(s.ROOT)"
    )
    found = in_wheel(installed, "-c", code)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(installed / "moe_jax" / "shipped")


def test_commands_by_name(installed):
    listed = in_wheel(installed, "-m", "moe_jax")
    assert listed.returncode == 0 and all(f"\n  {name} " in listed.stdout for name in COMMANDS)
    modules = {path.stem for path in (ROOT / "moe_jax").glob("*.py")}
    assert modules == {"__init__", "__main__", "errors", "plugins", "shipped", *COMMANDS}
    unknown = in_wheel(installed, "-m", "moe_jax", "trian")
    assert unknown.returncode == 2 and unknown.stderr.startswith("error: 'trian' is no command; there are train,")
    assert unknown.stderr.count("\n") == 1
    dry = in_wheel(
        installed, "-m", "moe_jax", "train", "--dry_run", "--gin_file=configs/run/demo.gin", "--host_devices=8"
    )
    assert dry.returncode == 0 and "parameters" in dry.stdout, dry.stderr
