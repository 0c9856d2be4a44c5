"""Run files still give the numbers that were kept when they were last right; see scripts/golden.py.

Two of them here, with replicas and with split experts; the others are slow.
"""

import json

import golden
import pytest

KEPT = json.loads((golden.GOLDEN / "runs.json").read_text())
QUICK = ("hecate", "parm")


def test_every_run_file_is_kept():
    assert sorted(KEPT) == golden.names(), "python scripts/golden.py --write NAME keeps the run of a new file"


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in golden.names()]
)
def test_run_file_gives_the_kept_numbers(name):
    assert golden.differences(KEPT[name], golden.run(golden.ROOT, name), golden.TOLERANCE) == []


@pytest.mark.parametrize(("key", "change"), [("loss", 1e-4), ("grad_norm", 1e-4), ("loads", 1)])
def test_a_change_is_seen(key, change):
    """The third step differs: by ten times the tolerance, or by one token."""
    got = json.loads(json.dumps(KEPT["hecate"]))
    if key == "loads":
        got[key][2][0][0][0] += change
    else:
        got[key][2] *= 1 + change
    (line,) = golden.differences(KEPT["hecate"], got, golden.TOLERANCE)
    assert key in line and "3" in line


def test_every_planner_trains_the_same_model():
    """Plans change and experts move, ahead and after the gate; the numbers are those of plain expert parallelism."""
    planners = "balanced eplb fastermoe flexmoe hecate llep pro_prophet smartmoe".split()
    for name in planners:
        assert golden.differences(KEPT["deepspeed_moe"], KEPT[name], golden.TOLERANCE) == [], name
