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


def test_every_flag_of_the_trainer_is_named():
    page = (ROOT / "BUILD.md").read_text(encoding="utf-8")
    sources = ROOT / "moe_jax" / "train.py", ROOT / "moe_jax" / "config" / "command_line.py"
    source = "".join(path.read_text(encoding="utf-8") for path in sources)
    flags = re.findall(r"flags\.DEFINE_\w+\(\s*\"(\w+)\"", source)
    assert len(flags) > 15
    assert [flag for flag in flags if f"`--{flag}" not in page] == []
