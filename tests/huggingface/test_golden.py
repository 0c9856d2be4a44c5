"""Checkpoints of transformers, read without it: golden files hold its numbers (`random_models.py` wrote them).

The real model, in float32, on one device: of each tensor's gradient the norm of the difference within 1e-5 of its norm.
And a converted checkpoint under the commands of a run: evaluated, trained on from, exported again, and refused.
"""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface.random_models import CLASSES, SIZES, compare_with, places_of
from support.commands import run_command_here
from support.marks import slow_but

from moe_jax.config.gin_files import parse_run_config
from moe_jax.config.run_config import config_text
from moe_jax.config.train_config import TrainConfig
from moe_jax.data.cache import build_cache
from moe_jax.data.chat import special_ids
from moe_jax.data.tokenizer import END_FILES, ByteTokenizer
from moe_jax.errors import UserError
from moe_jax.inference import conversion
from moe_jax.inference.conversion import TensorFolder, Upcycling, export_folder, import_folder, write_tensors
from moe_jax.inference.families import ABSENT, FAMILIES, NEUTRAL, OFF, read_config, upcycled_keys, write_config
from moe_jax.jobs.hosts import Hosts
from moe_jax.models.counts import parameter_counts
from moe_jax.training.optimizer import build_learning_rate
from moe_jax.training.run import Start, evaluate_run, run

save_file = pytest.importorskip("safetensors.numpy").save_file
FOLDER = Path(__file__).parent / "golden"


EVERY = slow_but(sorted(path.name for path in FOLDER.iterdir()), "mixtral_one_key_head_sharded", "deepseek_v3")


@pytest.mark.parametrize("name", EVERY)
def test_loss_and_gradients_are_those_of_transformers(name, tmp_path):
    run = import_folder(FOLDER / name, tmp_path / "run")
    compare_with(np.load(FOLDER / name / "golden.npz"), run, tmp_path / "run", FOLDER / name)


@pytest.mark.parametrize("name", EVERY)
def test_an_export_has_the_same_bits(name, tmp_path, monkeypatch):
    """In one file and in many; imported again, it is the same run."""
    first = import_folder(FOLDER / name, tmp_path / "run")
    monkeypatch.setattr(conversion, "SHARD_BYTES", 10_000)
    family = export_folder(tmp_path / "run", tmp_path / "back")
    before, after = TensorFolder(FOLDER / name), TensorFolder(tmp_path / "back")
    assert name.startswith(family.model_type) and (tmp_path / "back" / "model.safetensors.index.json").exists()
    assert before.names == after.names
    for tensor in before.names:
        a, b = before.read(tensor), after.read(tensor)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), tensor
    config, written = (json.loads((path / "config.json").read_text()) for path in (before.path, after.path))
    # the last one is of tensors that are skipped
    said_otherwise = {
        "head_dim",
        "sliding_window",
        "decoder_sparse_step",
        "mlp_only_layers",
        "num_nextn_predict_layers",
    }
    said_otherwise |= {key for key, value in config.items() if value is None}
    same = (config.keys() & written.keys()) - said_otherwise
    assert {key: config[key] for key in same} == {key: written[key] for key in same}
    second = import_folder(tmp_path / "back", tmp_path / "again")
    assert (first.model, first.moe) == (second.model, second.moe)
    assert parse_run_config([str(tmp_path / "run" / "config.gin")])[0] == first
    assert parameter_counts(first.model, first.moe, 40)[0] == sum(before.read(t).size for t in before.names)


def test_an_export_names_the_ids_of_its_tokenizer(tmp_path):
    """Of a run that no config.json was carried to: transformers would take its class's ids for what is absent."""
    tokenizers = pytest.importorskip("tokenizers")
    run, special = tmp_path / "run", ["<s>", "</s>", "<pad>"]
    import_folder(FOLDER / "olmoe", run)
    for file in END_FILES:
        (run / file).unlink(missing_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(special, 3)}, "<s>"))
    made.add_special_tokens(special)
    made.save(str(run / "tokenizer.json"))
    config = run / "config.gin"
    config.write_text(config.read_text().replace("tokenizer = 'byte'", f"tokenizer = '{run / 'tokenizer.json'}'"))
    for settings, bos, pad in (({}, None, None), ({"bos_token": "<s>", "pad_token": {"content": "<pad>"}}, 3, 5)):
        (run / "tokenizer_config.json").write_text(json.dumps(settings))
        export_folder(run, tmp_path / f"back{bos}")
        generation, config = (json.loads((tmp_path / f"back{bos}" / file).read_text()) for file in END_FILES)
        assert generation == {"bos_token_id": bos, "eos_token_id": 4, "pad_token_id": pad}
        assert generation.items() <= config.items()
    assert [special_ids(ByteTokenizer(), below)["eos_token_id"] for below in (384, 40)] == [256, None]


def test_files_that_hold_all_experts_in_one_tensor(tmp_path):
    """As transformers writes with save_original_format=False; Mixtral's modules have other names then."""
    name = "mixtral_one_key_head_sharded"
    source = TensorFolder(FOLDER / name)
    (tmp_path / "fused").mkdir()
    shutil.copy(FOLDER / name / "config.json", tmp_path / "fused")
    tensors = {}
    for place in places_of(json.loads((FOLDER / name / "config.json").read_text())):
        array = source.read(place.name)
        if place.fused:  # experts in their order, of each the gate half before the up half
            tensors.setdefault(place.fused[0], {}).setdefault(place.fused[1], []).append(array)
        else:
            tensors[place.name.replace(".block_sparse_moe.", ".mlp.")] = array
    for tensor, experts in tensors.items():
        if isinstance(experts, dict):
            tensors[tensor] = np.stack([np.concatenate(parts) for parts in experts.values()])
    save_file(tensors, tmp_path / "fused" / "model.safetensors")
    import_folder(tmp_path / "fused", tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "back")
    back = TensorFolder(tmp_path / "back")
    assert all(source.read(t).tobytes() == back.read(t).tobytes() for t in source.names)


def test_every_expert_is_a_copy_of_the_dense_ffn(tmp_path):
    """Of a Llama with the attention of the golden Mixtral and its first experts; exported, it has these everywhere."""
    source, matrices = TensorFolder(FOLDER / "mixtral_one_key_head_sharded"), {"w1": "gate", "w3": "up", "w2": "down"}
    keys = json.loads((source.path / "config.json").read_text()) | {"model_type": "llama"}
    keys = {key: value for key, value in keys.items() if key not in ("num_local_experts", "num_experts_per_tok")}
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text(json.dumps(keys))
    tensors = {}
    for name in source.names:
        layer, expert, matrix = name.partition(".block_sparse_moe.experts.0.")
        if expert or "block_sparse_moe" not in name:
            dense = f"{layer}.mlp.{matrices[matrix[:2]]}_proj.weight" if expert else name
            tensors[dense] = source.read(name)
    write_tensors(tmp_path / "dense", tensors.items())
    run = import_folder(tmp_path / "dense", tmp_path / "run", Upcycling(experts=4))
    sparse = import_folder(source.path, tmp_path / "sparse")
    assert (run.model, run.moe) == (sparse.model, sparse.moe)  # shares of a token's experts sum to 1
    export_folder(tmp_path / "run", tmp_path / "back")
    back = TensorFolder(tmp_path / "back")
    assert back.names == source.names
    for name in (name for name in source.names if not name.endswith(".gate.weight")):
        assert back.read(name).tobytes() == source.read(re.sub(r"experts\.\d", "experts.0", name)).tobytes(), name


def change_config(folder, **changes):
    path = folder / "config.json"
    keys = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in keys.items() if value != "absent"}))


def rewrite(folder, change):
    opened = TensorFolder(folder)
    tensors = {name: np.array(opened.read(name)) for name in opened.names}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def transpose_expert(tensors):
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def name_a_shard(folder, name="s.safetensors"):
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    index = {"weight_map": {Q: name, GATE: "first.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lead_out(folder, name, as_link=False):
    """Put a file next to the folder, and let a name of the folder mean it."""
    outside = folder.parent / "private" / name
    outside.parent.mkdir()
    shutil.copy(folder / "model.safetensors", outside) if name.endswith("tensors") else outside.write_text('{"a": 1}')
    if as_link:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)
    else:
        index = {"weight_map": {GATE: f"../private/{name}"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def put_a_pipe(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


Q, GATE = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight"
WRONG = {
    "no folder": (lambda f: shutil.rmtree(f), "config.json does not exist"),
    "dense": (lambda f: change_config(f, model_type="llama"), "model_type .'llama'. must be one of"),
    "quantised": (
        lambda f: change_config(f, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantization_config has quant_method 'gptq' and weight_block_size None; moe_jax reads 'fp8'",
    ),
    "unknown key": (lambda f: change_config(f, twist=3), "config.json: twist .3. is unknown"),
    "not neutral": (lambda f: change_config(f, clip_qkv=8.0), "config.json: clip_qkv .8.0. must be None"),
    "missing key": (lambda f: change_config(f, hidden_size="absent"), "config.json has no 'hidden_size'"),
    "no experts": (lambda f: change_config(f, num_experts="absent"), "it is no mixture of experts"),
    "dtype": (lambda f: change_config(f, dtype="float64"), "config.json: dtype .'float64'."),
    "missing tensor": (lambda f: rewrite(f, lambda t: t.pop(Q)), f"the tensor {re.escape(Q)} is missing"),
    "unknown tensor": (lambda f: rewrite(f, lambda t: t.update(more=t[Q])), "the tensor more is unknown"),
    "transposed expert": (lambda f: rewrite(f, transpose_expert), "experts.2.up_proj.weight is .16, 8., but .8, 16."),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 1000), "cannot read .*model.safetensors"),
    "missing shard": (name_a_shard, "s.safetensors does not exist, and model.safetensors.index.json names it"),
    "a map that leads out": (lambda f: lead_out(f, "a.safetensors"), "private/a.safetensors leads out of its folder"),
    "linked tensors": (lambda f: lead_out(f, "model.safetensors", True), "model.safetensors leads out of its folder"),
    "a linked tokenizer": (lambda f: lead_out(f, "tokenizer_config.json", True), "json leads out of its folder"),
    "a pipe of config": (lambda f: put_a_pipe(f, "config.json"), "config.json is no regular file"),
    "many layers": (lambda f: change_config(f, num_hidden_layers=10**9), "num_hidden_layers .1000000000. must be a"),
    "a window": (lambda f: change_config(f, layer_types=["sliding_attention"] * 2), "layer_types .* gives layers a"),
    "a name in the map": (lambda f: name_a_shard(f, "a\0b"), "'a.x00b' is no name of a file .*null byte"),
    "many digits": (lambda f: (f / "config.json").write_text(f'{{"a": {"1" * 5000}}}'), "cannot read .*config.json"),
    "NaN": (lambda f: rewrite(f, lambda t: t[Q].put(5, np.nan)), f"{Q} holds NaN or infinity; take other"),
    "only torch": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line_and_leaves_nothing(name, tmp_path):
    change, message = WRONG[name]
    source = tmp_path / "source"
    shutil.copytree(FOLDER / "olmoe", source)
    change(source)
    with pytest.raises(UserError, match=message) as error:
        run_command_here("convert", f"--from_hf={source}", f"--workdir={tmp_path / 'run'}")
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "private"}


def test_what_no_checkpoint_can_hold_is_refused(tmp_path):
    import_folder(FOLDER / "olmoe", tmp_path / "run")
    config = tmp_path / "run" / "config.gin"
    text = config.read_text()
    for old, new, message in (
        ("norm = 'rms'", "norm = 'layer'", r"ModelConfig.norm \('layer'\) has no place in a checkpoint"),
        ("capacity_factor = None", "capacity_factor = 1.0", "MoEConfig.capacity_factor"),
    ):
        config.write_text(text.replace(old, new) if old in text else text + f"MoEConfig.{new}\n")
        with pytest.raises(UserError, match=message):
            export_folder(tmp_path / "run", tmp_path / "back")
    config.write_text(text)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="no finished checkpoint"):
        export_folder(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def outcome(keys):
    """Return what a config.json is read as, or the line that it is refused with."""
    try:
        dense = keys["model_type"] in ("llama", "mistral", "qwen3")
        return read_config(upcycled_keys(keys, 4, 2) if dense else keys)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


CONFIGS = {path.name: json.loads((path / "config.json").read_text()) for path in FOLDER.iterdir()}
DENSE = {**SIZES, "intermediate_size": 8, "sliding_window": None}
DENSE.pop("num_experts_per_tok")
CONFIGS |= {name: {**DENSE, "model_type": name} for name in ("llama", "mistral", "qwen3")}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_absent_keys_mean_what_they_mean_to_transformers(name):
    """Also those that an export leaves out. DeepSeek-V3's 128 heads of keys mean as many as there are of queries."""
    keys = {**CONFIGS[name], "max_position_embeddings": 8192, "rope_theta": 500.0, "rope_parameters": {}}
    defaults = json.loads(CLASSES.read_text()).get(keys["model_type"], {})  # DeepSeek-MoE has no class
    for key, value in defaults.items():
        absent = {other: given for other, given in keys.items() if other != key}
        if (name, key) != ("deepseek_v3", "num_key_value_heads"):
            assert outcome(absent) == outcome({**absent, key: value}), key
    read = outcome(keys)
    assert keys["model_type"] not in FAMILIES or outcome({**defaults, **write_config(*read)}) == read


BINDINGS = (
    "train.steps = 2", "train.batch_size = 8", "train.warmup_steps = 1", "train.evaluate_every = 2",
    "train.checkpoint_every = 2", "DataConfig.sequence_length = 8", "train.evaluate_windows = 8",
    "train.learning_rate = 0.001", "MeshConfig.expert = 4", "MeshConfig.data = 2",
)  # fmt: skip
DOCUMENTS = 40
SPLIT = ("MeshConfig.model = 2", "MoEConfig.schedule = 's1'", "train.batch_size = 4")  # half a sequence a device


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a converted checkpoint; its tokenizer knows the words w0 to w39, and no name of an end."""
    pytest.importorskip("tokenizers")
    source, made = tmp_path_factory.mktemp("source") / "olmoe", tmp_path_factory.mktemp("made") / "run"
    shutil.copytree(FOLDER / "olmoe", source)  # 40 ids, of which 2 ends a text
    change_config(source, seq_aux=True)
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
    bindings += ["ModelConfig.max_length = 7", "DataConfig.add_special_tokens = False"]
    bindings[1] = "train.batch_size = 16"
    config = parse_run_config([str(made / "config.gin")], bindings)[0]
    text = config_text(config)
    assert run(config, text, Hosts(), workdir=str(tmp_path / "run"), start=Start(init_from=str(made)))
    said = capsys.readouterr().out
    assert f"starting from the parameters of {made}, step 0" in said
    assert f"DataConfig.sequence_length (8) is above the 7 positions (ModelConfig.max_length) that {made} has" in said
    for name in ("tokenizer.json", "config.json"):
        assert (tmp_path / "run" / name).read_bytes() == (made / name).read_bytes()
    assert f"text    {config.data.path}: " in said and "train   all parameters by adamw, learning rate 0.001 a" in said
    assert "after 1 steps of warm-up from 0.001, then" in said
    plain = parse_run_config([str(made / "config.gin")])[0].train
    assert plain == TrainConfig(learning_rate=1e-5)
    assert build_learning_rate(plain)(0) == pytest.approx(1e-5 / plain.warmup_steps)
    cache = build_cache(config.data)
    assert cache.ends.size == DOCUMENTS and np.flatnonzero(cache.tokens == 2).tolist() == (cache.ends - 1).tolist()
    export_folder(tmp_path / "run", tmp_path / "back", dtype="float16")
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["add_bos_token"] is False
    before, after = TensorFolder(FOLDER / "olmoe"), TensorFolder(tmp_path / "back")
    assert before.names == after.names
    moved = [np.max(np.abs(before.read(t) - after.read(t).astype(np.float32))) for t in before.names]
    assert 1e-4 < max(moved) < 0.1
    plain = parse_run_config([str(made / "config.gin")], [*BINDINGS, *where, *SPLIT])[0]
    evaluate_run(plain, config_text(plain), Hosts(), str(made))
    assert "step 0: held-out loss" in capsys.readouterr().out


def test_what_cannot_be_gone_on_from_is_one_line(made, where, tmp_path):
    """No folder is left behind, and none is changed."""
    alone = "holds parameters alone, as moe_jax.convert makes it; start a run of its own from them, with --init_from="
    mine, fresh, given = str(made), str(tmp_path / "run"), {"init_from": str(made)}
    other = "holds a run with another config: ModelConfig.norm_epsilon was 1e-05 and is 0.1 now"
    files = sorted(path.name for path in made.iterdir())
    bindings = [f"--gin_bindings={binding}" for binding in (*BINDINGS, *where)]
    with pytest.raises(UserError, match=f"{made}/config.gin is of a converted model, and without --init_from={made} r"):
        run_command_here("train", f"--gin_file={made}/config.gin", f"--workdir={fresh}", *bindings)
    for workdir, start, changes, words in (
        (mine, {}, (), f"{made} {alone}{made} and another --workdir"),
        (fresh, given, ("ModelConfig.hidden_dim = 12",), "is not of this model: "),
        (fresh, given, ("DataConfig.path = ''",), "the sources of Python's library; name your text, such as --gin_bi"),
        (fresh, given, SPLIT, "balance_over ('sequence') needs whole sequences on a device, and it gates 4 tokens of"),
        (mine, given, (), alone),
        (fresh, {**given, "init_from_ema": True}, (), "holds no moving average of its parameters"),
        (None, {}, ("ModelConfig.norm_epsilon = 0.1",), other),
    ):
        config, text = parse_run_config([str(made / "config.gin")], [*BINDINGS, *where, *changes])
        with pytest.raises(UserError) as error:
            if workdir is None:
                evaluate_run(config, text, Hosts(), str(made))
            else:
                run(config, text, Hosts(), workdir=workdir, start=Start(**start))
        assert words in str(error.value) and "\n" not in str(error.value)
    assert files == sorted(path.name for path in made.iterdir()) and not (tmp_path / "run").exists()


def test_a_head_that_is_no_token_table_is_kept(tmp_path, caplog):
    """Where config.json ties the two; transformers unties them as well. An equal one says nothing."""
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    for times in (1, 2):
        shutil.copytree(FOLDER / "qwen3_moe_tied", tmp_path / f"source{times}")
        rewrite(tmp_path / f"source{times}", lambda t, times=times: t.update({head: times * t[table]}))
        run = import_folder(tmp_path / f"source{times}", tmp_path / f"run{times}")
        assert run.model.tied_head == (times == 1) == (not caplog.messages)
    assert "tie_word_embeddings is true, but lm_head.weight is another table; the model is untied" in caplog.text
    export_folder(tmp_path / "run2", tmp_path / "back")
    found = TensorFolder(tmp_path / "back")
    np.testing.assert_array_equal(found.read(head), 2 * found.read(table))


def test_numbers_that_are_not_finite_are_converted_if_asked_for(tmp_path):
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(FOLDER / "olmoe", source)
    rewrite(source, lambda t: t[Q].put(5, np.nan))
    run_command_here("convert", f"--from_hf={source}", f"--workdir={run}", "--allow_nonfinite")
    to = f"--to_hf={tmp_path / 'back'}", f"--workdir={run}"
    with pytest.raises(UserError, match=f"{Q} holds NaN or infinity; take other files or --dtype, or set --allow_non"):
        run_command_here("convert", *to)
    run_command_here("convert", *to, "--allow_nonfinite")
    assert np.isnan(TensorFolder(tmp_path / "back").read(Q)).sum() == 1
    rewrite(source, lambda t: (t[Q].put(5, 0), t[GATE].put(0, 1e5)))  # more than float16 holds
    import_folder(source, tmp_path / "large")
    with pytest.raises(UserError, match=f"{GATE} holds NaN or infinity"):
        export_folder(tmp_path / "large", tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()


NOTHING = {
    "qkv_bias": False, "shared_expert_intermediate_size": 0, "router_aux_loss_coef": None, "rope_scaling": None,
    "tokenizer_class": None, "twist": [], "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_keys_that_change_nothing_are_read_and_others_are_one_line(name):
    """Those of Qwen3-Coder-30B; then every key, with values of every kind, is read or refused by name."""
    keys = {**CONFIGS[name], "router_aux_loss_coef": 0.0, "rope_theta": 1e4}
    normed = name in ("olmoe", "qwen3_moe_tied", "dots1", "qwen3")
    assert outcome({**keys, **NOTHING, "use_qk_norm": normed}) == outcome(keys) and not isinstance(outcome(keys), str)
    if normed:
        assert "use_qk_norm (False) must be True or None" in outcome({**keys, "use_qk_norm": False})
    window = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0, "layer_types": []}
    assert outcome({**keys, **window}).startswith("config.json: sliding_window (32) gives layers a window")
    every = {key for config in CONFIGS.values() for key in config} | NEUTRAL.keys() | ABSENT.keys() | NOTHING.keys()
    every |= {key for family in FAMILIES.values() for key in (*family.own_keys, *family.neutral)}
    values = (*OFF, "x", [[1]], [1, "a"], {"a": 1}, {"type": "yarn", "factor": "x"}, -1, 3, np.nan, 10**400, True)
    for key in sorted(every):
        for value in values:
            outcome({**keys, key: value})
