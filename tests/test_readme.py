"""The commands of README.md and BUILD.md: all name what exists, and those that a CPU runs in seconds are run.

A command stands in a fenced or indented block, or in backquotes. One that is run gets arguments appended that make it
small; one that is not run is listed in NOT_RUN with the reason. A new command fails here until it is in one of the two.
"""

import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from moe_jax.config import parse_run_config

ROOT = pathlib.Path(__file__).parents[1]
PROGRAMS = ("python", "bash", "sbatch", "kubectl", "pip", "ruff")
TINY = (
    "ModelConfig.layers = 1", "ModelConfig.model_dim = 16", "ModelConfig.heads = 2", "ModelConfig.hidden_dim = 16",
    "train.steps = 6", "train.batch_size = 8", "train.warmup_steps = 2", "train.loads_every = 2",
)  # fmt: skip
SMALL_RUN = tuple(f"--gin_bindings={binding}" for binding in TINY)

# What a command begins with, or holds: the words that are put behind it. The first that fits counts.
RUN = {
    "python -m moe_jax.train --gin_file=runs/mine/config.gin": (),  # of the run below
    "--dry_run": (),
    "--workdir=runs/mine ": SMALL_RUN,
    "python -m moe_jax.train --gin_file": ("--dry_run",),  # the same program without its steps
    "python -m moe_jax.data.train_tokenizer": (),
    "python -m moe_jax.replay --trace=runs": (),
    "python -m moe_jax.calibrate": ("--help",),  # a minute of measurements
}
NOT_RUN = {
    "bash scripts/demo.sh": "makes an environment and trains for minutes",
    "bash scripts/test.sh": "makes an environment and runs the tests",
    "pip ": "installs",
    "sbatch ": "needs Slurm",
    "kubectl ": "needs Kubernetes",
    "python -m moe_jax.train ... --coordinator": "one of several processes; tests/distributed starts such jobs",
    "python -m moe_jax.inspect": "needs the CUDA wheels, 2 GB; pytest -m gpu_compile compiles for GPUs",
    "python scripts/gpu_day": "needs a GPU; tests/gpu_day tries its items in tiny sizes",
}


def commands_of(page):
    """Return the commands in the fenced and indented blocks of a page, continued lines joined, each without comment."""
    text = re.sub(r"```(?!bash|sh\b)\w+\n.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    fenced = re.findall(r"```(?:bash|sh)?\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"^ {4}.*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", "\n".join([*fenced, *indented])).splitlines()
    lines = [re.sub(r"\s+# .*", "", line).strip() for line in lines]
    return [line for line in lines if line.split(" ")[0] in PROGRAMS]


def quoted_commands_of(page):
    """Return the commands between backquotes, such as those of a table."""
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8"))
    return [text for text in quoted if text.startswith(("python -m moe_jax", "python scripts/", "bash scripts/"))]


def program_of(command):
    """Return (file of the program whose flags the command gives, its other words)."""
    words = shlex.split(command)
    words = [word for word in words if word != "..."]
    if words[:2] == ["python", "-m"]:
        spec = importlib.util.find_spec(words[2])
        assert spec is not None and spec.origin, f"{command}: there is no module {words[2]}"
        path = pathlib.Path(spec.origin)
        return (path.with_name("__main__.py") if path.name == "__init__.py" else path), words[3:]
    scripts = [word for word in words[1:] if word.startswith("scripts/")]
    if words[0] in ("pip", "kubectl", "ruff") or not scripts:
        return None, words[1:]
    script = ROOT / scripts[0]
    passes_on = "moe_jax.train" in script.read_text(encoding="utf-8")  # the launchers and the demo
    rest = words[words.index(scripts[0]) + 1 :]
    return (ROOT / "moe_jax" / "train.py" if passes_on else script), rest


def check_words(command):
    """Fail where a command names a program, flag, config, binding or file that does not exist."""
    for word in shlex.split(command):
        if word.startswith(("scripts/", "tests/", "configs/", "requirements")):
            assert (ROOT / word).exists(), f"{command}: {word} does not exist"
    path, words = program_of(command)
    if path is None:
        return
    source = path.read_text(encoding="utf-8")
    flags = re.findall(r'DEFINE_\w+\(\s*"(\w+)"', source) + re.findall(r'"--([\w-]+)"', source)
    given = [word.removeprefix("--").split("=", 1) for word in words if word.startswith("--")]
    for flag, *_ in given:
        known = flag in flags or f"--{flag}" in source
        assert known or flag == "help", f"{command}: {path.name} has no flag --{flag}"
    values = {
        name: [flag[1] for flag in given if flag[0] == name and len(flag) == 2] for name in ("gin_file", "gin_bindings")
    }
    # a run's own config.gin is there once the command before it has run
    files = [name for name in values["gin_file"] if not name.startswith(("runs/", "DIR"))]
    parse_run_config([str(ROOT / name) for name in files], values["gin_bindings"])


def added_words(command):
    """Return the words that make a command small, None where it is not run."""
    if any(command.startswith(beginning) for beginning in NOT_RUN):
        return None
    fitting = [words for part, words in RUN.items() if command.startswith(part) or part in f"{command} "]
    assert fitting, f"{command!r} is new: add how it is made small to RUN, or why it is not run to NOT_RUN"
    return fitting[0]


def run_command(command, folder):
    """Run a command with what makes it small, as a user would, but with every cache under `folder`."""
    words = [*shlex.split(command), *added_words(command)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # the tests' eight devices are the tests' own
    }
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("page", ["README.md", "BUILD.md"])
def test_commands_name_what_exists(page):
    commands = commands_of(page) + quoted_commands_of(page)
    assert len(commands) > 8
    for command in commands:
        check_words(command)
    for command in commands_of(page):
        added_words(command)


def test_checks_see_mistakes():
    """The checks above, on commands that are wrong."""
    for command in (
        "python -m moe_jax.nothing", "python -m moe_jax.train --work_dir=x", "bash scripts/nothing.sh",
        "python -m moe_jax.train --gin_bindings='train.stps = 1'", "bash scripts/demo.sh --gin_file=configs/run/no.gin",
    ):  # fmt: skip
        with pytest.raises((AssertionError, ValueError, OSError, ModuleNotFoundError)):
            check_words(command)
    with pytest.raises(AssertionError, match="is new"):
        added_words("python -m moe_jax.something")


@pytest.mark.parametrize("page", ["README.md", "BUILD.md"])
def test_commands_run(page, tmp_path):
    """In the order of the page, in one folder: a command may read what an earlier one wrote."""
    (tmp_path / "my_texts").mkdir()
    for name, stride in (("a.txt", 7), ("b.txt", 11)):
        text = " ".join(f"{(i * stride) % 97} apples" for i in range(2000))
        (tmp_path / "my_texts" / name).write_text(text, encoding="utf-8")
    outputs = {
        command: run_command(command, tmp_path)
        for command in dict.fromkeys(commands_of(page))
        if added_words(command) is not None
    }
    assert len(outputs) >= 2
    if page == "README.md":
        (trained,) = (out for command, out in outputs.items() if added_words(command) == SMALL_RUN)
        assert "held-out loss" in trained and "unigram entropy" in trained
        assert any("step 6: held-out loss" in out for out in outputs.values())
        assert any('"planners"' in out for out in outputs.values())
        assert (tmp_path / "tokenizer.json").exists()
