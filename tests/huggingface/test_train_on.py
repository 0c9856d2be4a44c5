"""A converted checkpoint under the commands of a run: evaluated, trained on from, exported again, and refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from moe_jax.config.gin_files import parse_run_config  # noqa: E402
from moe_jax.config.run_config import config_text  # noqa: E402
from moe_jax.data import build_cache  # noqa: E402
from moe_jax.errors import UserError  # noqa: E402
from moe_jax.inference.conversion import TensorFolder, export_folder, import_folder  # noqa: E402
from moe_jax.training.hosts import Hosts  # noqa: E402
from moe_jax.training.run import evaluate_run, run  # noqa: E402

GOLDEN = Path(__file__).parent / "golden" / "olmoe"  # 40 ids, of which 2 ends a text
BINDINGS = (
    "train.steps = 2", "train.batch_size = 8", "train.warmup_steps = 1", "train.evaluate_every = 2",
    "train.checkpoint_every = 2", "DataConfig.sequence_length = 8", "train.evaluate_windows = 8",
    "train.learning_rate = 0.001", "MeshConfig.expert = 4", "MeshConfig.data = 2",
)  # fmt: skip
DOCUMENTS = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a converted checkpoint; its tokenizer knows the words w0 to w39, and no name of an end."""
    source, made = tmp_path_factory.mktemp("source") / "olmoe", tmp_path_factory.mktemp("made") / "run"
    shutil.copytree(GOLDEN, source)
    words = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(40)}, "unk_token": "w0"}
    parts = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    (source / "tokenizer.json").write_text(json.dumps(parts))
    import_folder(source, made)
    return made


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """The bindings of a corpus of DOCUMENTS texts without the word w2."""
    texts = tmp_path_factory.mktemp("texts")
    lines = [{"text": " ".join(f"w{3 + (i * j) % 37}" for i in range(30))} for j in range(DOCUMENTS)]
    (texts / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return (f"DataConfig.path = '{texts / 'a.jsonl'}'", f"DataConfig.cache_dir = '{texts / 'cache'}'")


def test_train_on_and_export(made, where, tmp_path, capsys):
    """Documents kept apart, and closed with the checkpoint's own end; the folder itself is evaluated on that text."""
    bindings = [*BINDINGS, *where, "ModelConfig.document_mask = True", "train.grad_accum_steps = 2"]
    bindings[1] = "train.batch_size = 16"
    config = parse_run_config([str(made / "config.gin")], bindings)[0]
    text = config_text(config)
    assert run(config, text, text, Hosts(), workdir=str(tmp_path / "run"), init_from=str(made))
    said = capsys.readouterr().out
    assert f"starting from the parameters of {made}, step 0" in said
    cache = build_cache(config.data)
    assert cache.ends.size == DOCUMENTS and np.flatnonzero(cache.tokens == 2).tolist() == (cache.ends - 1).tolist()
    export_folder(tmp_path / "run", tmp_path / "back", dtype="bfloat16")
    before, after = TensorFolder(GOLDEN), TensorFolder(tmp_path / "back")
    assert before.names == after.names
    moved = [np.max(np.abs(before.read(t) - after.read(t).astype(np.float32))) for t in before.names]
    assert 1e-4 < max(moved) < 0.1
    plain = parse_run_config([str(made / "config.gin")], [*BINDINGS, *where])[0]
    evaluate_run(plain, config_text(plain), Hosts(), str(made))
    assert "step 0: held-out loss" in capsys.readouterr().out


def test_what_cannot_be_gone_on_from_is_one_line(made, where, tmp_path):
    """No folder is left behind, and none is changed."""
    alone = "holds parameters alone, as moe_jax.convert makes it; start a run of its own from them, with --init_from="
    mine, fresh = {"workdir": str(made)}, {"workdir": str(tmp_path / "run"), "init_from": str(made)}
    other = "holds a run with another config: ModelConfig.norm_epsilon was 1e-05 and is 0.1 now"
    files = sorted(path.name for path in made.iterdir())
    for options, changes, words in (
        (mine, (), f"{made} {alone}{made} and another --workdir"),
        (fresh, ("ModelConfig.hidden_dim = 12",), "is not of this model: "),
        ({**mine, "init_from": str(made)}, (), alone),
        ({**fresh, "init_from_ema": True}, (), "holds no moving average of its parameters"),
        (None, ("ModelConfig.norm_epsilon = 0.1",), other),
    ):
        config, text, operative = parse_run_config([str(made / "config.gin")], [*BINDINGS, *where, *changes])
        with pytest.raises(UserError) as error:
            if options is None:
                evaluate_run(config, text, Hosts(), str(made))
            else:
                run(config, text, operative, Hosts(), **options)
        assert words in str(error.value) and "\n" not in str(error.value)
    assert files == sorted(path.name for path in made.iterdir()) and not (tmp_path / "run").exists()
