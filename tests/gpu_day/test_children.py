"""A part may fail, crash, hang or end its process: it is recorded, and the next one runs."""

import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

import pytest
from gpu_day_items import children, day
from gpu_day_items.plan import ITEMS, Item, Part


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
    return children.Workspace(out=tmp_path, scratch=tmp_path, tiny=True)


def part(name, call="", **fields):
    return Part(name=name, call=f"bad_parts:{call or name}", **fields)


def run(workspace, *parts, seconds=60.0):
    reported = []
    until = time.monotonic() + seconds
    return children.run_parts(parts, workspace, until, lambda records: reported.append(len(records))), reported


def test_what_goes_wrong_is_recorded_and_the_next_runs(workspace):
    records, reported = run(
        workspace, part("well"), part("raises"), part("does_not_apply"), part("crashes"), part("hangs", limit=2),
        part("exits"), part("last", "well", arguments={"value": 7}),
    )  # fmt: skip
    found = {record["name"]: record for record in records}
    assert {name: record["status"] for name, record in found.items()} == {
        "well": "ok", "raises": "failed", "does_not_apply": "skipped", "crashes": "crashed", "hangs": "timed out",
        "exits": "crashed", "last": "ok",
    }  # fmt: skip
    assert found["raises"]["reason"].startswith("RuntimeError: RESOURCE_EXHAUSTED: Out of memory")
    assert found["raises"]["before"] == 1 and any("Traceback" in line for line in found["raises"]["stderr"])
    assert found["does_not_apply"]["reason"] == "no such device"
    assert found["crashes"]["reason"] == "killed by SIGSEGV" and found["crashes"]["stderr"] == ["last words"]
    assert found["crashes"]["before"] == 2 and found["hangs"]["before"] == 3
    assert "not done after 2 s; killed" in found["hangs"]["reason"] and 2 <= found["hangs"]["seconds"] < 10
    assert found["exits"]["reason"] == "exit code 3" and found["last"]["value"] == 7
    assert reported[-1] == len(records)


def test_a_child_whose_parent_is_killed_ends_itself(tmp_path):
    """By SIGKILL the parent tidies up nothing; a kernel that hangs must not hold the GPU for the next run."""
    code = f"""
import pathlib, time
from gpu_day_items import children, plan
workspace = children.Workspace(out=pathlib.Path({str(tmp_path)!r}), scratch=pathlib.Path({str(tmp_path)!r}), tiny=True)
children.run_parts([plan.Part(name="a", call="bad_parts:hangs")], workspace, time.monotonic() + 60, print)
"""
    here = pathlib.Path(__file__).parent
    paths = os.pathsep.join(map(str, (here.parents[1] / "scripts", here.parents[1], here)))
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths})
    mark, limit = tmp_path / "hanging", time.monotonic() + 60
    while not (mark.exists() and mark.read_text()) and time.monotonic() < limit:
        time.sleep(0.02)
    child = int(mark.read_text())
    assert runs(child)
    parent.kill()
    parent.wait()
    while runs(child) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not runs(child)


def runs(process: int) -> bool:
    """Say whether a process runs; one that ended and whose end nobody has asked for does not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return done.stdout.strip()[:1] not in ("", "Z")


def test_unless_and_after(workspace):
    """An item whose substitute went well is well; parts share a process until one goes wrong, or wants other flags."""
    parts = (
        part("well"), part("same", "well"), part("substitute", "well", unless="well"), part("raises"),
        part("instead", "well", unless="raises"), part("flags", "well", flags="--xla_gpu_deterministic_ops=true"),
        part("never", "well", after="raises"),
    )  # fmt: skip
    item = Item(number=1, name="a", title="A", budget=60, least=1, parts=parts)
    record = day.run_item(item, workspace, time.monotonic() + 60, print)
    assert record["status"] == "ok" and [(own["name"], own["status"]) for own in record["parts"]] == [
        ("well", "ok"), ("same", "ok"), ("raises", "failed"), ("instead", "ok"), ("flags", "ok"), ("never", "skipped"),
    ]  # fmt: skip
    process = {own["name"]: own.get("process") for own in record["parts"]}
    assert process["well"] == process["same"] and len({process[name] for name in ("well", "instead", "flags")}) == 3
    lines = day.item_lines(record)
    assert "| what | a \\| result of 1 |" in lines
    assert any(line.startswith("| raises | failed: RuntimeError") for line in lines)


def test_time_that_is_spent_skips_parts_and_items(workspace):
    records, _ = run(workspace, part("hangs"), part("well"), seconds=2)
    assert [record["status"] for record in records] == ["timed out", "skipped"]
    assert records[1]["reason"] == "the time of its item was spent"
    item = Item(number=1, name="a", title="A", budget=10, least=30, parts=(part("well"),))
    full = children.Workspace(out=workspace.out, scratch=workspace.scratch, tiny=False)
    record = day.run_item(item, full, time.monotonic() + 10, lambda _: None)
    assert record["status"] == "skipped" and "it needs at least 30 s" in record["reason"]


def test_what_is_not_finite_leaves_strict_json(tmp_path):
    """A kernel that is wrong makes NaN, and a part may record it."""
    items = [{"parts": [{"loss": float("nan"), "errors": (1.0, float("inf"), -float("inf"))}]}]
    with mock.patch.object(day, "page", lambda day: ""):
        day.write(tmp_path, {"items": items})
    found = json.loads((tmp_path / "gpu_day.json").read_text(), parse_constant=pytest.fail)
    assert found == {"items": [{"parts": [{"loss": "nan", "errors": [1.0, "inf", "-inf"]}]}]}


def test_the_plan_fits_its_limit():
    """Nine items in order; the names of parts that others refer to exist; nothing alone takes more than its item."""
    assert [item.number for item in ITEMS] == list(range(1, 10))
    for item in ITEMS:
        names = {part.name for part in item.parts}
        assert len(names) == len(item.parts) and item.least <= item.budget
        for part in item.parts:
            assert {part.unless, part.after} <= names | {""} and part.limit <= item.budget
    assert sum(item.least for item in ITEMS) < 525 < 540


def test_children_share_one_gpu_one_cache_and_take_no_memory_ahead(workspace, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    full = children.Workspace(out=workspace.out, scratch=workspace.scratch, tiny=False)
    found = children.environment(full, "--b=2")
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false" and found["CUDA_VISIBLE_DEVICES"] == "0"
    assert found["JAX_COMPILATION_CACHE_DIR"] == str(workspace.out / "cache")
    assert found["XLA_FLAGS"] == "--a=1 --b=2" and found["JAX_PLATFORMS"] == "cuda,cpu"
    assert children.environment(workspace, "")["JAX_PLATFORMS"] == "cpu"
