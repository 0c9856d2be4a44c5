"""Adapters: gradients by hand, the same numbers on any mesh, a run that resumes, its base, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import run_command_here
from support.marks import slow_but
from support.tiny_run import arrays_of, assert_same_run, config_of, evaluate_here, run_here

from moe_jax.errors import UserError
from moe_jax.inference import load
from moe_jax.models import Batch, LanguageModel, ModelConfig, make_loss
from moe_jax.models.config import LoraConfig
from moe_jax.models.language_model import flatten
from moe_jax.models.lora import base_of, is_adapter, joined
from moe_jax.moe import MoEConfig
from moe_jax.observe.metrics_file import read_metrics
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.training.stepper import build_stepper

RANK, ALPHA, VOCAB, ROWS, LENGTH = 3, 7.0, 48, 2, 8
EVERY = ("attention", "experts", "shared_experts", "feed_forward")
# W + s A B of a whole leaf, by name: over units, and of qkv and kv over its matrices
SPECS = {
    **dict.fromkeys(("qkv", "kv"), "umcr,ucrhd->umchd"), **dict.fromkeys(("q", "q_up", "kv_up"), "umr,urhd->umhd"),
    "out": "uhdr,urm->uhdm",
}  # fmt: skip
MODELS = {
    "fused": {"moe_every": 2},
    "grouped heads": {"kv_heads": 2, "activation": "swiglu", "stack": "unrolled"},
    "latent": {
        "kv_lora_rank": 6, "q_lora_rank": 5, "qk_rope_head_dim": 4, "positions": "rotary", "head_dim": 8,
        "activation": "swiglu",
    },
}  # fmt: skip


def model_of(case, lora):
    sizes = {"layers": 2, "model_dim": 16, "heads": 4, "hidden_dim": 12, "max_length": LENGTH, "attention": "blocks"}
    config = ModelConfig(**{**sizes, "dtype": "float64", **MODELS[case]})
    moe = MoEConfig(num_experts=4, shared_experts=1)
    return LanguageModel(
        config=config, moe=moe, vocab_size=VOCAB, roles=build_mesh(MeshConfig(), jax.devices()[:1]), lora=lora
    )


def merged_by_hand(params, scale):
    """Return {'dense', 'bank'} without adapters, of which each is multiplied out for a whole stacked leaf."""
    out = {}
    for name, own in params.items():
        if isinstance(own, dict):
            out[name] = merged_by_hand(own, scale)
        elif not name.endswith(("_lora_a", "_lora_b")):
            a, b = params.get(f"{name}_lora_a"), params.get(f"{name}_lora_b")
            spec = SPECS.get(name, "nir,nro->nio")
            out[name] = own if a is None else own + scale * jnp.einsum(spec, a, b)
    return out


def filled(tree, seed=0):
    """Return the adapters of a tree with numbers in B too, which starts from zero."""
    rng, flat = np.random.default_rng(seed), flatten(tree)
    leaves = [rng.normal(size=leaf.shape) * 0.3 if is_adapter(name) else leaf for name, leaf in flat.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


@pytest.mark.parametrize("case", slow_but(MODELS, "fused"))
def test_gradients_are_those_of_the_merged_weights(case):
    """Of A and B against autodiff through W + alpha / rank A B in float64; nothing else has one."""
    with jax.enable_x64():
        targets = EVERY if case == "fused" else EVERY[:-1]
        adapted = model_of(case, LoraConfig(rank=RANK, alpha=ALPHA, targets=targets))
        plain = model_of(case, LoraConfig())
        params = filled(jax.jit(adapted.init)(jax.random.key(0)))
        tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH + 1), 0, VOCAB)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((ROWS, LENGTH)))
        rest = batch, plain.even_tables(), None, np.int32(0), np.float64(ROWS * LENGTH)
        losses = [make_loss(model, model.layout(), ROWS, LENGTH) for model in (adapted, plain)]

        def low_rank(trained):
            return losses[0](joined(base_of(params), trained), *rest)[0]

        def by_hand(trained):
            return losses[1](merged_by_hand(joined(base_of(params), trained), ALPHA / RANK), *rest)[0]

        trained = adapted.trained(params)
        found, wanted = (jax.jit(jax.value_and_grad(loss))(trained) for loss in (low_rank, by_hand))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    flat = flatten(found[1])
    groups = {name.split("/")[0] if name.startswith("bank") else name.split("/")[3] for name in flat}
    assert groups == {"bank", "attention", "shared"} | ({"dense_attention", "dense"} if case == "fused" else set())
    for name, leaf in flatten(wanted[1]).items():
        assert np.linalg.norm(leaf) > 0, name
        np.testing.assert_allclose(flat[name], leaf, rtol=0, atol=1e-12 * np.abs(leaf).max() + 1e-15, err_msg=name)


WIDE = (
    "ModelConfig.dtype = 'float64'", "ModelConfig.activation = 'swiglu'", "train.warmup_steps = 0", "train.steps = 9",
    "train.learning_rate = 0.1", "LoraConfig.rank = 4", "LoraConfig.targets = ('attention/out', 'experts')",
)  # fmt: skip
MESHES = {
    "planner, block-wise, microbatches": (
        "MeshConfig.expert = 4", "MeshConfig.data = 2", "PlannerConfig.name = 'hecate'",
        "ModelConfig.prefetch = 'hecate'", "train.grad_accum_steps = 2",
    ),
    "planner after the gate, zero 3": (
        "MeshConfig.expert = 8", "PlannerConfig.name = 'fastermoe'", "train.zero_stage = 3",
    ),
    "halves, written out": (
        "MeshConfig.expert = 4", "MeshConfig.data = 2", "PlannerConfig.name = 'pro_prophet'", "train.batch_size = 16",
        "ModelConfig.overlap = 'halves'", "ModelConfig.stack = 'unrolled'",
    ),
    "model parallel, shards, microbatches": (
        "MeshConfig.expert = 4", "MeshConfig.expert_shard = 2", "MeshConfig.model = 2",
        "ModelConfig.sequence_parallel = True", "train.grad_accum_steps = 2",
    ),
    "experts split over data": ("MeshConfig.expert = 2", "MeshConfig.data = 4", "train.expert_zero_stage = 3"),
}  # fmt: skip


@pytest.fixture
def float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def losses_of(folder, devices, *changes):
    stepper = build_stepper(config_of(folder, *WIDE, *changes), jax.devices()[:devices])
    before = jax.tree.map(np.asarray, base_of(stepper.state["params"]))
    losses = [record["loss"] for record in stepper.run(4)]
    if devices == 1:
        jax.tree.map(np.testing.assert_array_equal, base_of(stepper.state["params"]), before)
    return np.array(losses)


@pytest.mark.parametrize("case", slow_but(MESHES, next(iter(MESHES))))
def test_eight_devices_are_one(case, tmp_path, float64):
    batch = [change for change in MESHES[case] if "batch_size" in change or "accum" in change]
    wanted = losses_of(tmp_path, 1, *batch)
    np.testing.assert_allclose(losses_of(tmp_path, 8, *MESHES[case]), wanted, rtol=1e-10)
    assert wanted[3] < wanted[0] - 1e-2


HALF, ADAPTED = "ModelConfig.dtype = 'bfloat16'", ("LoraConfig.rank = 2", "train.learning_rate = 0.05")
EIGHT = "MeshConfig.expert = 8"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A model in bfloat16, and a run of adapters for it, with a planner."""
    folder = tmp_path_factory.mktemp("runs")
    assert run_here(folder, folder / "model", HALF, EIGHT, "train.steps = 3")
    assert run_here(folder, folder / "whole", HALF, *ADAPTED, EIGHT, PLANNED, init_from=str(folder / "model"))
    return folder


PLANNED = "PlannerConfig.name = 'hecate'"


@pytest.mark.slow
def test_a_resumed_run_is_the_same(runs, capsys):
    """The base is found where it was; checkpoints hold its hash, and no array of it."""
    for steps in (3, 6):
        more = {"init_from": str(runs / "model")} if steps == 3 else {}
        assert run_here(runs, runs / "parts", HALF, *ADAPTED, EIGHT, PLANNED, f"train.steps = {steps}", **more)
    assert_same_run(runs / "whole", runs / "parts", 6)
    held = arrays_of(runs / "whole", 6)
    of_params = [name for name in held if name.startswith("params/")]
    assert of_params and all(is_adapter(name) for name in of_params)
    moments = [name for name in held if name.startswith("opt_state/") and held[name].ndim]
    assert len(moments) == 2 * len(of_params) and all(is_adapter(name) for name in moments)
    base = Checkpointer(runs / "whole" / "checkpoints", keep=1).read_host(6)["base"]
    assert base == {
        "folder": str(runs / "model"), "step": 3,
        "parameters": Checkpointer(runs / "model" / "checkpoints", keep=1).digest(3),
    }  # fmt: skip
    losses = [record["loss"] for record in read_metrics(runs / "whole")]
    assert losses[-1] < losses[0]
    capsys.readouterr()
    evaluate_here(runs, runs / "whole", HALF, *ADAPTED, EIGHT)
    shown = json.loads((runs / "whole" / "evaluations.jsonl").read_text().splitlines()[-1])["held_out_loss"]
    assert f"held-out loss {shown:.4f}" in capsys.readouterr().out


def test_it_generates_with_its_adapters(runs):
    """As the merged weights say, whose rank is 2, and not as the model under them."""
    one = {"devices": jax.devices()[:1], "bindings": ["MeshConfig.expert = 1"]}
    generators = [load(runs / name, **one) for name in ("model", "whole")]
    before, after = (flatten(generator.params) for generator in generators)
    assert before.keys() == after.keys()
    held, home = arrays_of(runs / "whole", 6), "bank/segment_0/w_in"
    a, b = (held[f"params/{home}_lora_{letter}"] for letter in "ab")  # [L, E, ...]
    wanted = np.asarray(before[home], np.float32) + (8.0 * a @ b).reshape(before[home].shape)
    np.testing.assert_allclose(np.asarray(after[home], np.float32), wanted, rtol=2**-8, atol=1e-6)
    same = {name for name in after if np.array_equal(*(np.asarray(of[name], np.float32) for of in (before, after)))}
    assert {name.rsplit("/", 1)[1] for name in after.keys() - same} == {"qkv", "out", "w_in", "w_out"}


def test_what_cannot_be_is_one_line(runs, tmp_path, monkeypatch):
    ours = {"init_from": str(runs / "model")}
    for workdir, start, changes, words in (
        (tmp_path / "a", {}, ADAPTED, r"LoraConfig.rank \(2\) adapts a model .* --init_from=DIR"),
        (tmp_path / "a", ours, ("LoraConfig.rank = 17",), r"LoraConfig.rank \(17\) is above the dims of .* lower it"),
        (tmp_path / "a", ours, (*ADAPTED, "LoraConfig.targets = ('attention/q',)"), "'attention/q' matches nothing"),
        (tmp_path / "a", ours, (*ADAPTED, "train.ema_decay = 0.9"), "keeps an average of a whole model"),
        (tmp_path / "a", {**ours, "init_from_ema": True}, ADAPTED, "--init_from_ema cannot be with LoraConfig.rank"),
        (tmp_path / "a", {"init_from": str(runs / "whole")}, (), "holds adapters of .* and no model"),
        (runs / "whole", ours, (*ADAPTED, "train.steps = 7"), "is not the model that these adapters are for"),
    ):
        if workdir == runs / "whole":  # as if the folder held another model
            monkeypatch.setattr(Checkpointer, "digest", lambda *_: "0" * 64)
        with pytest.raises(UserError, match=words) as error:
            run_here(runs, workdir, HALF, EIGHT, *changes, **start)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="LoraConfig.rank .* must be at least 1, or 0"):
        LoraConfig(rank=-1)
    for name, arguments, words in (
        ("train", ("--eval_only", "--init_from=model"), "--eval_only evaluates the folder that --workdir names"),
        ("convert", ("--to_peft=x", "--dtype=float16"), "--dtype=float16 needs --to_hf"),
    ):
        with pytest.raises(UserError, match=words):
            run_command_here(name, "--workdir=x", *arguments)
