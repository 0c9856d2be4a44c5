"""A run that is killed three times, once in each way, ends bit for bit where an undisturbed run ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.quick_compiles import QUICK

REPOSITORY = Path(__file__).parents[2]


def test_three_kills_change_nothing(tmp_path):
    command = [sys.executable, str(REPOSITORY / "scripts" / "kill_test.py"), "--times=3", f"--workdir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "XLA_FLAGS": QUICK})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"] and not result["faults"]
    assert [result[f"kills_while_{kind}"] for kind in ("saving", "training", "starting")] == [1, 1, 1]
