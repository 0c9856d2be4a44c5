"""What a new user meets first: the command's errors, the requirements, and what the scripts say they do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_requirements_are_read_by_setup():
    """A line of requirements.txt is required, in [all], or for development; the CUDA extras keep the range of jax."""
    code = """
import json, setuptools
setuptools.setup = lambda **arguments: print(json.dumps(arguments, default=str))
import setup
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    arguments = __import__("json").loads(done.stdout)
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    listed = sorted(line for line in lines if line and not line.startswith("#"))
    extras = arguments["extras_require"]
    named = arguments["install_requires"] + extras["all"] + extras["notebook"] + extras["test"]
    assert sorted(set(named)) == listed and not set(extras["docs"]) & set(named)
    assert arguments["extras_require"]["cuda13"] == ["jax[cuda13]>=0.10.2,<0.13"]
    assert {"plots", "tokenizers", "tensorboard", "notebook", "test", "cuda12"} <= set(arguments["extras_require"])
    assert "moe_jax.models" in arguments["packages"] and not any("tests" in name for name in arguments["packages"])


def fake_python(folder, log):
    """Write a python3.12 that pretends to make environments: `-m venv` copies it, everything else is written down."""
    folder.mkdir()
    program = folder / "python3.12"
    program.write_text(f"""#!/bin/sh
echo "$*" >> '{log}'
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
fi
if [ "$1 $2" = "-m pip" ] && [ -n "$FAIL_INSTALL" ]; then
  exit 1
fi
exit 0
""")
    program.chmod(0o755)


def shell(script, tmp_path, *arguments, **environment):
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    env = {"PATH": path, "HOME": str(tmp_path), "MOE_JAX_VENV": str(tmp_path / "venv"), **environment}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / script), *arguments], capture_output=True, text=True, env=env, timeout=60
    )


def test_scripts_install_what_they_use_once_and_again_when_requirements_change(tmp_path):
    log, extras = tmp_path / "log", {}
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"# \[(\w+)\]", line):
            names = extras[heading[1]] = set()
        elif extras and line:
            names.add(re.match(r"[\w-]+", line)[0])

    def installed():
        lines = (tmp_path / "venv" / "installed.txt").read_text().split()
        return {re.match(r"[\w-]+", line)[0] for line in lines}

    fake_python(tmp_path / "bin", log)
    assert shell("demo.sh", tmp_path, FAIL_INSTALL="1").returncode != 0
    assert "moe_jax.train" not in log.read_text(), "trained after a failed installation"
    log.write_text("")
    done = shell("demo.sh", tmp_path, "--gin_bindings=train.steps = 40")
    assert done.returncode == 0, done.stderr
    (wanted,) = re.findall(r"-m pip install .*-r (\S+)", log.read_text())
    assert wanted == str(tmp_path / "venv" / "wanted.txt")
    assert installed() == {*extras["core"], *extras["plots"], *extras["tokenizers"], "setuptools"}
    # with the environment's own setuptools: an isolated build would ask the network for one
    assert log.read_text().count("--no-build-isolation --no-deps -e .") == 1
    (trained,) = (line for line in log.read_text().splitlines() if line.startswith("-m moe_jax.train "))
    assert "--gin_file=configs/run/demo.gin" in trained and trained.endswith("train.steps = 40")
    assert "DataConfig.tokenizer = 'runs/demo/tokenizer.json'" in trained
    assert shell("test.sh", tmp_path).returncode == 0
    assert installed() == {name for names in extras.values() for name in names}
    log.write_text("")
    assert shell("demo.sh", tmp_path).returncode == 0
    assert shell("test.sh", tmp_path, "tests/moe", "-k", "gate or drop").returncode == 0
    assert "pip install" not in log.read_text(), "installed again although nothing changed"
    assert log.read_text().splitlines()[-1] == "-m pytest -n 2 --dist=worksteal tests/moe -k gate or drop"
    (tmp_path / "venv" / "installed.txt").write_text("jax==0.1\n")
    log.write_text("")
    shell("test.sh", tmp_path)
    assert log.read_text().count("wanted.txt") == 1


@pytest.mark.parametrize(
    ("flags", "environment", "jax"),
    [([], {}, ""), (["--jax=0.12.0.1"], {}, "==0.12.0.1"), ([], {"MOE_JAX_JAX": "0.12.0.1"}, "==0.12.0.1")],
)
def test_scripts_gpu_compile_has_an_environment_for_each_jax(flags, environment, jax, tmp_path):
    """Made by a Python that this jax supports."""
    log = tmp_path / "log"
    fake_python(tmp_path / "bin", log)
    done = shell("test.sh", tmp_path, "--gpu-compile", *flags, "-x", **environment)
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    assert lines[-1] == "-m pytest -m gpu_compile -x" and not (tmp_path / "venv").exists()
    (folder,) = tmp_path.glob("venv-cuda*")
    assert f"jax[cuda13]{jax}" in (folder / "installed.txt").read_text()
    if not jax:
        assert (tmp_path / "venv-cuda").is_dir()
        return
    assert "version_info < (3, 12)" in lines[0]
    assert (tmp_path / "venv-cuda-0.12.0.1").is_dir()
