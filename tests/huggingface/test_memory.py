"""A folder larger than the memory that the process may have, in 20 files, is converted and converted back."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")

from moe_jax.inference.conversion import TensorFolder, write_tensors  # noqa: E402
from moe_jax.inference.families import read_config, tensor_places  # noqa: E402

ROOT = Path(__file__).parents[2]
KEYS = {
    "model_type": "olmoe", "vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "intermediate_size": 1024, "num_experts": 32,
    "dtype": "bfloat16",
}  # fmt: skip
LIMIT, FILE_BYTES = 1.0e9, 64 * 10**6
COMMAND = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int({limit}), int({limit})))
from moe_jax.convert import command
command(sys.argv)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_a_folder_larger_than_memory(tmp_path):
    import ml_dtypes

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(KEYS))
    places = list(enumerate(tensor_places(*read_config(KEYS))))
    tensors = ((place.name, np.full(place.shape, number % 251, ml_dtypes.bfloat16)) for number, place in places)
    write_tensors(source, tensors, FILE_BYTES)
    size = sum(2 * np.prod(place.shape) for _, place in places)
    assert len(list(source.glob("model-*.safetensors"))) >= 20 and size > LIMIT
    peaks = []
    for flags in ((f"--from_hf={source}",), (f"--to_hf={tmp_path / 'back'}",)):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND.format(limit=LIMIT), *flags, f"--workdir={tmp_path / 'run'}"],
            capture_output=True, text=True, cwd=ROOT, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        peaks.append(done.stdout.splitlines()[-1])
    print(f"{size:,} bytes, limit {LIMIT:,.0f}: {peaks}")
    before, after = TensorFolder(source), TensorFolder(tmp_path / "back")
    assert before.names == after.names
    assert all(np.array_equal(before.read(name), after.read(name)) for name in sorted(before.names)[::37])
