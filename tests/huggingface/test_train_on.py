"""A converted checkpoint under the commands of a run: evaluated, trained on from, exported again."""

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")

from moe_jax.config import config_text, parse_run_config  # noqa: E402
from moe_jax.distributed.hosts import Hosts  # noqa: E402
from moe_jax.huggingface import export_folder, import_folder  # noqa: E402
from moe_jax.huggingface.files import TensorFolder  # noqa: E402
from moe_jax.training.run import RunOptions, run  # noqa: E402

GOLDEN = Path(__file__).parent / "golden" / "olmoe"
BINDINGS = (
    "train.steps = 2", "train.batch_size = 8", "train.warmup_steps = 1", "train.evaluate_every = 2",
    "train.checkpoint_every = 2", "DataConfig.sequence_length = 8", "train.evaluate_windows = 8",
    "train.learning_rate = 0.001", "MeshConfig.expert = 4", "MeshConfig.data = 2",
)  # fmt: skip


def enlarge(tensors):
    """Give the vocabulary of 40 the rows that bytes need."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.resize(tensors[name], (260, 16))


def test_train_on_and_export(tmp_path, capsys):
    from huggingface.test_golden import change_config, rewrite

    source, made = tmp_path / "source", tmp_path / "made"
    shutil.copytree(GOLDEN, source)
    rewrite(source, enlarge)
    change_config(source, vocab_size=260)
    import_folder(source, made)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" ".join(f"{i % 97} apples" for i in range(2000)))
    where = (f"DataConfig.path = '{tmp_path / 'texts'}'", f"DataConfig.cache_dir = '{tmp_path / 'cache'}'")
    config = parse_run_config([str(made / "config.gin")], [*BINDINGS, *where])[0]
    text = config_text(config)
    started = RunOptions(workdir=str(tmp_path / "run"), init_from=str(made))
    assert run(config, text, text, started, Hosts())
    assert f"starting from the parameters of {made}, step 0" in capsys.readouterr().out
    export_folder(tmp_path / "run", tmp_path / "back", dtype="bfloat16")
    before, after = TensorFolder(source), TensorFolder(tmp_path / "back")
    assert before.names == after.names
    moved = [np.max(np.abs(before.read(t) - after.read(t).astype(np.float32))) for t in before.names]
    assert 1e-4 < max(moved) < 0.1
