"""Targets by name, and the command line, as far as it works without a GPU and without the CUDA wheels."""

import dataclasses
import json
import pathlib
import sys

import pytest
from support.commands import run_command_here
from support.tiny_run import bindings_of, finish, start

from moe_jax.analysis import compile_ahead
from moe_jax.analysis.compile_ahead import on_target
from moe_jax.cluster.targets import device_named, parse_target, read_device, target_names
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.models import ModelConfig
from moe_jax.parallel.mesh import MeshConfig

SAVED = pathlib.Path(__file__).parent / "fixtures" / "expert_parallel.hlo.xz"


def test_every_device_has_figures_and_a_description():
    assert set(target_names()) == {"gb200", "b200", "h100", "h200", "a100", "v100", "2080ti", "3090", "4090"}
    for name in target_names():
        target = read_device(name)
        assert target.source and target.device_kind in target.config
        rates = [target.intra_bandwidth, target.node_bandwidth, target.memory_bandwidth, target.flops_bf16]
        assert min(rates) > 1e9 and target.adapters >= 1
        assert f"memory_bandwidth: {int(target.memory_bandwidth)}" in target.config  # said twice, and alike
        assert device_named(target.device_kind) == name
    assert device_named("NVIDIA B9") is None


def test_runs_fit_their_target():
    target, turing = parse_target("h200:4x8"), parse_target("2080ti:1x8")
    assert (target.nodes, target.per_node, target.devices) == (4, 8, 32)
    run = RunConfig(model=ModelConfig(dtype="bfloat16"))
    for mesh in (MeshConfig(), MeshConfig(expert=32, devices_per_node=8), MeshConfig(data=4, expert_shard=2)):
        assert on_target(dataclasses.replace(run, mesh=mesh), target).mesh.devices_per_node == 8
    with pytest.raises(UserError, match="has 8 devices a node, but MeshConfig.devices_per_node is 4; set it to 8 or 0"):
        on_target(dataclasses.replace(run, mesh=MeshConfig(devices_per_node=4)), target)
    on_target(dataclasses.replace(run, model=ModelConfig(dtype="float32")), turing)
    with pytest.raises(UserError, match="'2080ti' .* has no bfloat16 matmuls, .* set ModelConfig.dtype = 'float32'"):
        on_target(run, turing)
    turing.check_compilable(13)
    parse_target("v100:1x8").check_compilable(12)
    with pytest.raises(
        UserError, match=r"'v100' .* was dropped by CUDA 13, .* the wheels of jax\[cuda12\], which comp"
    ):
        parse_target("v100:1x8").check_compilable(13)
    with pytest.raises(UserError, match="names no known device; choose one of 2080ti, 3090, 4090, a100, b200, gb200"):
        parse_target("h300:4x8")
    for text in ("h200", "h200:0x8"):
        with pytest.raises(UserError, match="needs a topology NODESxDEVICES.*h200:4x8"):
            parse_target(text)


def refused(*flags):
    """Return the one line of a command that is refused."""
    with pytest.raises(UserError) as error:
        run_command_here("inspect", *flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_wheels_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_ahead.importlib.util, "find_spec", lambda name: None)  # whatever this Python has
    line = refused("--target=h200:1x4", f"--out={tmp_path / 'out'}")
    assert "pip install 'jax[cuda13]==" in line and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--target=h200:4x8",), "--out is needed"),
        (("--out=x", "--target=h200:1x8", "--profile"), "--profile and --host_devices need real devices"),
        (("--out=x", "--target=h200:4x8", "--gin_bindings=MeshConfig.expert = 16"), "has 32 devices, but"),
        (("--out=x", f"--hlo={SAVED}", "--target=h200:1x2"), "the target has 2 devices"),
        (("--out=x",), "no GPU that is known here (8 x cpu)"),
        (("--out=x", "--install"), "--install is gone: pip install 'jax[cuda13]'"),
    ],
)
def test_bad_input_is_one_line(flags, message):
    assert message in refused(*flags)


def test_a_saved_schedule_is_read_without_wheels(tmp_path, capsys):
    run_command_here("inspect", f"--hlo={SAVED}", "--target=h200:2x2", f"--out={tmp_path}")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (
        "all-to-all" in {total["role"] for total in report["totals"]["by_role"]}
        and "all-to-all" in capsys.readouterr().out
    )
    assert "buckets" not in report and [record["taken"] for record in report["cores"]] == [0, 16, 20, 32]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_real_devices_are_run_and_measured(tmp_path):
    """On CPU devices, the only real ones here: the rates are an H200's and mean nothing, the path is that of a GPU."""
    bindings = [f"--gin_bindings={binding}" for binding in bindings_of(tmp_path)]
    out, again = tmp_path / "out", tmp_path / "again"
    flags = ("--host_devices=2", "--rates=h200", "--profile", f"--out={out}")
    code, said, err = finish(start([sys.executable, "-m", "moe_jax.inspect", *bindings, *flags]))
    assert code == 0, err
    report = json.loads((out / "report.json").read_text())
    measured = report["measured"]
    assert measured["devices"] == 2 and measured["steps"] == 5
    assert 0 < measured["exposed_seconds"] <= measured["collective_seconds"] < measured["step_seconds"]
    found = [record for record in report["collectives"] if record["measured"]]
    assert found and all(record["measured"]["executions"] >= 1 for record in found)
    assert "measured over 5 steps on 2 devices" in said
    instructions = report["instructions"]
    assert instructions["step_seconds"] > 0 and instructions["launches"] > 10
    assert {"matmul", "fusion", "collective"} <= {group["group"] for group in instructions["groups"]}
    assert len(instructions["worst"]) == 20 and "instructions that differ most" in said
    flags = (f"--hlo={out / 'schedule.hlo.gz'}", "--target=h200:1x2", f"--constants={out / 'report.json'}")
    run_command_here("inspect", *flags, f"--out={again}", *bindings)
    saved = json.loads((again / "report.json").read_text())
    model = saved["model"]
    assert saved["buckets"] == report["buckets"]
    assert report["constants"] and {name: model[name] for name in report["constants"]} == report["constants"]
    assert report["target"]["per_node"] == 2 and report["memory"]["arguments"] > 0
