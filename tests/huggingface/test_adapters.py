"""Adapters as files: what is merged is what they say, and peft computes what we compute.

The latter needs torch, transformers and peft: bash scripts/test.sh --ecosystem tests/huggingface
"""

import contextlib
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from huggingface.random_models import build, save
from support.generation_cases import recorded_logits

from moe_jax.config.run_config import config_text
from moe_jax.errors import UserError
from moe_jax.inference import load
from moe_jax.inference.conversion import TensorFolder, export_folder, import_folder
from moe_jax.models.config import LoraConfig
from moe_jax.models.lora import is_adapter
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.replan.segments import build_model
from moe_jax.storage.checkpoint import Checkpointer

load_file = pytest.importorskip("safetensors.numpy").load_file
FOLDER = Path(__file__).parent / "golden"
SCALE = 6.0 / 2


def adapted(base, run, workdir, targets=("attention", "experts")) -> None:
    """Write a run folder with adapters of random numbers for the run folder `base`, whose config is `run`."""
    run = dataclasses.replace(run, lora=LoraConfig(rank=2, alpha=6.0, targets=targets))
    model = build_model(run, build_mesh(MeshConfig(), jax.devices()[:1]), run.model.vocab_size)
    rng, device = np.random.default_rng(3), jax.sharding.NamedSharding(model.roles.mesh, jax.sharding.PartitionSpec())

    def numbers(leaf):
        return jax.device_put(0.2 * rng.standard_normal(leaf.shape, np.float32), device)

    state = {"params": jax.tree.map(numbers, model.trained(model.shapes()))}
    with contextlib.closing(Checkpointer(base / "checkpoints", keep=1)) as held:
        identity = {"folder": str(base), "step": 0, "parameters": held.digest(0)}
    text = config_text(run)
    with contextlib.closing(Checkpointer(workdir / "checkpoints", keep=1)) as checkpoints:
        checkpoints.save(0, state, model.even_homes, {"config": text, "base": identity})
    (workdir / "config.gin").write_text(text)


def as_matrix(files: dict, module: str, experts: int = 0) -> np.ndarray:
    """Return what peft adds to a module's weight, from its files: scale B A, of each expert where there are some."""
    a, b = (files[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
    if not experts:
        return SCALE * b @ a
    a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
    return SCALE * np.einsum("ore,eri->eoi", b, a)


def logits_of(run, ids) -> np.ndarray:
    """Return our logits [*ids.shape, V] at every position of rows of ids."""
    generator = load(run, devices=jax.devices()[:1])
    logits = recorded_logits(generator)
    generator.generate([row[: i + 1].tolist() for row in ids for i in range(ids.shape[1])], 1)  # each prefix a prompt
    return logits[0][: ids.size].reshape(*ids.shape, -1)  # without padded rows


@pytest.mark.parametrize("name", ["dots1", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_merged_tensors_are_what_the_adapter_says(name, tmp_path):
    run = import_folder(FOLDER / name, tmp_path / "base")
    targets = ("attention", "experts", "shared_experts/w_out", "feed_forward")
    adapted(tmp_path / "base", run, tmp_path / "run", targets)
    export_folder(tmp_path / "run", tmp_path / "peft", adapter=True)
    export_folder(tmp_path / "run", tmp_path / "merged")
    files = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    before, after = TensorFolder(FOLDER / name), TensorFolder(tmp_path / "merged")
    moved = {}
    for tensor in before.names:
        old, new = before.read(tensor), after.read(tensor)
        module = tensor.removesuffix(".weight")
        if ".mlp.experts." in tensor:
            layer, _, rest = module.partition(".mlp.experts.")
            expert, matrix = rest.split(".")
            where = f"{layer}.mlp.experts" + ("" if matrix == "down_proj" else ".base_layer")
            added = as_matrix(files, where, 8)[int(expert)]
            rows = {"gate_proj": slice(None, 8), "up_proj": slice(8, None), "down_proj": slice(None)}[matrix]
            added = added[rows]
        elif f"base_model.model.{module}.lora_A.weight" in files:
            added = as_matrix(files, module)
        else:
            np.testing.assert_array_equal(old, new, err_msg=tensor)
            continue
        assert np.linalg.norm(added) > 0.1
        np.testing.assert_allclose(new, old + added, rtol=0, atol=1e-6, err_msg=tensor)
        moved[module.rsplit(".", 1)[1]] = module
    own = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"} if name == "deepseek_v3" else set("qkv")
    own = own if name == "deepseek_v3" else {f"{letter}_proj" for letter in own}
    assert moved.keys() == own | {"o_proj", "gate_proj", "up_proj", "down_proj"}
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"mlp.experts.gate_up_proj": 4} and (config["r"], config["lora_alpha"]) == (2, 6.0)
    with pytest.raises(UserError, match="holds a whole model and no adapters"):
        export_folder(tmp_path / "base", tmp_path / "none", adapter=True)


# peft says that it ignores a rank of `target_parameters`, and heeds it
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys", "ignore:`is_gradient_checkpointing`")
@pytest.mark.ecosystem
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "olmoe", "dots1", "deepseek_v2", "deepseek_v3", "one half"])
def test_logits_are_those_of_peft(case, tmp_path):
    """In float32, of the adapter in peft and of the merged folder in transformers, within 1e-5 of ours."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    family = "qwen3_moe" if case == "one half" else case
    model, ids = build(family, {}), np.random.default_rng(0).integers(0, 40, (2, 16))
    save(model, tmp_path / "saved", "float32", "1GB")
    run = import_folder(tmp_path / "saved", tmp_path / "base")
    targets = ("attention", "experts/w_in") if case == "one half" else ("attention", "experts")
    adapted(tmp_path / "base", run, tmp_path / "run", targets)
    ours = logits_of(tmp_path / "run", ids)
    export_folder(tmp_path / "run", tmp_path / "peft", adapter=True)
    export_folder(tmp_path / "run", tmp_path / "merged")
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **how).eval()
    found = {}
    with torch.no_grad():
        alone = before(torch.tensor(ids)).logits.numpy()
        found["peft"] = peft.PeftModel.from_pretrained(before, str(tmp_path / "peft")).eval()
        found["merged"] = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **how).eval()
        found = {name: one(torch.tensor(ids)).logits.numpy() for name, one in found.items()}
    assert np.abs(alone - ours).max() > 0.1
    for name, its in found.items():
        np.testing.assert_allclose(its, ours, rtol=0, atol=1e-5, err_msg=name)
    assert not any(is_adapter(name) for name in TensorFolder(tmp_path / "merged").names)
