"""The GPU benchmark on a CPU: the command itself with every item at tiny sizes, cut off, and with mistakes.

gin cannot be imported in any of it, as on machines that do not have it. A part may fail, crash, hang or end its
process: it is recorded, and the next one runs.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
import types

import pytest
from gpu_day_items import children, configs, day
from gpu_day_items.plan import Item, Part

from moe_jax.cluster.fits import rows_of
from moe_jax.cluster.prices import read_constants
from moe_jax.config.gin_files import parse_run_config

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment in which `import gin` fails."""
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "gin.py").write_text("raise ImportError('there is no gin on this machine')\n")
    return {**os.environ, "PYTHONPATH": str(blocked)}


def start(out, environment, *flags):
    command, pipes = [sys.executable, "scripts/gpu_day.py", f"--out={out}", "--tiny", *flags], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipes, stderr=pipes, text=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, environment):
    """A whole day: its folder, its JSON, what it said, and JSON and page as they stood after three items."""
    out, early = tmp_path_factory.mktemp("day"), None
    process = start(out, environment, "--limit=900")
    while process.poll() is None:
        time.sleep(0.05)
        if (out / "gpu_day.md").exists():
            found = json.loads((out / "gpu_day.json").read_text())  # whole at any moment
            if early is None and len(found["items"]) >= 3:
                early = found, (out / "gpu_day.md").read_text()
    return out, json.loads((out / "gpu_day.json").read_text()), "".join(process.communicate()), early


def parts_of(day, number):
    item = day["items"][number - 1]
    assert item["number"] == number
    return {part["name"]: part for part in item["parts"]}


@pytest.mark.slow
def test_every_item_runs_and_the_folder_is_small_and_flat(finished):
    out, day, said, (early, early_page) = finished
    assert day["finished"] and day["sizes"] == "tiny" and day["unfinished"] is None
    failed = [part for item in day["items"] for part in item["parts"] if part["status"] not in ("ok", "skipped")]
    assert [(item["number"], item["status"]) for item in day["items"]] == [(n, "ok") for n in range(1, 11)], (
        said,
        failed,
    )
    assert not failed
    assert day["machine"]["jax"] and day["machine"]["jaxlib"] and day["machine"]["device_kind"] == "cpu"
    assert (day.get("commit") or day["package_version"]) and day["command"].endswith("--limit=900")
    files = [path for path in out.rglob("*")]
    assert len(files) <= 8 and all(path.parent == out and path.is_file() for path in files), files
    assert all(path.stat().st_size < 16e6 for path in files)
    page = (out / "gpu_day.md").read_text()
    listed = page.partition("#### Prices that no public table has")[2]
    assert all(f"| {row['name']} | {row['low']} to {row['high']}" in listed for row in rows_of("assumed"))
    assert "| node_share | 1.0 to 0.52 of the adapters' bytes/s | not measured | calibrate on two nodes" in listed
    assert page.startswith("### cpu, ") and "tiny sizes, which say nothing of a GPU" in page
    assert all(f"**{item['number']}. {item['title']}** (ok" in page for item in day["items"])
    # a run that is cut off after three items leaves three
    assert [item["number"] for item in early["items"]] == [1, 2, 3] and not early["finished"]
    assert early["items"] == day["items"][:3] and "cut off" in early_page


@pytest.mark.slow
def test_the_whole_model_trains_is_modelled_and_measured(finished):
    out, day, *_ = finished
    ((name, whole),) = parts_of(day, 2).items()
    assert name == "auto"  # the substitute was not needed
    assert whole["steps"] == 6 and whole["tokens_per_second"] > 0
    assert whole["modelled_launches"] > 100 and whole["losses"][-1] < whole["losses"][0]
    measured = parts_of(day, 3)["profile"]["instructions"]
    assert {"matmul", "fusion"} <= {group["group"] for group in measured["groups"]} and len(measured["worst"]) == 20
    assert measured["step_seconds"] > 0
    assert "conditional" in day["constants"]
    read_constants(str(out / "gpu_day.json"))
    assert {"profile_report.json", "profile_schedule.hlo.gz"} <= {path.name for path in out.iterdir()}


def test_the_config_built_in_code_is_that_of_the_file(tmp_path):
    """GPT-MoE-S without gin is GPT-MoE-S with gin; which attention a device gets is its own choice."""
    full = types.SimpleNamespace(tiny=False, scratch=tmp_path)
    built = configs.gpt_moe_s(full, batch=8)
    read, _ = parse_run_config(["configs/model/hecate_gpt_moe_s.gin"], [])
    assert dataclasses.replace(built.model, attention=read.model.attention) == read.model
    assert built.moe == read.moe and built.data.sequence_length == read.data.sequence_length
    assert configs.small(full).model.layers == 2


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
