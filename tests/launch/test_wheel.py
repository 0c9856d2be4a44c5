"""What a wheel holds, and that it alone trains: configs, traces and results are found where no checkout is."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import moe_jax
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
        "from moe_jax.observe.report import page_of; page_of();"
        "print(s.ROOT)"
    )
    found = in_wheel(installed, "-c", code)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(installed / "moe_jax" / "shipped")


def test_commands_by_name(installed):
    listed = in_wheel(installed, "-m", "moe_jax")
    assert listed.returncode == 0 and all(f"\n  {name} " in listed.stdout for name in COMMANDS)
    modules = {path.stem for path in (ROOT / "moe_jax").glob("*.py")}
    assert modules == {"__init__", "__main__", "errors", "registry", "shipped", *COMMANDS}
    unknown = in_wheel(installed, "-m", "moe_jax", "trian")
    assert unknown.returncode == 2 and unknown.stderr.startswith("error: 'trian' is no command; there are train,")
    assert unknown.stderr.count("\n") == 1
    version = in_wheel(installed, "-m", "moe_jax", "--version")
    assert (version.returncode, version.stdout) == (0, f"moe_jax {moe_jax.__version__}\n")
    dry = in_wheel(
        installed, "-m", "moe_jax", "train", "--dry_run", "--gin_file=configs/run/demo.gin", "--host_devices=8"
    )
    assert dry.returncode == 0 and "parameters" in dry.stdout, dry.stderr


RUN = ("train", "--gin_file=configs/run/demo.gin", "--host_devices=8", "--gin_bindings=train.steps = 20")
NO_NETWORK = ("NewConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "NameResolutionError")


@pytest.mark.ecosystem
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_a_run_in_an_empty_root(python, tmp_path):
    """A new environment with the wheel alone trains to a report, and says so again; with [all] it draws, too."""
    environment = {**os.environ, "PYENV_VERSION": python, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    del environment["PYTHONPATH"], environment["XLA_FLAGS"]  # those of conftest.py
    (tmp_path / "empty").mkdir()

    def call(*command):
        return subprocess.run(command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True)

    def install(what):
        done = call(*pip, "install", "--quiet", what)
        if done.returncode and any(word in done.stderr for word in NO_NETWORK):
            pytest.skip(f"pip cannot reach an index for {what}")
        assert done.returncode == 0, done.stderr

    if shutil.which(f"python{python}") is None or call(f"python{python}", "-m", "venv", tmp_path / "venv").returncode:
        pytest.skip(f"there is no Python {python} here")
    pip = (str(tmp_path / "venv" / "bin" / "python"), "-m", "pip")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(".*", "runs", "build", "*.egg-info"))
    built = call(*pip, "wheel", "--quiet", "--no-deps", f"--wheel-dir={tmp_path}", str(tmp_path / "tree"))
    if built.returncode and any(word in built.stderr for word in NO_NETWORK):
        pytest.skip("pip cannot reach an index for setuptools")
    assert built.returncode == 0, built.stderr
    shutil.rmtree(tmp_path / "tree")
    (wheel,) = tmp_path.glob("*.whl")
    for what, pictures in ((str(wheel), False), (f"{wheel}[all]", True)):
        install(what)
        command = (str(tmp_path / "venv" / "bin" / "moe-jax"), *RUN, f"--workdir=run{pictures:d}")
        first, again = call(*command), call(*command)
        run = tmp_path / "empty" / f"run{pictures:d}"
        assert first.returncode == 0 and "held-out loss" in first.stdout, first.stderr
        assert (run / "report.html").exists() and (run / "plots").exists() == pictures
        assert ("no picture: matplotlib is not installed" in first.stdout + first.stderr) != pictures
        assert again.returncode == 0 and "finished already, at step 20 of 20" in again.stdout, again.stderr
