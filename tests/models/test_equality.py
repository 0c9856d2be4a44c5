"""Loss and every gradient of the real model on every mesh equal the one-device reference.

float64, 1e-10 of the largest reference entry of each leaf. Few cases, that together meet one device and several, every
mesh and ZeRO stage, capacities and overflow, every schedule, model-parallel groups whole and split over tokens, shared
experts, and the parts of which published models are made: RMSNorm, no biases, grouped-query attention, heads of their
own size, norms of queries and keys, rotary base and factor, an output head of its own, SwiGLU, latent attention.
"""

import jax
import numpy as np
import pytest
from support.equality_cases import assert_equal, model_config, moe_config
from support.marks import slow_but

MP2_ESP2 = {"expert": 4, "expert_shard": 2, "model": 2}
DP8 = {"data": 8, "expert": 1}
SPLIT = {"sequence_parallel": True}
UNROLLED = {"stack": "unrolled"}
ROOMY = {"bucket_slack": 100.0}  # one pass, which compiles faster
RESIDUAL = {"shared_experts": 1, "top_k": 1, "renormalize": False, "residual": "learned"}
PUBLISHED = {
    "norm": "rms", "norm_epsilon": 1e-6, "attention_bias": False, "ffn_bias": False, "activation": "swiglu",
    "positions": "rotary", "tied_head": False,
}  # fmt: skip
# latents of keys and values; of queries too, with biases and YaRN
LATENT = {**PUBLISHED, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "head_dim": 10, "v_head_dim": 5}
V3 = {
    **LATENT, "q_lora_rank": 7, "attention_bias": True, "rotary_factor": 40.0, "rotary_base": 500.0,
    "rotary_yarn": (16, 8, 1, 0.7, 1.0),
}  # fmt: skip
# mesh, ZeRO stage, what differs of the layer, of the model
CASES = {
    "ep4_one_hot": ({"expert": 4}, 0, {}, {}),
    "dp8_stage0": (DP8, 0, {"schedule": "dp"}, {}),
    "dp8_stage3_one_hot": (DP8, 3, {"schedule": "dp"}, {}),
    "capacity_position": ({"expert": 4}, 1, {"capacity_factor": 1.0, "min_capacity": 1}, {}),
    "capacity_probability_one_hot": (
        {"data": 2, "expert": 2}, 1, {"capacity_factor": 1.0, "min_capacity": 2, "drop": "probability"}, {},
    ),
    "pairs_swiglu_rotary_data2": (
        {"data": 2, "expert": 2}, 3, {"bucket_slack": 0.5},
        {"layers": 4, "moe_every": 2, "activation": "swiglu", "positions": "rotary"},
    ),
    "bert_remat_block_data2": ({"data": 2, "expert": 2}, 3, {"bucket_slack": 0.5}, {"kind": "bert", "remat": "block"}),
    "deepspeed_mp2_esp4": ({"expert": 2, "expert_shard": 4, "model": 2}, 1, {"bucket_slack": 0.8}, {}),
    "s2_mp4_data2": (
        {"data": 2, "expert": 4, "model": 4}, 1, {"schedule": "s2", "bucket_slack": 0.8}, {"remat": "dots"},
    ),
    "s1_mp4_split_pairs_zero3": (
        {"expert": 4, "expert_shard": 2, "model": 4}, 3, {"schedule": "s1", **ROOMY},
        {**SPLIT, "moe_every": 2, "remat": "block", "activation": "swiglu", "positions": "rotary"},
    ),
    "deepspeed_mp4_split": ({"data": 2, "expert": 4, "model": 4}, 3, ROOMY, {**SPLIT, "moe_every": 2}),
    "shared_s1_one_device": (
        {}, 1, {"schedule": "s1", "shared_experts": 2, "shared_hidden_dim": 10}, {"activation": "swiglu"},
    ),
    "residual_hecate_s1_mp2_esp2": (
        MP2_ESP2, 3, {"schedule": "s1", **RESIDUAL, **ROOMY}, {"prefetch": "hecate", "remat": "block"},
    ),
    "residual_pairwise": ({"expert": 8}, 1, {"schedule": "pairwise", **RESIDUAL, **ROOMY}, {}),
    "shared_ring_mp2": (
        {"expert": 8, "model": 2}, 1, {"schedule": "ring", "shared_experts": 1}, {"stack": "unrolled", "layers": 1},
    ),
    "qwen3_mp2_split_zero3_pairs": (
        MP2_ESP2, 3, {"schedule": "s1", **ROOMY},
        {**PUBLISHED, "kv_heads": 2, "head_dim": 6, "qk_norm": "head", "moe_every": 2, **SPLIT},
    ),
    "olmoe_mp4_hecate": (
        {"expert": 4, "expert_shard": 2, "model": 4}, 1, {"schedule": "s1", "renormalize": False, **ROOMY},
        {**PUBLISHED, "qk_norm": "width", "prefetch": "hecate", "remat": "block"},
    ),
    "latent_mp2_split_zero3_pairs": (
        MP2_ESP2, 3, {"schedule": "s1", "shared_experts": 1, **ROOMY},
        {**V3, **SPLIT, "moe_every": 2, "remat": "block"},
    ),
    "latent_hecate_first_dense": ({"expert": 8}, 1, ROOMY, {**LATENT, "prefetch": "hecate", "first_dense": 1}),
}  # fmt: skip
# experts split over `data` (their stage is the number), and tokens that move
CASES |= {
    "stage3_latent_halves": ({"data": 2, "expert": 2}, 1, ROOMY, {"overlap": "halves", **LATENT, "layers": 1}),
    "stage3_halves_unrolled": ({"data": 2, "expert": 2}, 1, {"bucket_slack": 0.5}, {"overlap": "halves", **UNROLLED}),
    "stage3_esp2_remat": ({"data": 2, "expert": 2, "expert_shard": 2}, 3, {"bucket_slack": 0.5}, {"remat": "block"}),
    "stage2_hecate_unrolled": ({"data": 2, "expert": 4}, 1, ROOMY, {"prefetch": "hecate", **UNROLLED}),
}  # fmt: skip
CASES |= {
    "mixtral_one_device": ({}, 1, {}, {**PUBLISHED, "kv_heads": 1, "rotary_base": 1e6, "layers": 1}),
    "width_mp2_split_biases": (
        {"data": 2, "expert": 4, "model": 2}, 3, {"schedule": "s2", "shared_experts": 1},
        {
            **PUBLISHED, **SPLIT, "kv_heads": 2, "qk_norm": "width", "attention_bias": True, "tied_head": True,
            "norm": "layer", "rotary_factor": 4.0, "remat": "dots", "kind": "bert",
        },
    ),
    "deepspeed_mp2_esp4_split": ({"expert": 2, "expert_shard": 4, "model": 2}, 1, {"bucket_slack": 0.5}, SPLIT),
    "pairwise_mp2_split": (MP2_ESP2, 1, {"schedule": "pairwise", "bucket_slack": 0.5}, SPLIT),
    "ring_mp4_split": (
        {"expert": 4, "expert_shard": 2, "model": 4}, 1, {"schedule": "ring", "bucket_slack": 0.5}, SPLIT,
    ),
    "parm_mp2_split": (MP2_ESP2, 1, {"schedule": "parm", "bucket_slack": 0.5}, {**SPLIT, "kind": "bert"}),
    "prefetch_mp4_split": (
        {"expert": 8, "model": 4}, 1, {"bucket_slack": 0.5}, {**SPLIT, "prefetch": "pro_prophet", "remat": "block"},
    ),
}  # fmt: skip
ALWAYS = (  # together they have every schedule but two that others stand for, every mesh, stage and part of a model
    "ep4_one_hot", "dp8_stage3_one_hot", "capacity_probability_one_hot", "bert_remat_block_data2",
    "deepspeed_mp2_esp4", "s2_mp4_data2", "s1_mp4_split_pairs_zero3", "residual_pairwise", "shared_ring_mp2",
    "qwen3_mp2_split_zero3_pairs", "latent_mp2_split_zero3_pairs", "stage3_latent_halves",
)  # fmt: skip


@pytest.mark.parametrize("case", slow_but(CASES, *ALWAYS))
def test_loss_and_gradients_equal_the_reference(case):
    mesh, zero, layer, model = CASES[case]
    routing = "one_hot" if "one_hot" in case else "zero" if "tokens" in case else "general"
    weighted = not case.startswith("ep")  # else every token is a target
    # of `dp` the experts have a stage of their own, here the same
    stages = (1 if zero == 2 else zero, zero) if layer.get("schedule") == "dp" else (zero, 1)
    stages = (zero, int(case[len("stage")])) if case.startswith("stage") else stages
    with jax.enable_x64(True):
        config, moe = model_config(**model), moe_config(**layer)
        stats = assert_equal(case, config, moe, mesh, *stages, routing, weighted)
    if case == "ep4_one_hot":
        assert int(np.max(stats.passes)) > 1, "this case is here to overflow"
    if "capacity" in case:
        assert int(np.sum(stats.dropped)) > 0, "this case is here to drop"
