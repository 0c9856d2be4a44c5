"""What is known of each kind of checkpoint: the keys of its config.json, and the names of its tensors. Tables alone.

A family is a `model_type` of transformers. A key of config.json is one of four things: it *means* a field of our
configs, it is read together with others (`config_keys.py` says how), it is harmless, or it must have one of a few
neutral values, at which it changes nothing; any other key is refused by its name.
Letters: docs/notation.md; n shared experts, i a layer, j an expert.
"""

from __future__ import annotations

import dataclasses
from typing import Any

MODEL_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "model_dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_length",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied_head",
    "attention_bias": "attention_bias",
}
REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok",
    "max_position_embeddings", "intermediate_size",
)  # fmt: skip
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")  # all mean E; the first that is there counts
# read together: rotary positions, dtype, which layers have experts
JOINT_KEYS = (
    *EXPERT_KEYS, "num_experts_per_tok", "intermediate_size", "moe_intermediate_size", "router_aux_loss_coef",
    "aux_loss_alpha", "rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype",
)  # fmt: skip
HARMLESS = (
    "architectures", "model_type", "transformers_version", "_name_or_path", "auto_map", "initializer_range",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "id2label", "label2id",
    "return_dict", "output_attentions", "output_hidden_states", "problem_type", "use_return_dict", "seq_aux",
    "experts_implementation", "attn_implementation", "_attn_implementation",
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "mlp_bias": (False, None),
    "clip_qkv": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "router_jitter_noise": (0, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
    "chunk_size_feed_forward": (0,),
    "quantization_config": (None,),
    "moe_layer_freq": (1,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of checkpoint.

    Attributes:
      model_type, architecture: as config.json has them.
      experts_key: the key of E that transformers reads.
      own_keys: further keys, read by `config_keys.py`, with the value that an absent one has.
      fixed: fields of ModelConfig and MoEConfig that every checkpoint of the family has.
      epsilon, rotary_base: where config.json says none.
      dense_blocks: whether blocks without experts may stand among the others; then moe_intermediate_size is F.
      gate, experts, shared: names of modules within a layer; {j} is an expert.
      matrices: names of the gate half, the up half and the matrix back of an expert.
      neutral: further keys with their neutral values.
    """

    model_type: str
    architecture: str
    experts_key: str
    own_keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    epsilon: float = 1e-6
    rotary_base: float = 10000.0
    dense_blocks: bool = True
    gate: str = "mlp.gate.weight"
    experts: str = "mlp.experts.{j}"
    shared: str = ""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    neutral: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    experts_key="num_local_experts",
    fixed={"renormalize": True, "attention_bias": False},
    epsilon=1e-5,
    rotary_base=1e6,
    dense_blocks=False,
    gate="block_sparse_moe.gate.weight",
    experts="block_sparse_moe.experts.{j}",
    matrices=("w1", "w3", "w2"),
    neutral={"attention_bias": (False, None)},
)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    experts_key="num_experts",
    own_keys={"norm_topk_prob": False},
    fixed={"qk_norm": "width"},
    epsilon=1e-5,
    dense_blocks=False,
)
QWEN3 = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    experts_key="num_experts",
    own_keys={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    fixed={"qk_norm": "head"},
)
DEEPSEEK = Family(
    model_type="deepseek",
    architecture="DeepseekForCausalLM",
    experts_key="n_routed_experts",
    own_keys={"norm_topk_prob": False, "n_shared_experts": 0, "first_k_dense_replace": 0},
    shared="mlp.shared_experts",
)
DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    experts_key="n_routed_experts",
    own_keys={
        "norm_topk_prob": False, "n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    fixed={"qk_norm": "head", "router": "sigmoid_bias"},
    shared="mlp.shared_experts",
    neutral={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc", None)},
)  # fmt: skip
FAMILIES = {family.model_type: family for family in (MIXTRAL, OLMOE, QWEN3, DEEPSEEK, DOTS1)}
# dense checkpoints, which can be upcycled, and the family of what they become
DENSE = {"llama": MIXTRAL, "mistral": MIXTRAL, "qwen3": QWEN3}
# families that people ask for and that have attention of another kind
REFUSED = {
    name: "its attention is multi-head latent attention (MLA), which moe_jax does not have"
    for name in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
}
