"""The real thing: models of transformers with random weights, converted and back. Needs torch and transformers.

Slow: bash scripts/test.sh -m slow runs it where both are installed.
"""

import json

import numpy as np
import pytest

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from huggingface.random_models import TOKENS, build, compare_with, loss_and_gradients, numbers, save  # noqa: E402

from moe_jax.inference.conversion import (  # noqa: E402
    TensorFolder,  # noqa: E402
    Upcycling,
    export_folder,
    import_folder,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# family, what differs, dtype of the files, bytes of one file
CASES = {
    "mixtral_1": ("mixtral", {"num_key_value_heads": 1, "tie_word_embeddings": True}, "float32", "20KB"),
    "mixtral_2": ("mixtral", {"head_dim": 8, "rope_theta": 1e6}, "bfloat16", "1GB"),
    "olmoe_all": ("olmoe", {"attention_bias": True}, "float32", "20KB"),
    "qwen3_1": ("qwen3_moe", {"num_key_value_heads": 1, "norm_topk_prob": True}, "bfloat16", "1GB"),
    "qwen3_2": ("qwen3_moe", {"tie_word_embeddings": True, "decoder_sparse_step": 2}, "float32", "20KB"),
    "qwen3_all": (
        "qwen3_moe",
        {"num_key_value_heads": 4, "num_hidden_layers": 4, "mlp_only_layers": [0, 2, 3], "attention_bias": True},
        "float32",
        "1GB",
    ),
    "dots1_all": ("dots1", {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}, "float32", "1GB"),  # noqa: E501
    "deepseek": ("deepseek", {}, "bfloat16", "1GB"),
    "linear_positions": ("mixtral", {"rope_extra": {"rope_type": "linear", "factor": 2.0}}, "float32", "1GB"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_transformers(name, tmp_path):
    family, changes, dtype, shard = CASES[name]
    keys, model = build(family, changes)
    source, back = tmp_path / "source", tmp_path / "back"
    save(keys, model, source, dtype, shard)
    run = import_folder(source, tmp_path / "run")
    theirs = numbers(model, json.loads((source / "config.json").read_text()))
    worst = compare_with({"tokens": TOKENS, **theirs}, run, tmp_path / "run", source)
    print(f"{name}: gradients {worst:.1e} of their norm apart")

    export_folder(tmp_path / "run", back)
    before, after = TensorFolder(source), TensorFolder(back)
    assert before.names == after.names
    for tensor in before.names:
        a, b = before.read(tensor), after.read(tensor)
        assert a.dtype == b.dtype or tensor.endswith("correction_bias")  # which is written in float32
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
    again = import_folder(back, tmp_path / "again")
    assert (again.model, again.moe) == (run.model, run.moe)
    if family == "deepseek":  # transformers has no class that reads it
        return
    read = transformers.AutoModelForCausalLM.from_pretrained(
        back, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        np.testing.assert_array_equal(read(torch.tensor(TOKENS)).logits.numpy(), theirs["logits"])


def test_an_upcycled_model_starts_where_the_dense_one_stood(tmp_path):
    for name, extra in (("Llama", {}), ("Qwen3", {"head_dim": 6})):
        config = getattr(transformers, f"{name}Config")(
            vocab_size=40, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, **extra,
        )  # fmt: skip
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for leaf in model.parameters():
                leaf.copy_(0.2 * torch.randn(leaf.shape) + (leaf.ndim == 1))
            want = model(torch.tensor(TOKENS)).logits
            loss = torch.nn.functional.cross_entropy(want[:, :-1].flatten(0, 1), torch.tensor(TOKENS[:, 1:]).flatten())
        model.save_pretrained(tmp_path / name)
        run = import_folder(tmp_path / name, tmp_path / f"{name}_run", Upcycling(experts=4))
        assert abs(loss_and_gradients(run, tmp_path / f"{name}_run", TOKENS)[0] - float(loss)) < 1e-5
        export_folder(tmp_path / f"{name}_run", tmp_path / f"{name}_back")
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}_back", dtype=torch.float32)
        with torch.no_grad():
            assert torch.max(torch.abs(read(torch.tensor(TOKENS)).logits - want)) < 1e-5
