"""--help of every command, and mistakes in flags."""

import subprocess
import sys

import pytest

COMMANDS = {  # command: a flag of its own
    "train": "--workdir",
    "replay": "--planners",
    "inspect": "--target",
}


def run(*words):
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_flags_of_every_command_and_succeeds(command):
    done = run(f"moe_jax.{command}", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert COMMANDS[command] in done.stdout
    assert f"moe_jax.{command}" in done.stdout.split("Flags:")[0]
    assert "--verbosity" not in done.stdout


def test_helpfull_adds_the_flags_of_imported_modules():
    done = run("moe_jax.train", "--workdir=x", "--helpfull")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workdir" in done.stdout and "--verbosity" in done.stdout


def test_an_unknown_flag_names_the_way_to_the_list():
    done = run("moe_jax.replay", "--traces=x")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Unknown command line flag 'traces'. Did you mean: trace ?")
    assert line.endswith("python -m moe_jax.replay --help lists all flags")
