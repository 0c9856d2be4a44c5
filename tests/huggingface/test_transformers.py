"""The real transformers, where it is installed with torch: what it saves is read, and what is written it loads.

    bash scripts/test.sh --ecosystem tests/huggingface

Random weights in float32; logits of every position within 1e-5, both ways. The suite itself holds golden files instead.
"""

import json

import jax
import numpy as np
import pytest
from huggingface.random_models import CLASSES, YARN, build, class_defaults, save
from support.generation_cases import recorded_logits

from moe_jax.inference import load
from moe_jax.inference.conversion import export_folder, import_folder

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
ONE = {"n_group": 1, "topk_group": 1}
CASES = {
    "mixtral": {}, "olmoe": {}, "qwen3_moe": {}, "dots1": {},
    "deepseek_v2": {
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0,
        "attention_bias": True,
    },
    "deepseek_v2 lite": {"q_lora_rank": None},
    "deepseek_v3": {},
    "deepseek_v3 yarn without mscale": {"rope_extra": {**YARN, "factor": 8.0}},
    "deepseek_v3 moonlight": {**ONE, "q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_extra": {}},
    "deepseek_v3 kimi": {
        **ONE, "n_routed_experts": 12, "rope_extra": {**YARN, "beta_fast": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}  # fmt: skip


@pytest.mark.ecosystem
def test_absent_keys_mean_what_the_file_of_the_suite_says():
    assert class_defaults() == json.loads(CLASSES.read_text())


@pytest.mark.ecosystem
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_same_both_ways(case, tmp_path):
    family, *_ = case.split(" ")
    model, ids = build(family, CASES[case]), np.random.default_rng(0).integers(0, 40, (2, 16))
    save(model, tmp_path / "saved", "float32", "1GB")

    def logits_of(model):
        with torch.no_grad():
            return model(torch.tensor(ids)).logits.numpy()

    want = logits_of(model)
    import_folder(tmp_path / "saved", tmp_path / "run")
    generator = load(tmp_path / "run", devices=jax.devices()[:1])
    logits = recorded_logits(generator)
    generator.generate([row[: i + 1].tolist() for row in ids for i in range(16)], 1)  # each prefix is a prompt
    np.testing.assert_allclose(logits[0].reshape(want.shape), want, rtol=0, atol=1e-5)
    export_folder(tmp_path / "run", tmp_path / "back")
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", **how).eval()
    assert type(back) is type(model)
    np.testing.assert_allclose(logits_of(back), want, rtol=0, atol=1e-5)
