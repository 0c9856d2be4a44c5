"""What each kind of checkpoint of transformers has: config.json as our configs, and back.

A family is a `model_type` of transformers. A key of config.json is one of four things: it *means* a field of our
configs, it is read together with others, it is harmless, or it must have one of a few neutral values, at which it
changes nothing; any other key is refused by its name, unless it is off. An absent key is what the family's class has
for it (transformers 5.24). `tensor_places.py` says which tensor is which leaf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from moe_jax.errors import UserError
from moe_jax.models.config import ModelConfig, segments_of, with_experts
from moe_jax.moe.config import MoEConfig

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
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok",
    "max_position_embeddings", "intermediate_size", "rms_norm_eps", "rope_theta",
)  # fmt: skip
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")  # all mean E; the first that is there counts
# read together: dtype, which layers have experts or a window
JOINT_KEYS = (
    *EXPERT_KEYS, "num_experts_per_tok", "intermediate_size", "moe_intermediate_size", "dtype", "torch_dtype",
    "quantization_config", "sliding_window", "use_sliding_window", "max_window_layers",
)  # fmt: skip
# the largest that is read; whoever wrote config.json must not decide how long this program works on it
SIZES = {
    **dict.fromkeys(("num_hidden_layers", *EXPERT_KEYS, "num_experts_per_tok", "num_attention_heads"), 10_000),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"), 10**8),
    **dict.fromkeys(("max_position_embeddings", "num_key_value_heads", "sliding_window", *LATENT_KEYS), 10**8),
    "num_nextn_predict_layers": 10_000,
}
MOST_EXPERTS = 10**6  # of all layers
HARMLESS = (
    "architectures", "model_type", "transformers_version", "_name_or_path", "auto_map", "initializer_range",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "id2label", "label2id",
    "return_dict", "output_attentions", "output_hidden_states", "problem_type", "use_return_dict",
    "ep_size", "experts_implementation", "attn_implementation", "_attn_implementation",
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "clip_qkv": (None,),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "is_decoder": (False, True),
    "moe_layer_freq": (1,),
    "scoring_func": ("softmax", None),
    "topk_method": ("greedy", None),
}
OFF = (None, False, 0, "", [], {})  # values at which a key that is in no table changes nothing
# what absent keys mean, but for own_keys
ABSENT: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_parameters": {}, "rope_scaling": {}, "layer_types": [],
    "tie_word_embeddings": False, "attention_bias": False, "router_aux_loss_coef": 0.0, "aux_loss_alpha": 0.0,
    "seq_aux": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of checkpoint; names of modules and matrices are those of its tensors."""

    model_type: str  # as config.json has it
    architecture: str  # the same
    experts_key: str  # the key of E that transformers reads
    # what an absent key means, where that is the family's own; values in config.json are of the same kind, or null
    own_keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    # fields of ModelConfig and MoEConfig that every checkpoint of the family has
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    # whether blocks without experts may stand among the others; then moe_intermediate_size is F
    dense_blocks: bool = True
    latent: bool = False  # whether its attention is multi-head latent attention
    gate: str = "mlp.gate.weight"
    experts: str = "mlp.experts.{j}"  # j an expert
    shared: str = ""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert: gate half, up half, back
    neutral: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)  # further keys, neutral values


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    experts_key="num_local_experts",
    own_keys={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "router_aux_loss_coef": 0.001},
    fixed={"renormalize": True, "attention_bias": False},
    dense_blocks=False,
    gate="block_sparse_moe.gate.weight",
    experts="block_sparse_moe.experts.{j}",
    matrices=("w1", "w3", "w2"),
    neutral={"attention_bias": (False, None), "norm_topk_prob": (True, None)},
)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    experts_key="num_experts",
    own_keys={"rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
    fixed={"qk_norm": "width"},
    dense_blocks=False,
)
QWEN3 = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    experts_key="num_experts",
    own_keys={
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_key_value_heads": 4,
        "router_aux_loss_coef": 0.001, "use_sliding_window": False, "sliding_window": 4096,
    },
    fixed={"qk_norm": "head"},
)  # fmt: skip
# the balance loss of DeepSeek's own code, which adds it in each layer; transformers has none for these
PER_LAYER = {"aux_loss_alpha": 0.0, "seq_aux": False}
DEEPSEEK = Family(
    model_type="deepseek",
    architecture="DeepseekForCausalLM",
    experts_key="n_routed_experts",
    own_keys={"norm_topk_prob": False, "n_shared_experts": 0, "first_k_dense_replace": 0, **PER_LAYER},
    shared="mlp.shared_experts",
)
DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    experts_key="n_routed_experts",
    own_keys={
        "norm_topk_prob": False, "n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62,
        "router_aux_loss_coef": 0.0,
    },
    fixed={"qk_norm": "head", "router": "sigmoid_bias"},
    shared="mlp.shared_experts",
    neutral={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc", None)},
)  # fmt: skip
LATENT = dict.fromkeys((*LATENT_KEYS, "qk_head_dim", "head_dim"))
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    experts_key="n_routed_experts",
    own_keys={
        "n_shared_experts": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, **PER_LAYER, **LATENT,
    },
    fixed={"renormalize": False},
    latent=True,
    shared="mlp.shared_experts",
    neutral={"norm_topk_prob": (False, None), "topk_method": ("greedy", "group_limited_greedy", None)},
)  # fmt: skip
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    experts_key="n_routed_experts",
    own_keys={
        "norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, **PER_LAYER, **LATENT,
    },
    fixed={"router": "sigmoid_bias"},
    latent=True,
    shared="mlp.shared_experts",
    neutral={
        "scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None), "rope_interleave": (True, None),
    },
)  # fmt: skip
FAMILIES = {family.model_type: family for family in (MIXTRAL, OLMOE, QWEN3, DEEPSEEK, DOTS1, DEEPSEEK_V2, DEEPSEEK_V3)}
ALIASES = {"kimi_k2": "deepseek_v3"}  # model types with the keys and tensors of another
# dense checkpoints, which can be upcycled: the family of what they become, and what absent keys mean in their own
DENSE: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": (MIXTRAL, {"num_key_value_heads": None}),
    "mistral": (MIXTRAL, {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen3": (QWEN3, {"num_key_value_heads": 32, "head_dim": 128}),
}
YARN_KEYS = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
DTYPES = ("float32", "bfloat16", "float16")
FIXED = {
    "kind": "gpt", "norm": "rms", "activation": "swiglu", "positions": "rotary", "ffn_bias": False, "qk_norm": "none",
}  # fmt: skip


def read_config(keys: dict[str, Any]) -> tuple[Family, ModelConfig, MoEConfig]:
    """Return (family, configs) of a config.json.

    A UserError names a key that is missing, unknown, or has a value that this program cannot take.
    """
    name = keys.get("model_type")
    if name not in (*FAMILIES, *ALIASES):
        raise UserError(f"config.json: model_type ({name!r}) must be one of {', '.join((*FAMILIES, *ALIASES))}")
    family = FAMILIES[ALIASES.get(name, name)]
    if family.latent and "q_lora_rank" not in keys:  # null means something
        raise UserError("config.json has no 'q_lora_rank'; it is null where queries have no latent")
    keys = _checked(family, {**ABSENT, **family.own_keys, **keys})
    dtype = next((keys[key] for key in ("dtype", "torch_dtype") if keys.get(key) is not None), "float32")
    if dtype not in DTYPES:
        raise UserError(f"config.json: dtype ({dtype!r}) must be one of {', '.join(DTYPES)}; convert its tensors first")
    model = {**FIXED, "attention_bias": False, "tied_head": False}
    model |= {field: keys[key] for key, field in MODEL_KEYS.items() if keys.get(key) is not None}
    if model.get("kv_heads") == model["heads"]:
        del model["kv_heads"]
    if family.latent:
        model |= _latent(keys)
    elif model.get("head_dim", 0) * model["heads"] == model["model_dim"]:
        model.pop("head_dim", None)
    hidden = "moe_intermediate_size" if family.dense_blocks else "intermediate_size"
    model |= {"hidden_dim": _needed(keys, hidden), "dtype": dtype, **_rotary(family, keys)}

    # which blocks have experts
    layers, first = model["layers"], _given(keys, "first_k_dense_replace", 0)
    step, listed = _given(keys, "decoder_sparse_step", 1), _given(keys, "mlp_only_layers", [])
    flags = [i >= first and i not in listed and step > 0 and (i + 1) % step == 0 for i in range(layers)]
    if not any(flags):
        raise UserError(f"config.json gives none of the {layers} layers experts: it is no mixture of experts")
    if family.dense_blocks and not all(flags):
        model["dense_hidden_dim"] = keys["intermediate_size"]
    start = flags.index(True)
    if all(flags[start:]):
        model |= {"moe_every": 1, "first_dense": start}
    elif layers % 2 == 0 and flags == [bool(i % 2) for i in range(layers)]:
        model["moe_every"] = 2
    else:
        starts = [i for i in range(layers) if not i or flags[i] != flags[i - 1]]
        runs = zip(starts, [*starts[1:], layers], strict=True)
        model["segments"] = tuple(f"layers={end - start} moe_every={int(flags[start])}" for start, end in runs)

    experts = [keys[key] for key in EXPERT_KEYS if keys.get(key) is not None]
    if not experts:
        raise UserError(f"config.json has none of {', '.join(map(repr, EXPERT_KEYS))}: it is no mixture of experts")
    if layers * experts[0] > MOST_EXPERTS:
        raise UserError(f"config.json: {layers} layers of {experts[0]} experts are more than {MOST_EXPERTS} experts")
    moe = {"num_experts": experts[0], "top_k": keys["num_experts_per_tok"], "z_loss_weight": 0.0}
    moe["renormalize"] = bool(keys.get("norm_topk_prob"))
    # DeepSeek adds each layer's balance loss, 1 where loads are even, as we do; transformers' is pooled over layers, K.
    pooled = (keys["router_aux_loss_coef"] or 0.0) * moe["top_k"] / sum(flags)
    moe["aux_loss_weight"] = keys["aux_loss_alpha"] or pooled
    moe["balance_over"] = "sequence" if keys["seq_aux"] else "batch"
    moe["shared_experts"] = _given(keys, "n_shared_experts", 0)
    if _given(keys, "n_group", 1) > 1 and keys.get("topk_method") != "greedy":
        moe |= {"expert_groups": keys["n_group"], "kept_groups": _given(keys, "topk_group", 1)}
    moe["routed_scale"] = _given(keys, "routed_scaling_factor", 1.0)
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    for field, value in family.fixed.items():
        (model if field in names else moe)[field] = value
    return family, ModelConfig(**model), MoEConfig(**moe)


def upcycled_keys(keys: dict[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    """Return the config.json of the mixture of experts that a dense checkpoint becomes, or raise a UserError."""
    name = keys.get("model_type")
    if name not in tuple(DENSE):
        raise UserError(f"config.json: model_type ({name!r}) must be one of {', '.join(DENSE)} to be upcycled")
    (family, absent), hidden = DENSE[name], _needed(keys, "intermediate_size")
    made = {**ABSENT, **absent, **keys, "model_type": family.model_type}
    made |= {family.experts_key: experts, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    return {**made, "moe_intermediate_size": hidden} if family.dense_blocks else made


def _checked(family: Family, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that a table has; a UserError for others, for what is missing, of another kind or not neutral."""
    for key in REQUIRED:
        _needed(keys, key)
    for key, most in SIZES.items():
        value = keys.get(key)
        if value is not None and not (type(value) is int and 0 <= value <= most):
            raise UserError(f"config.json: {key} ({value!r}) must be a whole number of at most {most}")
    for key, default in {**ABSENT, **family.own_keys}.items():
        if default is not None:
            _check_kind(key, keys[key], type(default))
    kinds, all_tokens = set(keys["layer_types"] or ()), keys["max_position_embeddings"]
    size = _given(keys, "sliding_window", all_tokens) if keys.get("use_sliding_window", True) else all_tokens
    first = _given(keys, "max_window_layers", 0) if "max_window_layers" in family.own_keys else 0
    if kinds - {"full_attention"} or not kinds and size < all_tokens and first < keys["num_hidden_layers"]:
        key = "layer_types" if kinds else "sliding_window"
        raise UserError(f"config.json: {key} ({keys[key]!r}) gives layers a window, and moe_jax attends to all tokens")
    known = {*MODEL_KEYS, *JOINT_KEYS, *HARMLESS, *ABSENT, *family.own_keys} - set(family.neutral)
    neutral = {**NEUTRAL, "use_qk_norm": ("qk_norm" in family.fixed, None), **family.neutral}
    for key, value in keys.items():
        allowed = neutral.get(key, OFF)
        if key in known or value in allowed:
            continue
        rule = f"must be {' or '.join(map(repr, allowed))}, all that is known" if key in neutral else "is unknown"
        raise UserError(f"config.json: {key} ({value!r}) {rule} to moe_jax for {family.model_type!r} models")
    return {key: value for key, value in keys.items() if key in known or key in neutral}


def _check_kind(key: str, value: Any, kind: type) -> None:
    if type(value) not in (kind, type(None), int if kind is float else kind):
        raise UserError(f"config.json: {key} ({value!r}) must be a {kind.__name__}")
    if kind is float and not abs(value or 0) < 1e300 or kind is list and not {int, str} >= set(map(type, value or ())):
        raise UserError(f"config.json: {key} ({value!r}) must be finite, and lists hold numbers and names alone")


def _given(keys: dict[str, Any], key: str, otherwise: Any) -> Any:
    return otherwise if keys.get(key) is None else keys[key]


def _needed(keys: dict[str, Any], key: str) -> Any:
    if keys.get(key) is None:
        raise UserError(f"config.json has no {key!r}")
    return keys[key]


def _latent(keys: dict[str, Any]) -> dict[str, int | None]:
    """Return the fields of latent attention."""
    found = {key: keys[key] if key == "q_lora_rank" else _needed(keys, key) for key in LATENT_KEYS}
    size = found.pop("qk_nope_head_dim") + found["qk_rope_head_dim"]
    heads = keys["num_attention_heads"]
    wanted = {"num_key_value_heads": heads, "qk_head_dim": size, "head_dim": found["qk_rope_head_dim"]}
    for key, value in wanted.items():
        if keys.get(key, value) not in (value, None):
            raise UserError(f"config.json: {key} ({keys[key]!r}) must be {value} by the other sizes of its attention")
    return {**found, "head_dim": size}


def skipped_layers(keys: dict[str, Any]) -> tuple[str, ...]:
    """Return what names begin with of tensors that predict tokens farther ahead, which moe_jax does not do."""
    first, family = keys["num_hidden_layers"], FAMILIES[ALIASES.get(keys["model_type"], keys["model_type"])]
    number = keys.get("num_nextn_predict_layers", family.own_keys.get("num_nextn_predict_layers")) or 0
    return tuple(f"model.layers.{first + i}." for i in range(number))


def quantized_blocks(keys: dict[str, Any]) -> tuple[int, int] | None:
    """Return the (rows, columns) of the files' matrices that a scale is of; None where they are not quantised.

    A UserError for another quantisation than float8 with a scale for each block.
    """
    given = keys.get("quantization_config")
    if given is None:
        return None
    given = given if isinstance(given, dict) else {"quant_method": given}
    method, blocks = given.get("quant_method"), given.get("weight_block_size")
    sound = isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
    if method != "fp8" or not sound:
        raise UserError(
            f"config.json: quantization_config has quant_method {method!r} and weight_block_size {blocks!r}; moe_jax "
            "reads 'fp8' with blocks such as [128, 128]: convert the checkpoint to bfloat16 first"
        )
    return blocks[0], blocks[1]


def _rotary(family: Family, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    given = keys.get(key) or {}
    kind = given.get("rope_type", given.get("type", "default"))
    kinds = ("default", "linear", "yarn") if family.latent else ("default", "linear")
    if kind not in kinds:
        raise UserError(f"config.json: {key}.rope_type ({kind!r}) must be one of {', '.join(kinds)}")
    known = {"rope_theta", "factor"} | (set() if kind == "linear" else set(YARN_KEYS))  # 'default' ignores all others
    for name, value in sorted(given.items()):
        if name in ("rope_type", "type") or value is None or (name, value) == ("partial_rotary_factor", 1):
            continue
        if name not in known:
            raise UserError(f"config.json: {key}.{name} ({value!r}) is unknown to moe_jax")
        _check_kind(f"{key}.{name}", value, float)
    found = {"rotary_base": float(_given(given, "rope_theta", keys["rope_theta"]))}
    if kind == "default":
        return found
    if kind == "linear":
        return {**found, "rotary_factor": float(given.get("factor", 1.0))}
    mscale, all_dim = (given.get(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
    if bool(mscale) != bool(all_dim):
        raise UserError(f"config.json: {key} must have both of mscale and mscale_all_dim, or neither of them")
    turns = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    yarn = _needed(given, "original_max_position_embeddings"), *turns, mscale or 1.0, all_dim
    return {**found, "rotary_factor": float(_needed(given, "factor")), "rotary_yarn": tuple(map(float, yarn))}


def write_config(family: Family, model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """Return the config.json of a model in one family's words; whether it says all is for `find_export_family`."""
    (first, *_) = with_experts(segments_of(model, moe))
    flags = flags_of(model, moe)
    keys: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    keys |= {key: getattr(model, field) for key, field in MODEL_KEYS.items()}
    keys |= {"num_key_value_heads": model.key_value_heads, "head_dim": model.head_size, "hidden_act": "silu"}
    experts, hidden = first.moe.num_experts, first.config.hidden_dim
    keys |= {family.experts_key: experts, "num_experts_per_tok": first.moe.top_k}
    if family.dense_blocks:
        keys |= {"moe_intermediate_size": hidden, "intermediate_size": model.ffn_dim}
    else:
        keys["intermediate_size"] = hidden
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rotary_yarn:
        rope |= {"rope_type": "yarn", "factor": model.rotary_factor}
        rope |= dict(zip(YARN_KEYS if model.rotary_yarn[4] else YARN_KEYS[:3], model.rotary_yarn, strict=False))
        rope["original_max_position_embeddings"] = int(model.rotary_yarn[0])
    elif model.rotary_factor != 1:
        rope |= {"rope_type": "linear", "factor": model.rotary_factor}
    keys |= {"rope_parameters": rope, "dtype": model.dtype}
    pooled = moe.aux_loss_weight * sum(flags) / first.moe.top_k
    meant = {
        "router_aux_loss_coef": float(f"{pooled:.12g}"),  # as it was before it was divided
        "aux_loss_alpha": moe.aux_loss_weight,
        "seq_aux": moe.balance_over == "sequence",
        "sliding_window": None,
        "norm_topk_prob": moe.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, has_experts in enumerate(flags) if not has_experts],
        "n_shared_experts": moe.shared_ffn_dim(hidden) // hidden,
        "first_k_dense_replace": flags.index(True),
        "n_group": moe.expert_groups or 1,
        "topk_group": moe.kept_groups if moe.expert_groups else 1,
        "routed_scaling_factor": moe.routed_scale,
        "num_nextn_predict_layers": 0,
        "topk_method": "group_limited_greedy" if moe.expert_groups else "greedy",
        "qk_head_dim": model.head_size,
        "qk_nope_head_dim": model.head_size - (model.qk_rope_head_dim or 0),
        "head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.value_size,
        **{key: getattr(model, key) for key in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")},
    }
    return keys | {key: meant[key] for key in family.own_keys if key in meant}


def flags_of(model: ModelConfig, moe: MoEConfig) -> list[bool]:
    """Return for each block of a model whether it has experts."""
    flags = []
    for segment in segments_of(model, moe):
        every = segment.config.moe_every
        flags += [bool(every) and i % every == every - 1 for i in range(segment.config.layers)]
    return flags


def find_export_family(model: ModelConfig, moe: MoEConfig) -> Family:
    """Return the family whose config.json says all that the model computes.

    A UserError if there is none; it names what the nearest one cannot say.
    """
    wanted, missing = described(model, moe), []
    for family in FAMILIES.values():
        try:
            found = described(*read_config(write_config(family, model, moe))[1:])
        except UserError:
            continue
        differing = [name for name in wanted if wanted[name] != found[name]]
        if not differing:
            return family
        missing.append((len(differing), differing[0], wanted[differing[0]], family.model_type))
    if not missing:
        raise UserError(f"no kind of checkpoint ({', '.join(FAMILIES)}) can hold a model of these sizes")
    _, name, value, nearest = min(missing)
    raise UserError(
        f"{name} ({value!r}) has no place in a checkpoint of {nearest!r}, the nearest of the kinds that can be written "
        f"({', '.join(FAMILIES)})"
    )


def described(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """Return all that decides what a model computes without noise, in one form: {'ModelConfig.norm': 'rms', ...}."""
    segments = segments_of(model, moe)
    names = (*FIXED, *MODEL_KEYS.values(), "rotary_base", "rotary_factor", "rotary_yarn")
    names += ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
    found = {f"ModelConfig.{name}": getattr(model, name) for name in names}
    found |= {"ModelConfig.v_head_dim": model.value_size}
    found |= {"ModelConfig.kv_heads": model.key_value_heads, "ModelConfig.head_dim": model.head_size}
    dense = {segment.config.ffn_dim for segment in segments if segment.config.moe_every != 1}
    experts = set()
    for segment in with_experts(segments):
        # a model is served by 'topk' where it was trained with 'group_limited', which insists on groups
        router = "topk" if segment.moe.router == "group_limited" else segment.moe.router
        experts.add((segment.moe.num_experts, segment.moe.top_k, router, segment.config.hidden_dim))
    (first, *_) = with_experts(segments)
    return found | {
        "ModelConfig.segments": flags_of(model, moe),
        "ModelConfig.dense_hidden_dim": sorted(dense),
        "MoEConfig.num_experts": sorted(experts),
        "MoEConfig.shared_experts": moe.shared_ffn_dim(first.config.hidden_dim),
        "MoEConfig.residual": moe.residual,
        "MoEConfig.renormalize": moe.renormalize,
        "MoEConfig.routed_scale": moe.routed_scale,
        "MoEConfig.expert_groups": (moe.expert_groups, moe.kept_groups if moe.expert_groups else 1),
        "MoEConfig.capacity_factor": moe.capacity_factor,
    }
