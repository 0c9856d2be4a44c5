"""A run from its folder to its last line: new, resumed, finished, evaluated, started from another, refused."""

import json
import re
import shutil
import types

import jax
import numpy as np
import pytest
from support.tiny_run import assert_same_run, evaluate_here, run_here

from moe_jax.config.run_config import overridden
from moe_jax.errors import UserError
from moe_jax.observe.loads import read_loads
from moe_jax.observe.metrics_file import read_metrics
from moe_jax.observe.report import summarize_run
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.training import program

EMA = "train.ema_decay = 0.75"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert run_here(folder, folder / "work", EMA)
    return folder


def test_run_folder_holds_what_was_promised(finished):
    work = finished / "work"
    for name in (
        "config.gin", "environment.json", "metrics.jsonl", "evaluations.jsonl", "loads.npz",
        "plots/expert_load.png", "report.html", "tensorboard", "checkpoints",
    ):  # fmt: skip
        assert (work / name).exists(), name
    records = read_metrics(work)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    fields = {
        "step", "loss", "aux_loss", "z_loss", "learning_rate", "grad_norm", "tokens_per_second", "step_seconds",
        "model_flops_per_second", "peak_device_bytes", "dropped_fraction", "overflow_steps", "dead_experts",
        "device_load_max_over_mean", "gate_entropy",
    }  # fmt: skip
    assert fields <= set(records[-1]) and "compile_seconds" in records[0] and "compile_seconds" not in records[-1]
    assert len(records[-1]["gate_entropy"]) == 2  # one per layer
    trace = read_loads(work / "loads.npz")
    devices = len(jax.devices())
    assert trace.loads.shape == (4, 2, devices, 8) and trace.iterations.tolist() == [2, 3, 5, 6]
    assert (trace.loads.sum(axis=(2, 3)) == 8 * 16 * 2).all()  # K times the tokens of a step, in every layer
    environment = json.loads((work / "environment.json").read_text())
    assert environment["devices"][0]["count"] == devices and environment["modelled"] is None  # CPUs have no prices
    assert environment["parameters"]["total"] > environment["parameters"]["active"] and environment["planner"] == "none"
    want = {"MeshConfig.devices_per_node": devices, "ModelConfig.attention": "blocks", "ModelConfig.overlap": "none"}
    want |= {"MoEConfig.grouped_matmul": "fused", "train.optimistic": False, "train.guide_scheduler": False}
    assert environment["resolved"] == want


def test_resume_equals_a_run_that_never_stopped(finished):
    """Three steps, then six: every metric and every leaf of the state bit for bit as in one go."""
    # the cosine ends at train.steps, so a run that is to be compared must see the same rate: flat from here on
    flat = ("train.learning_rate = 1e-3", "train.final_learning_rate = 1.0", "train.warmup_steps = 0")
    assert run_here(finished, finished / "whole", *flat)
    assert run_here(finished, finished / "parts", *flat, "train.steps = 3")
    assert run_here(finished, finished / "parts", *flat)
    assert_same_run(finished / "whole", finished / "parts", 6, "device_load_max_over_mean")
    np.testing.assert_array_equal(
        read_loads(finished / "whole" / "loads.npz").loads, read_loads(finished / "parts" / "loads.npz").loads
    )


def test_eval_only_gives_the_last_evaluation_also_of_averaged_parameters(finished, capsys):
    first, *_, last = read_metrics(finished / "work", file_name="evaluations.jsonl")
    assert first["held_out_loss_ema"] == first["held_out_loss"]
    assert abs(last["held_out_loss_ema"] - last["held_out_loss"]) > 1e-4
    assert summarize_run(finished / "work")["held_out_loss_ema"] == last["held_out_loss_ema"]
    evaluate_here(finished, finished / "work", EMA)
    shown = f"{last['held_out_loss']:.4f}, {last['held_out_loss_ema']:.4f} with averaged parameters"
    assert f"step 6: held-out loss {shown}" in capsys.readouterr().out


def test_a_rate_and_a_batch_are_changed_on_the_way(finished, tmp_path, capsys):
    """The optimizer's state goes on, the data after the last window read, and the run says what was changed when."""
    work = tmp_path / "work"
    shutil.copytree(finished / "work", work)
    changes = ("train.batch_size = 16", "train.learning_rate = 0.001")
    names = overridden(changes)
    with pytest.raises(UserError, match="train.batch_size was 8 and is 16 now; .* change .* with --override"):
        run_here(finished, work, EMA, "train.steps = 8", *changes)
    assert run_here(finished, work, EMA, "train.steps = 8", *changes, changed=names)
    assert "from step 6 on: train.learning_rate is 0.001, and was 0.003" in capsys.readouterr().out
    before, host = read_metrics(finished / "work"), Checkpointer(work / "checkpoints", keep=1).read_host(8)
    assert read_metrics(work)[:6] == before and read_metrics(work)[-1]["learning_rate"] < 1e-3
    assert host["data"]["windows_read"] == 6 * 8 + 2 * 16
    assert [(change["step"], change["binding"], change["is"]) for change in host["changes"]] == [
        (6, "train.batch_size", "16"), (6, "train.learning_rate", "0.001")
    ]  # fmt: skip
    assert run_here(finished, work, EMA, "train.steps = 8", *changes, changed=names)  # the same command: finished
    assert "for more, raise train.steps by --gin_bindings" in capsys.readouterr().out
    with pytest.raises(UserError, match="--override is for a run that has started, and .*other has no checkpoint"):
        run_here(finished, tmp_path / "other", *changes, changed=names)
    assert not (tmp_path / "other").exists()
    near = "; did you mean train.learning_rate?"
    for line, said in (("ModelConfig.layers = 1", ""), ("train.learning_rat = 1", near)):
        with pytest.raises(UserError, match=re.escape(f"--override={line!r} cannot be{said}: a started run may ")):
            overridden([line])


def test_init_from_starts_where_the_other_ended(finished, capsys):
    """On another mesh."""
    last = read_metrics(finished / "work", file_name="evaluations.jsonl")[-1]
    child, source = finished / "child", str(finished / "work")
    assert run_here(finished, child, "train.steps = 1", "MeshConfig.data = 2", init_from=source, init_from_ema=True)
    first = read_metrics(child, file_name="evaluations.jsonl")[0]
    assert first["step"] == 0 and first["held_out_loss"] == pytest.approx(last["held_out_loss_ema"], rel=1e-5)
    assert f"starting from the averaged parameters of {source}, step 6" in capsys.readouterr().out


def test_steps_and_mesh_may_differ(finished, capsys):
    before = read_loads(finished / "work" / "loads.npz")
    assert run_here(finished, finished / "work", EMA, "train.steps = 8", "MeshConfig.data = 2")
    out = capsys.readouterr().out
    assert "resuming at step 6" in out
    assert "mesh    data 2, expert 4; schedule deepspeed, planner" in out and ", step 6 of 8, " in out  # the banner
    after = read_loads(finished / "work" / "loads.npz")
    assert after.iterations.tolist() == [2, 3, 5, 6, 8] and after.sources.tolist() == [8, 8, 8, 8, 4]
    np.testing.assert_array_equal(after.loads[:4], before.loads)
    assert [dict(origin.mesh)["data"] for origin in after.origins] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("DataConfig.path = '/no/such/file'", "/no/such/file"),
        ("ModelConfig.vocab_size = 50", r"can hold token 256 .*ModelConfig.vocab_size \(50\) must be at least 257"),
        ("ModelConfig.kind = 'bert'\nModelConfig.vocab_size = 257", r"can hold token 257 .* must be at least 258"),
        ("MoEConfig.grouped_matmul = 'nonsense'", "nonsense"),
        ("train.seed = 1", r"cannot write .*00000006 \([\d,]+ bytes needed, 10 free\); free space on its disk"),
    ],
)
def test_bad_input_is_one_clear_line(finished, change, text, monkeypatch):
    """Before a text is tokenized, where the vocabulary is too small, and before a step, where the disk is full."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10))
    monkeypatch.setattr("moe_jax.training.run.Loop", lambda *_: pytest.fail("it trains"))
    if "vocab_size" in change:
        monkeypatch.setattr(program, "build_cache", lambda *_, **__: pytest.fail("it tokenizes"))
    with pytest.raises(UserError, match=text) as caught:
        run_here(finished, finished / "bad" / "run", *change.splitlines())
    assert "\n" not in str(caught.value)
    assert not (finished / "bad").exists(), "what a refused run made is empty, and goes"
