"""What each kind of checkpoint of transformers has: config.json as our configs, and back.

A family is a `model_type` of transformers. A key of config.json is one of four things: it *means* a field of our
configs, it is read together with others, it is harmless, or it must have one of a few neutral values, at which it
changes nothing; any other key is refused by its name. `tensor_places.py` says which tensor is which leaf.
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
    "max_position_embeddings", "intermediate_size",
)  # fmt: skip
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")  # all mean E; the first that is there counts
# read together: rotary positions, dtype, which layers have experts
JOINT_KEYS = (
    *EXPERT_KEYS, "num_experts_per_tok", "intermediate_size", "moe_intermediate_size", "router_aux_loss_coef",
    "aux_loss_alpha", "rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "quantization_config",
)  # fmt: skip
# the largest that is read; whoever wrote config.json must not decide how long this program works on it
SIZES = {
    **dict.fromkeys(("num_hidden_layers", *EXPERT_KEYS, "num_experts_per_tok", "num_attention_heads"), 10_000),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"), 10**8),
    **dict.fromkeys(("max_position_embeddings", "num_key_value_heads", *LATENT_KEYS), 10**8),
    "num_nextn_predict_layers": 10_000,
}
MOST_EXPERTS = 10**6  # of all layers
HARMLESS = (
    "architectures", "model_type", "transformers_version", "_name_or_path", "auto_map", "initializer_range",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "id2label", "label2id",
    "return_dict", "output_attentions", "output_hidden_states", "problem_type", "use_return_dict", "seq_aux",
    "ep_size", "experts_implementation", "attn_implementation", "_attn_implementation",
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
    "moe_layer_freq": (1,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of checkpoint; names of modules and matrices are those of its tensors."""

    model_type: str  # as config.json has it
    architecture: str  # the same
    experts_key: str  # the key of E that transformers reads
    # further keys, read together with others, with the value that an absent one has
    own_keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    # fields of ModelConfig and MoEConfig that every checkpoint of the family has
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    epsilon: float = 1e-6  # where config.json says none
    rotary_base: float = 10000.0  # likewise
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
LATENT = dict.fromkeys((*LATENT_KEYS, "qk_head_dim", "head_dim"))
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    experts_key="n_routed_experts",
    own_keys={
        "n_shared_experts": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, **LATENT,
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
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, **LATENT,
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
# dense checkpoints, which can be upcycled, and the family of what they become
DENSE = {"llama": MIXTRAL, "mistral": MIXTRAL, "qwen3": QWEN3}
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
    if name not in FAMILIES and name not in ALIASES:
        raise UserError(f"config.json: model_type ({name!r}) must be one of {', '.join((*FAMILIES, *ALIASES))}")
    family = FAMILIES[ALIASES.get(name, name)]
    _check_keys(family, keys)
    own = {key: default if keys.get(key) is None else keys[key] for key, default in family.own_keys.items()}
    dtype = next((keys[key] for key in ("dtype", "torch_dtype") if keys.get(key) is not None), "float32")
    if dtype not in DTYPES:
        raise UserError(f"config.json: dtype ({dtype!r}) must be one of {', '.join(DTYPES)}; convert its tensors first")
    model = {**FIXED, "attention_bias": False, "tied_head": False, "norm_epsilon": family.epsilon}
    model |= {field: keys[key] for key, field in MODEL_KEYS.items() if keys.get(key) is not None}
    if model.get("kv_heads") == model["heads"]:
        del model["kv_heads"]
    if family.latent:
        model |= _latent(keys)
    elif model.get("head_dim", 0) * model["heads"] == model["model_dim"]:
        del model["head_dim"]
    hidden = "moe_intermediate_size" if family.dense_blocks else "intermediate_size"
    model |= {"hidden_dim": _needed(keys, hidden), "dtype": dtype, **_rotary(family, keys)}

    # which blocks have experts
    layers, step, first = model["layers"], own.get("decoder_sparse_step", 1), own.get("first_k_dense_replace", 0)
    listed = own.get("mlp_only_layers", [])
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
    moe["renormalize"] = own.get("norm_topk_prob", True)
    coefficient = keys.get("router_aux_loss_coef", keys.get("aux_loss_alpha")) or 0.0
    # There the balance loss is pooled over layers and is K where loads are even; ours is summed over layers, 1 each.
    moe["aux_loss_weight"] = coefficient * moe["top_k"] / sum(flags)
    moe["shared_experts"] = own.get("n_shared_experts", 0)
    if own.get("n_group", 1) > 1 and own.get("topk_method") != "greedy":
        moe |= {"expert_groups": own["n_group"], "kept_groups": own["topk_group"]}
    moe["routed_scale"] = own.get("routed_scaling_factor", 1.0)
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    for field, value in family.fixed.items():
        (model if field in names else moe)[field] = value
    return family, ModelConfig(**model), MoEConfig(**moe)


def upcycled_keys(keys: dict[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    """Return the config.json of the mixture of experts that a dense checkpoint becomes, or raise a UserError."""
    name = keys.get("model_type")
    if name not in DENSE:
        raise UserError(f"config.json: model_type ({name!r}) must be one of {', '.join(DENSE)} to be upcycled")
    family, hidden = DENSE[name], _needed(keys, "intermediate_size")
    given = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, **keys}  # what a dense config.json means without these keys
    made = {**given, "model_type": family.model_type, family.experts_key: experts, "num_experts_per_tok": top_k}
    if family.dense_blocks:
        made["moe_intermediate_size"] = hidden
    return {**made, "norm_topk_prob": True} if "norm_topk_prob" in family.own_keys else made


def _check_keys(family: Family, keys: dict[str, Any]) -> None:
    """Raise a UserError for keys that are missing, unknown, or not neutral."""
    for key in REQUIRED:
        _needed(keys, key)
    for key, most in SIZES.items():
        value = keys.get(key)
        if value is not None and not (type(value) is int and 0 <= value <= most):
            raise UserError(f"config.json: {key} ({value!r}) must be a whole number of at most {most}")
    known = {*MODEL_KEYS, *JOINT_KEYS, *HARMLESS, *family.own_keys} - set(family.neutral)
    neutral = {**NEUTRAL, **family.neutral}
    kinds = set(keys.get("layer_types") or ())
    # what says nothing where no layer has a window
    no_window = ["max_window_layers"]
    if kinds <= {"full_attention"}:
        no_window.append("layer_types")
    if kinds == {"full_attention"} or not keys.get("use_sliding_window", True):
        no_window.append("sliding_window")
    for key, value in keys.items():
        if key in known or key in no_window:
            continue
        if key not in neutral:
            raise UserError(f"config.json: {key} ({value!r}) is unknown to moe_jax for {family.model_type!r} models")
        if value not in neutral[key]:
            wanted = " or ".join(repr(one) for one in neutral[key])
            raise UserError(
                f"config.json: {key} ({value!r}) must be {wanted}; moe_jax has nothing else for {family.model_type!r}"
            )


def _needed(keys: dict[str, Any], key: str) -> Any:
    if keys.get(key) is None:
        raise UserError(f"config.json has no {key!r}")
    return keys[key]


def _latent(keys: dict[str, Any]) -> dict[str, int | None]:
    """Return the fields of latent attention."""
    if "q_lora_rank" not in keys:  # null means something
        raise UserError("config.json has no 'q_lora_rank'; it is null where queries have no latent")
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
    known = {"rope_type", "type", "rope_theta", "factor"} | (set(YARN_KEYS) if kind == "yarn" else set())
    if given.get("partial_rotary_factor", 1) == 1:
        known.add("partial_rotary_factor")
    for name in sorted(set(given) - known):
        raise UserError(f"config.json: {key}.{name} ({given[name]!r}) is unknown to moe_jax")
    base = given.get("rope_theta", keys.get("rope_theta"))
    found = {"rotary_base": float(family.rotary_base if base is None else base)}
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
    coefficient = float(f"{moe.aux_loss_weight * sum(flags) / first.moe.top_k:.12g}")  # as it was before it was divided
    alpha = family.model_type.startswith("deepseek")
    keys["aux_loss_alpha" if alpha else "router_aux_loss_coef"] = coefficient
    meant = {
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
    keys |= {key: meant[key] for key in family.own_keys}
    if family.model_type == "dots1":
        keys["sliding_window"] = None
    return keys


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
