"""One-line faults that the tests must see: two in most packages, once drawn by a seed.

    python scripts/checks/faults.py        # plant each in a copy of this tree, run its test
    python scripts/checks/faults.py 3 17   # these, as they are numbered from 1

Inputs: faults.json, a list of {"package", "kind", "path", "old", "new", "test"}: a text that stands once in the file,
what takes its place, and the test that fails by it. Outputs: a line for each fault, and exit code 1 where a test does
not fail with the fault, or fails without it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fails(tree: Path, test: str) -> bool:
    """Return whether the test fails; out of time counts as failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=600)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)


def check(tree: Path, chosen: set[int]) -> int:
    """Plant the chosen faults, all where none is; return how many their test misses, or fails without."""
    missed = 0
    for number, fault in enumerate(json.loads(Path(__file__).with_suffix(".json").read_text()), 1):
        if chosen and number not in chosen:
            continue
        path = tree / fault["path"]
        text = path.read_text() if path.exists() else ""
        if text.count(fault["old"]) != 1:
            verdict = f"STANDS {text.count(fault['old'])} TIMES in {fault['path']}"
        elif fails(tree, fault["test"]):
            verdict = "FAILS WITHOUT IT"
        else:
            path.write_text(text.replace(fault["old"], fault["new"]))
            verdict = "caught" if fails(tree, fault["test"]) else "MISSED"
            path.write_text(text)
        missed += verdict != "caught"
        line = f"{number:2} {fault['package']:14} {fault['kind']:10} {verdict}: {fault['path']}, {fault['test']}"
        print(line, flush=True)
    return missed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs"))
        sys.exit(int(check(copy, set(map(int, sys.argv[1:]))) > 0))
