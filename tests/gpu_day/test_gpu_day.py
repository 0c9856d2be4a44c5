"""The GPU benchmark on a CPU: the command itself with every item at tiny sizes, cut off, and with mistakes.

gin cannot be imported in any of it, as on machines that do not have it.
"""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest
from gpu_day_items import configs

from moe_jax.cluster.timeline import read_constants
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
    """The folder of a whole day, and its JSON."""
    out = tmp_path_factory.mktemp("day")
    out_text, error = start(out, environment, "--limit=900").communicate(timeout=900)
    return out, json.loads((out / "gpu_day.json").read_text()), out_text + error


def parts_of(day, number):
    item = day["items"][number - 1]
    assert item["number"] == number
    return {part["name"]: part for part in item["parts"]}


def test_every_item_runs_and_the_folder_is_small_and_flat(finished):
    out, day, said = finished
    assert day["finished"] and day["sizes"] == "tiny" and day["unfinished"] is None
    failed = [part for item in day["items"] for part in item["parts"] if part["status"] not in ("ok", "skipped")]
    assert [(item["number"], item["status"]) for item in day["items"]] == [(n, "ok") for n in range(1, 10)], (
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
    assert page.startswith("### cpu, ") and "tiny sizes, which say nothing of a GPU" in page
    assert all(f"**{item['number']}. {item['title']}** (ok" in page for item in day["items"])


def test_grouped_matmuls_are_checked_and_timed(finished):
    parts = parts_of(finished[1], 1)
    assert parts["tokamax"]["status"] == "skipped" or parts["tokamax"]["right"] in (True, False)
    for name in ("hopper", "mosaic", "mosaic_sparing", "float8_mosaic"):
        assert parts[name]["reason"] == "cpu has no compute capability 9.0"
    for name in ("ragged", "fused", "blocked"):
        assert parts[name]["right"] and set(parts[name]["errors"]) >= {"uneven", "empty", "one row", "nothing"}
    assert parts["float8_fused"]["right"]  # beside float32 sums of the same quantised operands
    for name in ("ragged", "fused", "blocked", "float8_fused"):
        timed = parts[name][f"200 x 128 x {128 if name == 'float8_fused' else 64}, 8 groups, 67%"]
        for product in ("forward", "d-rows", "d-weights"):
            assert timed[product]["tflops"] > 0 and timed[product]["share_of_dense"] > 0


def test_the_whole_model_trains_is_modelled_and_measured(finished):
    out, day, _ = finished
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


def test_choices_conditionals_routing_and_rules(finished):
    day = finished[1]
    choices = parts_of(day, 4)
    assert all(choices[name]["step_seconds"] > 0 for name in ("overlap = 'halves'", "document_mask = True", "base"))
    assert choices["base"]["loss"] == pytest.approx(choices["stack = 'unrolled'"]["loss"], rel=1e-4)
    assert set(parts_of(day, 5)["scan"]["conditional_seconds"]) == {"default", "none"}
    routing = parts_of(day, 6)
    assert routing["top_k"]["values_right"] and routing["top_k"]["rows_with_lowest_ids"] == 1
    methods = ("scan", "scan_unrolled", "sort", "compare_all")
    assert all(routing["searchsorted"][method] for method in methods) and len(routing["sorts"]["times"]) == 7
    rules = parts_of(day, 8)
    assert all(rules[name]["decide_seconds"] > 0 for name in rules)
    assert all(rules[name]["largest_difference_from_cpu"] == 0 for name in ("fastermoe", "hecate", "balanced"))


def test_a_killed_run_goes_on_to_the_same_bits_and_layers_are_measured(finished):
    parts = parts_of(finished[1], 7)
    assert parts["gradient, default"]["differing"] == {} == parts["gradient, deterministic ops"]["differing"]
    assert parts["killed, default"]["killed_after_step"] == 5
    assert parts["resumed, default"]["differing_steps"] == [] and parts["resumed, default"]["steps"] == 6
    assert parts["resumed, default"]["differing_leaves"] == {}
    parts = parts_of(finished[1], 9)
    assert parts["bfloat16"]["layers"][0]["ratio_over_dense"] > 0
    assert parts["tf32"]["HIGHEST"]["relative_error"] < 1e-6


def test_a_run_cut_off_after_three_items_leaves_three(tmp_path, environment):
    """SIGKILL, so nothing can be tidied up: the JSON is whole at any moment (test_children.py: no child goes on)."""
    process = start(tmp_path, environment, "--items=5,6,8,9")
    path, day = tmp_path / "gpu_day.json", {"items": []}
    limit = time.monotonic() + 300
    while len(day["items"]) < 3 and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.02)
        if path.exists() and path.stat().st_size:
            day = json.loads(path.read_text())  # at any moment
    process.send_signal(signal.SIGKILL)
    process.communicate()
    day = json.loads(path.read_text())
    assert [item["number"] for item in day["items"]] == [5, 6, 8] and not day["finished"]
    assert all(item["status"] == "ok" for item in day["items"])
    assert "cut off" in (tmp_path / "gpu_day.md").read_text()
    left = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(left) <= 8 and all(path.is_symlink() or path.is_file() for path in left)


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--items=10",), "--items ('10') names '10'; items are 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        (("--out=/proc/nowhere",), "--out ('/proc/nowhere') cannot be written"),
    ],
)
def test_mistakes_are_one_line(tmp_path, environment, flags, message):
    process = start(tmp_path, environment, *flags)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "gpu_day.json").exists() or not (tmp_path / "gpu_day.json").read_text()


def test_the_config_built_in_code_is_that_of_the_file(tmp_path):
    """GPT-MoE-S without gin is GPT-MoE-S with gin; which attention a device gets is its own choice."""
    full = types.SimpleNamespace(tiny=False, scratch=tmp_path)
    built = configs.gpt_moe_s(full, batch=8)
    read, _, _ = parse_run_config(["configs/model/hecate_gpt_moe_s.gin"], [])
    assert dataclasses.replace(built.model, attention=read.model.attention) == read.model
    assert built.moe == read.moe and built.data.sequence_length == read.data.sequence_length
    assert configs.small(full).model.layers == 2
