"""The faults of scripts/checks/faults.json stand once in their files, and the suite has the test that sees each."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FAULTS = json.loads((ROOT / "scripts" / "checks" / "faults.json").read_text(encoding="utf-8"))


def test_every_fault_can_be_planted():
    for fault in FAULTS:
        assert (ROOT / fault["path"]).read_text(encoding="utf-8").count(fault["old"]) == 1, fault


def test_no_test_of_a_fault_is_slow_or_gone(request):
    """Where the whole suite is run; of some folders or files, the tests of files that are in them."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("not a whole file's tests")
    nodeids = {item.nodeid for item in request.session.items}
    collected = nodeids | {nodeid.partition("[")[0] for nodeid in nodeids}
    whole = [pathlib.Path(argument).name for argument in request.config.args] == ["tests"]
    files = {nodeid.partition("::")[0] for nodeid in nodeids}
    wanted = {fault["test"] for fault in FAULTS if whole or fault["test"].partition("::")[0] in files}
    assert wanted <= collected or request.config.option.keyword, wanted - collected
