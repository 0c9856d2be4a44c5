"""The real compiler, for GPUs that are not there: run by `bash scripts/test.sh --gpu-compile`."""

import json
import subprocess
import sys

import pytest

from moe_jax.inspection import read_device, target_names

TINY = {
    "ModelConfig.layers": 3,
    "ModelConfig.model_dim": 64,
    "ModelConfig.heads": 2,
    "ModelConfig.hidden_dim": 128,
    "ModelConfig.dtype": "'bfloat16'",
    "ModelConfig.vocab_size": 256,
    "ModelConfig.max_length": 64,
    "ModelConfig.loss_chunk": 64,
    "MoEConfig.num_experts": 8,
    "DataConfig.sequence_length": 64,
    "train.batch_size": 8,
}


def inspect(target, folder, *arguments):
    """Return the report of the command for the tiny model."""
    bindings = [f"--gin_bindings={name} = {value}" for name, value in TINY.items()]
    command = [sys.executable, "-m", "moe_jax.inspect", *bindings, f"--target={target}", f"--out={folder}"]
    command += arguments
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text())


@pytest.mark.gpu_compile
@pytest.mark.parametrize("device", [name for name in target_names() if read_device(name).dropped_by_cuda is None])
def test_the_training_step_compiles_for_a_topology(device, tmp_path):
    turing = device == "2080ti"  # no bfloat16
    dtype = ["--gin_bindings=ModelConfig.dtype = 'float32'"] if turing else []
    report = inspect(f"{device}:2x2", tmp_path, *dtype)
    assert report["compile_seconds"] > 0 and report["guided_scheduler"]
    memory = report["memory"]
    # parameters and two moments in float32, over 4 devices, and nothing twice: outputs take the arguments' place
    assert memory["arguments"] > 0 and memory["reused"] > 0.9 * memory["outputs"]
    assert memory["peak"] == memory["arguments"] + memory["outputs"] - memory["reused"] + memory["temporaries"]
    # dispatch and combine, forward and backward, in each of 3 layers, and their counts
    exchanges = [r for r in report["collectives"] if r["role"] == "all-to-all"]
    assert sum(r["executions"] for r in exchanges if r["bytes"] == 4 * 96 * 64 * (4 if turing else 2)) == 4 * 3
    # those that have nothing to stand beside the compiler makes synchronous (jax 0.12: one, on 2080ti)
    assert any(r["asynchronous"] for r in exchanges)


@pytest.mark.gpu_compile
def test_a_guided_scheduler_hides_no_less(tmp_path):
    """Copies of experts, sent beside attention: with modelled seconds nobody waits longer for them than without."""
    copies = ("ModelConfig.prefetch = 'hecate'", "PlannerConfig.name = 'hecate'", "PlannerConfig.guest_slots = 2")
    copies += ("PlannerConfig.overlap_degree = 2",)
    copies = [f"--gin_bindings={binding}" for binding in copies]
    exposed = {}
    for name, arguments in (("own", ("--bare",)), ("guided", ())):
        report = inspect("h200:2x2", tmp_path / name, *copies, *arguments)
        rows = [r for r in report["in_loops"]["by_role"] if r["role"] in ("Trans", "Agg")]
        assert len(rows) == 2 and report["guided_scheduler"] == (name == "guided")
        exposed[name] = sum(r["exposed_seconds"] for r in rows)
    assert exposed["guided"] <= exposed["own"]
