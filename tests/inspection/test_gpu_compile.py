"""The real compiler, for H200s that are not there: run by `bash scripts/test.sh --gpu-compile`."""

import json
import subprocess
import sys

import pytest

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


@pytest.mark.gpu_compile
def test_the_training_step_compiles_for_a_topology(tmp_path):
    bindings = [f"--gin_bindings={name} = {value}" for name, value in TINY.items()]
    command = [sys.executable, "-m", "moe_jax.inspect", *bindings, "--target=h200:2x2", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["compile_seconds"] > 0
    memory = report["memory"]
    # parameters and two moments in float32, over 4 devices, and nothing twice: outputs take the arguments' place
    assert memory["arguments"] > 0 and memory["reused"] > 0.9 * memory["outputs"]
    assert memory["peak"] == memory["arguments"] + memory["outputs"] - memory["reused"] + memory["temporaries"]
    # dispatch and combine, forward and backward, in each of 3 layers, and their counts
    exchanges = [r for r in report["collectives"] if r["role"] == "all-to-all"]
    assert sum(r["executions"] for r in exchanges if r["bytes"] == 4 * 96 * 64 * 2) == 4 * 3
    assert all(r["asynchronous"] for r in exchanges)
