"""BUILD.md names every flag of the trainer, and the reference of bindings is what the dataclasses say."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["reference", "draw_architecture"])
def test_what_a_script_writes_is_up_to_date(script):
    path = ROOT / "scripts" / "checks" / f"{script}.py"
    done = subprocess.run([sys.executable, path, "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"run python scripts/checks/{script}.py\n{done.stderr}"


def test_the_examples_of_the_test_script_select_tests_and_readers_are_told_to_activate():
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in ("BUILD.md", "scripts/test.sh")]
    found = [re.findall(r"test\.sh (tests/\S+ -k \w+)", page) for page in pages]
    assert found[0] and found[0] == found[1]
    words = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", *found[0][0].split()]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, timeout=120).returncode == 0
    for page in (pages[0], (ROOT / "README.md").read_text(encoding="utf-8")):
        assert -1 < page.find("source .venv/bin/activate") < page.find("python -m moe_jax")


def test_every_flag_of_the_trainer_is_named():
    page = (ROOT / "BUILD.md").read_text(encoding="utf-8")
    sources = ROOT / "moe_jax" / "train.py", ROOT / "moe_jax" / "config" / "command_line.py"
    source = "".join(path.read_text(encoding="utf-8") for path in sources)
    flags = re.findall(r"flags\.DEFINE_\w+\(\s*\"(\w+)\"", source)
    assert len(flags) > 15
    assert [flag for flag in flags if f"`--{flag}" not in page] == []
