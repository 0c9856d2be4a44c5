"""Small transformers models with random weights, their files, and their numbers; and the golden files of the suite.

    python tests/huggingface/random_models.py [NAME ...]    writes tests/huggingface/golden/ with torch and transformers

Inputs: names of `GOLDEN`, or a family and sizes. Outputs: folders as `save_pretrained` writes them, with golden.npz:
tokens, logits, loss and the gradient of every tensor, computed by transformers in float32. `compare_with` holds the
real model on one device, with the parameters of a run folder, against them.

DeepSeek-MoE is not in transformers. Its golden folder was written in the same way by DeepseekOcr2TextModel with a
linear head, which is the same mathematics; its experts' tensors were cut to one each, as DeepSeek's files have them.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np

from moe_jax.inference.families import EXPERT_KEYS, LATENT_KEYS, REQUIRED, read_config
from moe_jax.inference.tensor_places import file_shapes, tensor_places
from moe_jax.models import Batch, LanguageModel, make_loss
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.storage.checkpoint import Checkpointer

HERE = Path(__file__).parent
CLASSES = HERE / "class_defaults.json"
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_experts_per_tok": 2, "rope_theta": 500.0,
}  # fmt: skip
LATENT = {"kv_lora_rank": 6, "q_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 3}
# a text of 64 tokens: of the four pairs the first keeps its speed, the second is half slowed down
YARN = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}
OWN = {
    "mixtral": {"intermediate_size": 8, "num_local_experts": 4},
    # a padding id, which this family has by default, would keep the gradient of its row of the token table at 0
    "olmoe": {
        "intermediate_size": 8, "num_experts": 4, "num_key_value_heads": 4, "pad_token_id": None, "eos_token_id": 2,
    },
    "qwen3_moe": {"intermediate_size": 12, "moe_intermediate_size": 8, "num_experts": 4, "head_dim": 6},
    "dots1": {
        "intermediate_size": 12, "moe_intermediate_size": 8, "n_routed_experts": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v2": {
        "intermediate_size": 12, "moe_intermediate_size": 8, "n_routed_experts": 8, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, **LATENT,
        "rope_extra": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        "intermediate_size": 12, "moe_intermediate_size": 8, "n_routed_experts": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, **LATENT,
        "rope_extra": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}  # fmt: skip
# name -> (family, changes, dtype of the files, bytes of one file)
GOLDEN = {
    "mixtral_one_key_head_sharded": ("mixtral", {"num_key_value_heads": 1}, "bfloat16", "8KB"),
    "olmoe": ("olmoe", {}, "float32", "1GB"),
    # experts in layer 3 alone
    "qwen3_moe_tied": ("qwen3_moe", {"tie_word_embeddings": True, "num_hidden_layers": 4, "decoder_sparse_step": 2,
                                     "mlp_only_layers": [1], "attention_bias": True, "norm_topk_prob": True,
                                     "rope_extra": {"rope_type": "linear", "factor": 2.0}}, "bfloat16", "1GB"),
    "dots1": ("dots1", {}, "float32", "1GB"),
    "deepseek_v2_lite": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}, "float32", "1GB"),
    "deepseek_v3": ("deepseek_v3", {}, "float32", "1GB"),
}  # fmt: skip
TOKENS = np.random.default_rng(5).integers(0, 40, (2, 9))


def build(family, changes):
    """Return a model in float32, in transformers' own shape of the family."""
    import torch
    import transformers

    sizes = {**SIZES, **OWN[family], **changes}
    rope = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta"), **sizes.pop("rope_extra", {})}
    torch.manual_seed(0)
    name = "".join(part.capitalize() for part in family.split("_"))
    config = getattr(transformers, f"{name}Config")(rope_parameters=rope, **sizes)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for name, leaf in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            normal = torch.randn(leaf.shape)
            leaf.copy_(0.2 * normal if leaf.ndim > 1 else 0.1 * normal if "bias" in name else 1 + 0.2 * normal)
    return model.eval()


def class_defaults():
    """Return {model type: {key: value}} of what absent keys of a config.json mean to transformers, without sizes."""
    import transformers

    sizes = (*REQUIRED, *EXPERT_KEYS, *LATENT_KEYS, "moe_intermediate_size", "rope_parameters")
    every, found = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}, {}
    for name in ("Mixtral", "Olmoe", "Qwen3Moe", "Dots1", "DeepseekV2", "DeepseekV3", "Llama", "Mistral", "Qwen3"):
        kind = getattr(transformers, f"{name}Config")
        fields = [field for field in dataclasses.fields(kind) if field.name not in every]
        keys = {kind.attribute_map.get(field.name, field.name): field.default for field in fields}
        keys = {key: value for key, value in keys.items() if key not in sizes}
        epsilon, theta = kind().rms_norm_eps, kind().rope_parameters["rope_theta"]
        found[kind.model_type] = keys | {"rms_norm_eps": epsilon, "rope_theta": theta}
    return found


def places_of(keys):
    return tensor_places(*read_config(keys))


def by_place(places, arrays):
    """Return {name in the files: array} from {name in memory: array}, where experts of a layer are one tensor."""
    found = {}
    for place in places:
        alone = place.name.replace(".block_sparse_moe.", ".mlp.")
        if alone in arrays:
            found[place.name] = arrays[alone]
            continue
        name, expert, half = place.fused
        rows = place.shape[0]
        found[place.name] = arrays[name][expert][slice(None) if half is None else slice(half * rows, (half + 1) * rows)]
    return found


def save(model, folder, dtype, shard):
    """Write the folder of a model, whose weights are rounded to `dtype` before."""
    import torch

    frequencies = {name: leaf.clone() for name, leaf in model.named_buffers() if "inv_freq" in name}
    model.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard)
    model.float()
    for name, leaf in model.named_buffers():  # transformers never rounds these
        if name in frequencies:
            leaf.copy_(frequencies[name])


def numbers(model, keys):
    """Return {'logits', 'loss', 'gradient NAME'} of a model in float32, NAME as in the files."""
    import torch

    model.zero_grad()
    ids = torch.tensor(TOKENS)
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    grads = {name: leaf.grad for name, leaf in model.named_parameters() if leaf.grad is not None}
    # a buffer has no gradient, and an expert that no token takes has none either
    for name, leaf in model.state_dict().items():
        grads.setdefault(name, torch.zeros_like(leaf))
    found = {f"gradient {name}": leaf.numpy() for name, leaf in by_place(places_of(keys), grads).items()}
    return {"logits": logits.detach().numpy(), "loss": loss.detach().numpy(), **found}


def compare_with(golden, run, folder, source):
    """Assert that the loss and, relative to its norm, each gradient of a run folder are the golden ones, in float32.

    Args:
      golden: {'tokens' int [B, Sq + 1], 'loss', 'gradient NAME'}, NAME as in the files of the folder `source`.
      run: the config of the run folder `folder`.
    """
    config = dataclasses.replace(run.model, dtype="float32", attention="blocks")
    moe = dataclasses.replace(run.moe, aux_loss_weight=0.0)
    roles = build_mesh(MeshConfig(), jax.devices()[:1])
    model = LanguageModel(config=config, moe=moe, vocab_size=config.vocab_size, roles=roles)
    arrays, params = Checkpointer(folder / "checkpoints", keep=1).read_arrays(0), {}
    for name, array in arrays.items():
        *keys, last = name.split("/")[1:]
        place = params
        for key in keys:
            place = place.setdefault(key, {})
        # on one device the bank's rows are [L E, ...]
        place[last] = array.reshape(-1, *array.shape[2:]) if keys[0] == "bank" else array
    tables = model.even_tables()
    tokens = np.asarray(golden["tokens"], np.int32)
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    loss = make_loss(model, model.layout(), rows, length)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((rows, length), np.float32))
    rest = tables, None, np.int32(0), np.float32(rows * length)
    value, found = jax.jit(jax.value_and_grad(lambda *a: loss(*a)[0]))(params, batch, *rest)
    assert abs(value - golden["loss"]) < 1e-6
    grads = {}
    for path, leaf in jax.tree.leaves_with_path(found):
        name = "/".join(("params", *(entry.key for entry in path)))
        grads[name] = np.asarray(leaf).reshape(arrays[name].shape)
    assert {name: leaf.shape for name, leaf in grads.items()} == file_shapes(config, moe)
    for place in places_of(json.loads((source / "config.json").read_text())):
        got, want = place.to_tensor(grads[place.leaf][place.index]), golden[f"gradient {place.name}"]
        norm = np.linalg.norm(want)
        assert np.linalg.norm(got - want) <= 1e-5 * norm, place.name  # of an expert that no token takes both are 0


def main():
    lines = [f"{json.dumps(name)}: {json.dumps(keys, sort_keys=True)}" for name, keys in class_defaults().items()]
    CLASSES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name in sys.argv[1:] or GOLDEN:
        family, changes, dtype, shard = GOLDEN[name]
        folder = HERE / "golden" / name
        folder.mkdir(parents=True, exist_ok=True)
        model = build(family, changes)
        save(model, folder, dtype, shard)
        found = numbers(model, json.loads((folder / "config.json").read_text()))
        np.savez_compressed(folder / "golden.npz", tokens=TOKENS, **found)
        print(name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


if __name__ == "__main__":
    sys.exit(main())
