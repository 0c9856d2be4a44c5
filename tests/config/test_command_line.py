"""--help of every command, and mistakes in flags."""

import signal
import subprocess
import sys

import pytest

COMMANDS = {  # command: a flag of its own
    "train": "--workdir",
    "inspect": "--target",
}


def run(*words):
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_flags_of_every_command_and_succeeds(command):
    """--helpfull adds those of imported modules."""
    done = run(f"moe_jax.{command}", *(["--workdir=x", "--helpfull"] if command == "train" else ["--help"]))
    assert (done.returncode, done.stderr) == (0, "")
    assert COMMANDS[command] in done.stdout
    assert f"moe_jax.{command}" in done.stdout.split("Flags:")[0]
    assert ("--verbosity" in done.stdout) == (command == "train")


def test_an_unknown_flag_names_the_way_to_the_list():
    done = run("moe_jax.replay", "--traces=x")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Unknown command line flag 'traces'. Did you mean: trace ?")
    assert line.endswith("python -m moe_jax.replay --help lists all flags")
    stray = run("moe_jax.replay", "trace.npz")
    assert stray.returncode == 2 and "trace.npz" in stray.stderr and len(stray.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [("train", "--workdir=s3://bucket/run"), ("replay", "--trace=x", "--out=gs://b/r")])
def test_a_folder_that_is_a_url_is_refused_and_not_made(words, tmp_path):
    done = subprocess.run([sys.executable, "-m", f"moe_jax.{words[0]}", *words[1:]], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {words[-1]} is a URL; give a path".encode())
    assert done.stderr.count(b"\n") == 1 and not list(tmp_path.iterdir())


def test_a_reader_that_leaves_before_help_comes_is_no_traceback():
    command = [sys.executable, "-m", "moe_jax", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        writer.stdout.close()
        assert (writer.wait(timeout=60) in (-signal.SIGPIPE, 141), writer.stderr.read()) == (True, b"")
