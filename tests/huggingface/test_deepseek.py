"""DeepSeek's family, by the keys that its files have: V2-Lite, V2, V3, and Moonlight and Kimi K2, which share V3's.

Sizes are shrunk, every other key is as published. float8 tensors, tensors of farther tokens, and what is refused.
That numbers are those of transformers is for `test_golden.py`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface.random_models import places_of

from moe_jax.errors import UserError
from moe_jax.inference.conversion import TensorFolder, export_folder, import_folder, write_tensors
from moe_jax.inference.families import read_config, write_config
from moe_jax.models.counts import parameter_counts
from moe_jax.storage.checkpoint import Checkpointer

V3_FOLDER = Path(__file__).parent / "golden" / "deepseek_v3"
YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
V2_LITE = {
    "model_type": "deepseek_v2", "attention_bias": False, "aux_loss_alpha": 0.001, "bos_token_id": 100000,
    "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "rope_scaling": YARN, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
    "vocab_size": 102400,
}  # fmt: skip
V2 = {
    **V2_LITE, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "n_routed_experts": 160,
    "routed_scaling_factor": 16.0, "q_lora_rank": 1536, "num_hidden_layers": 60, "hidden_size": 5120,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
}  # fmt: skip
V3 = {
    **V2_LITE, "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "q_lora_rank": 1536, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_key_value_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
    "ep_size": 1, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "vocab_size": 129280,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
MOONLIGHT = {
    **V3, "n_group": 1, "topk_group": 1, "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "q_lora_rank": None, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 50000.0, "num_nextn_predict_layers": 0,
    "vocab_size": 163840, "routed_scaling_factor": 2.446, "quantization_config": None,
}  # fmt: skip
KIMI_K2 = {
    **V3, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
    "num_key_value_heads": 64, "first_k_dense_replace": 1, "vocab_size": 163840, "routed_scaling_factor": 2.827,
    "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
PUBLISHED = {  # keys, what the family says of the model, parameters in billions, as published
    "v2_lite": (V2_LITE, {"router": "topk", "expert_groups": 0, "renormalize": False}, 15.7),
    "v2": (V2, {"router": "topk", "expert_groups": 8, "kept_groups": 3, "routed_scale": 16.0}, 236),
    "v3": (V3, {"router": "sigmoid_bias", "expert_groups": 8, "kept_groups": 4, "renormalize": True}, 671),
    "moonlight": (MOONLIGHT, {"router": "sigmoid_bias", "expert_groups": 0, "shared_experts": 2}, 16),
    "kimi_k2": (KIMI_K2, {"router": "sigmoid_bias", "num_experts": 384}, 1026),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_keys_are_read_and_written(name):
    keys, wanted, billions = PUBLISHED[name]
    family, model, moe = read_config(keys)
    assert {field: getattr(moe, field) for field in wanted} == wanted
    assert (model.head_size, model.value_size, model.first_dense) == (192, 128, keys["first_k_dense_replace"])
    count, *_ = parameter_counts(model, moe, model.vocab_size)
    assert count / 1e9 == pytest.approx(billions, rel=0.01)
    assert read_config(write_config(family, model, moe)) == (family, model, moe)
    # DeepSeek adds the loss of each layer, over sequences by themselves, or over the batch
    for alpha, apart in ((0.001, True), (0.001, False), (0.0, True)):
        family, model, changed = read_config({**keys, "aux_loss_alpha": alpha, "seq_aux": apart})
        assert (changed.aux_loss_weight, changed.balance_over) == (alpha, "sequence" if apart else "batch")
        written = write_config(family, model, changed)
        assert (written["aux_loss_alpha"], written["seq_aux"]) == (alpha, apart)
        assert "router_aux_loss_coef" not in written
    # as transformers 5 writes the same, with sizes that follow from others
    rope = {"rope_theta": keys["rope_theta"], **(keys["rope_scaling"] or {"rope_type": "default"})}
    newer = {key: value for key, value in keys.items() if key not in ("rope_theta", "rope_scaling")}
    assert read_config({**newer, "rope_parameters": rope, "head_dim": 64, "qk_head_dim": 192})[1:] == (model, moe)


def quantised(tensors, rows, columns):
    """Return matrices in float8 with a scale for each block of so many rows and columns, as DeepSeek's files are."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or "proj" not in name:
            found[name] = tensor
            continue
        scale = np.zeros([-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)], np.float32)
        small = np.zeros(tensor.shape, "float8_e4m3fn")
        for i, j in np.ndindex(*scale.shape):
            block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale[i, j] = np.abs(tensor[block].astype(np.float32)).max() / 448
            small[block] = (tensor[block].astype(np.float32) / scale[i, j]).astype(small.dtype)
        found |= {name: small, f"{name}_scale_inv": scale}
    return found


def float8_folder(folder, change=lambda tensors: None, **keys):
    """Write the golden V3 in float8, with a layer that predicts farther tokens, and `change` of its tensors."""
    folder.mkdir()
    config = json.loads((V3_FOLDER / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [5, 4]}
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    source = TensorFolder(V3_FOLDER)
    tensors = quantised({name: source.read(name) for name in sorted(source.names)}, 5, 4)
    tensors |= {"model.layers.2.enorm.weight": np.ones(16, np.float32)}
    change(tensors)
    write_tensors(folder, tensors.items())
    return tensors


def test_float8_is_read_and_farther_tokens_are_skipped(tmp_path, caplog):
    """Every matrix is its float8 numbers times the scales of their blocks, of which the last ones are not whole."""
    tensors = float8_folder(tmp_path / "source")
    run = import_folder(tmp_path / "source", tmp_path / "run")
    assert "1 tensors predict tokens farther ahead and are skipped: model.layers.2.enorm.weight" in caplog.text
    leaves = Checkpointer(tmp_path / "run" / "checkpoints", keep=1).read_arrays(0)
    checked = 0
    for place in places_of(json.loads((tmp_path / "source" / "config.json").read_text())):
        got, tensor = place.to_tensor(leaves[place.leaf][place.index]), tensors[place.name].astype(np.float32)
        if (scale := tensors.get(f"{place.name}_scale_inv")) is not None:
            blocks = np.kron(scale, np.ones((5, 4), np.float32))[: tensor.shape[0], : tensor.shape[1]]
            tensor, checked = tensor * blocks, checked + 1
        np.testing.assert_array_equal(got, tensor, err_msg=place.name)
    assert checked > 30
    export_folder(tmp_path / "run", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert import_folder(tmp_path / "back", tmp_path / "again") == run


@pytest.mark.parametrize(
    ("change", "keys", "words"),
    [
        (lambda t: t.pop(f"{Q}_scale_inv"), {}, "is F8_E4M3 and has no {Q}_scale_inv; copy the folder again"),
        (lambda t: t.update({f"{Q}_scale_inv": np.ones((2, 2), np.float32)}), {}, "is [2, 2], which are not the bl"),
        (lambda t: None, {"quantization_config": None}, "is F8_E4M3, and moe_jax reads F32"),
        (lambda t: None, {"num_nextn_predict_layers": 0}, "tensor model.layers.2.enorm.weight is unknown"),
    ],
)
def test_float8_that_is_not_whole_is_one_line(change, keys, words, tmp_path):
    float8_folder(tmp_path / "source", change, **keys)
    with pytest.raises(UserError) as error:
        import_folder(tmp_path / "source", tmp_path / "run")
    assert words.format(Q=Q) in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


Q = "model.layers.1.self_attn.q_b_proj.weight"
