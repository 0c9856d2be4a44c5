"""What each kind of checkpoint of transformers has: config.json as our configs, and back.

A family is a `model_type` of transformers. A key of config.json is one of four things: it *means* a field of our
configs, it is read together with others, it is harmless, or it must have one of a few neutral values, at which it
changes nothing; any other key is refused by its name, unless it is off. An absent key is what the family's class has
for it (transformers 5.24). `tensor_places.py` says which tensor is which leaf.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_experts_per_tok max_position_embeddings "
    "intermediate_size rms_norm_eps rope_theta"
).split()
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")  # all mean E; the first that is there counts
# read together: dtype, which layers have experts or a window
JOINT_KEYS = (
    "num_experts_per_tok intermediate_size moe_intermediate_size dtype torch_dtype quantization_config sliding_window "
    "use_sliding_window max_window_layers"
).split()
# the largest that is read; whoever wrote config.json must not decide how long this program works on it
SIZES = {
    **dict.fromkeys(("num_hidden_layers", *EXPERT_KEYS, "num_experts_per_tok", "num_attention_heads"), 10_000),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"), 10**8),
    **dict.fromkeys(("max_position_embeddings", "num_key_value_heads", "sliding_window", *LATENT_KEYS), 10**8),
    "num_nextn_predict_layers": 10_000,
}
MOST_EXPERTS = 10**6  # of all layers
HARMLESS = (
    "architectures model_type transformers_version _name_or_path auto_map initializer_range use_cache bos_token_id "
    "eos_token_id pad_token_id output_router_logits id2label label2id return_dict output_attentions "
    "output_hidden_states problem_type use_return_dict ep_size experts_implementation attn_implementation "
    "_attn_implementation"
).split()
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
    experts_key: str = "n_routed_experts"  # the key of E that transformers reads
    # what an absent key means, where that is the family's own; values in config.json are of the same kind, or null
    own_keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    # fields of ModelConfig and MoEConfig that every checkpoint of the family has
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    # whether blocks without experts may stand among the others; then moe_intermediate_size is F
    dense_blocks: bool = True
    latent: bool = False  # whether its attention is multi-head latent attention
    gate: str = "mlp.gate.weight"
    experts: str = "mlp.experts.{j}"  # j an expert
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert: gate half, up half, back
    neutral: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)  # further keys, neutral values

    @property
    def architecture(self) -> str:
        """The name of its class in transformers."""
        return "".join(map(str.capitalize, self.model_type.split("_"))) + "ForCausalLM"


# keys that several families have, with what an absent one most often means
SHARED = {"norm_topk_prob": False, "n_shared_experts": 0, "first_k_dense_replace": 0}
GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
# the balance loss of DeepSeek's own code, which adds it in each layer; transformers has none for these
PER_LAYER = {"aux_loss_alpha": 0.0, "seq_aux": False}
LATENT = dict.fromkeys((*LATENT_KEYS, "qk_head_dim", "head_dim"))
# A further family is a further entry; what it computes otherwise is a field of our configs, set in `fixed` or read from
# a key of its own in `_model_fields` and `_moe_fields`, and written by `write_config`.
_KNOWN = (
    Family(
        model_type="mixtral",
        experts_key="num_local_experts",
        own_keys={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "router_aux_loss_coef": 0.001},
        fixed={"renormalize": True, "attention_bias": False},
        dense_blocks=False,
        gate="block_sparse_moe.gate.weight",
        experts="block_sparse_moe.experts.{j}",
        matrices=("w1", "w3", "w2"),
        neutral={"attention_bias": (False, None), "norm_topk_prob": (True, None)},
    ),
    Family(
        model_type="olmoe",
        experts_key="num_experts",
        own_keys={"rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
        fixed={"qk_norm": "width"},
        dense_blocks=False,
    ),
    Family(
        model_type="qwen3_moe",
        experts_key="num_experts",
        own_keys={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_key_value_heads": 4}
        | {"router_aux_loss_coef": 0.001, "use_sliding_window": False, "sliding_window": 4096},
        fixed={"qk_norm": "head"},
    ),
    Family(model_type="deepseek", own_keys=SHARED | PER_LAYER),
    Family(
        model_type="dots1",
        own_keys={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62}
        | {"router_aux_loss_coef": 0.0, **SHARED, **GROUPS},
        fixed={"qk_norm": "head", "router": "sigmoid_bias"},
        neutral={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc", None)},
    ),
    Family(
        model_type="deepseek_v2",
        own_keys={"n_shared_experts": 2, "first_k_dense_replace": 0, "topk_method": "greedy"}
        | {**GROUPS, **PER_LAYER, **LATENT},
        fixed={"renormalize": False},
        latent=True,
        neutral={"norm_topk_prob": (False, None), "topk_method": ("greedy", "group_limited_greedy", None)},
    ),
    Family(
        model_type="deepseek_v3",
        own_keys={"norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8}
        | {"topk_group": 4, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, **PER_LAYER, **LATENT},
        fixed={"router": "sigmoid_bias"},
        latent=True,
        neutral={"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None), "rope_interleave": (True, None)},
    ),
)
FAMILIES = {family.model_type: family for family in _KNOWN}
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]  # with its keys and tensors; written as what transformers knows
# dense checkpoints, which can be upcycled: the family of what they become, and what absent keys mean in their own
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("mixtral", {"num_key_value_heads": None}),
    "mistral": ("mixtral", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen3": ("qwen3_moe", {"num_key_value_heads": 32, "head_dim": 128}),
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
    if name not in tuple(FAMILIES):
        raise UserError(f"config.json: model_type ({name!r}) must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if family.latent and "q_lora_rank" not in keys:  # null means something
        raise UserError("config.json has no 'q_lora_rank'; it is null where queries have no latent")
    keys = _checked(family, {**ABSENT, **family.own_keys, **keys})
    flags = _blocks_with_experts(keys)
    model, moe = _model_fields(family, keys, flags), _moe_fields(keys, sum(flags))
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    for field, value in family.fixed.items():
        (model if field in names else moe)[field] = value
    return family, ModelConfig(**model), MoEConfig(**moe)


def _blocks_with_experts(keys: dict[str, Any]) -> list[bool]:
    """Return for each block whether it has experts; a UserError where none has."""
    layers, first = keys["num_hidden_layers"], keys.get("first_k_dense_replace", 0)
    step, listed = keys.get("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    flags = [i >= first and i not in listed and step > 0 and (i + 1) % step == 0 for i in range(layers)]
    if not any(flags):
        raise UserError(f"config.json gives none of the {layers} layers experts: it is no mixture of experts")
    return flags


def _model_fields(family: Family, keys: dict[str, Any], flags: list[bool]) -> dict[str, Any]:
    """Return the fields of ModelConfig; flags: of `_blocks_with_experts`."""
    dtype = keys.get("dtype", keys.get("torch_dtype", "float32"))
    if dtype not in DTYPES:
        raise UserError(f"config.json: dtype ({dtype!r}) must be one of {', '.join(DTYPES)}; convert its tensors first")
    hidden = _needed(keys, "moe_intermediate_size" if family.dense_blocks else "intermediate_size")
    model = {**FIXED, "attention_bias": False, "tied_head": False, "hidden_dim": hidden}
    model["dtype"] = "bfloat16" if dtype == "float16" else dtype  # in which nothing computes here
    model |= {field: keys[key] for key, field in MODEL_KEYS.items() if key in keys}
    model |= _rotary(family, keys)
    # what follows from other sizes is left out
    if model.get("kv_heads") == model["heads"]:
        del model["kv_heads"]
    if family.latent:
        sizes = {key: keys.get(key) if key == "q_lora_rank" else _needed(keys, key) for key in LATENT_KEYS}
        rotated, heads = sizes["qk_rope_head_dim"], keys["num_attention_heads"]
        size = sizes.pop("qk_nope_head_dim") + rotated
        for key, wanted in {"num_key_value_heads": heads, "qk_head_dim": size, "head_dim": rotated}.items():
            if keys.get(key, wanted) != wanted:
                raise UserError(
                    f"config.json: {key} ({keys[key]!r}) must be {wanted} by the other sizes of its attention"
                )
        model |= {**sizes, "head_dim": size}
    elif model.get("head_dim", 0) * model["heads"] == model["model_dim"]:
        model.pop("head_dim", None)
    if family.dense_blocks and not all(flags):
        model["dense_hidden_dim"] = keys["intermediate_size"]
    first = flags.index(True)
    if all(flags[first:]):
        return {**model, "moe_every": 1, "first_dense": first}
    if len(flags) % 2 == 0 and flags == [bool(i % 2) for i in range(len(flags))]:
        return {**model, "moe_every": 2}
    runs = [(len(list(run)), int(has_experts)) for has_experts, run in itertools.groupby(flags)]
    return {**model, "segments": tuple(f"layers={layers} moe_every={every}" for layers, every in runs)}


def _moe_fields(keys: dict[str, Any], moe_layers: int) -> dict[str, Any]:
    """Return the fields of MoEConfig; moe_layers: blocks with experts."""
    layers, experts = keys["num_hidden_layers"], [keys[key] for key in EXPERT_KEYS if key in keys]
    if not experts:
        raise UserError(f"config.json has none of {', '.join(map(repr, EXPERT_KEYS))}: it is no mixture of experts")
    if layers * experts[0] > MOST_EXPERTS:
        raise UserError(f"config.json: {layers} layers of {experts[0]} experts are more than {MOST_EXPERTS} experts")
    top_k = keys["num_experts_per_tok"]
    # DeepSeek adds each layer's balance loss, 1 where loads are even, as we do; transformers' is pooled over layers, K.
    pooled = keys.get("router_aux_loss_coef", 0.0) * top_k / moe_layers
    moe = {
        "num_experts": experts[0],
        "top_k": top_k,
        "z_loss_weight": 0.0,
        "renormalize": bool(keys.get("norm_topk_prob")),
        "aux_loss_weight": keys.get("aux_loss_alpha") or pooled,
        "balance_over": "sequence" if keys.get("seq_aux") else "batch",
        "shared_experts": keys.get("n_shared_experts", 0),
        "routed_scale": keys.get("routed_scaling_factor", 1.0),
    }
    if keys.get("n_group", 1) > 1 and keys.get("topk_method") != "greedy":
        moe |= {"expert_groups": keys["n_group"], "kept_groups": keys.get("topk_group", 1)}
    return moe


def upcycled_keys(keys: dict[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    """Return the config.json of the mixture of experts that a dense checkpoint becomes, or raise a UserError."""
    name = keys.get("model_type")
    if name not in tuple(DENSE):
        raise UserError(f"config.json: model_type ({name!r}) must be one of {', '.join(DENSE)} to be upcycled")
    (becomes, absent), hidden = DENSE[name], _needed(keys, "intermediate_size")
    family = FAMILIES[becomes]
    made = {**ABSENT, **absent, **keys, "model_type": family.model_type}
    made |= {family.experts_key: experts, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    return {**made, "moe_intermediate_size": hidden} if family.dense_blocks else made


def _checked(family: Family, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that a table has and that are not null.

    A UserError for others, for what is missing, of another kind, or not neutral.
    """
    known = {*MODEL_KEYS, *EXPERT_KEYS, *JOINT_KEYS, *HARMLESS, *ABSENT, *family.own_keys} - set(family.neutral)
    neutral = {**NEUTRAL, "use_qk_norm": ("qk_norm" in family.fixed, None), **family.neutral}
    given = {key: value for key, value in keys.items() if value is not None}
    for key in REQUIRED:
        _needed(given, key)
    for key, most in SIZES.items():
        if key in given and not (type(given[key]) is int and 0 <= given[key] <= most):
            raise UserError(f"config.json: {key} ({given[key]!r}) must be a whole number of at most {most}")
    for key, default in {**ABSENT, **family.own_keys}.items():
        if default is not None and key in given:
            _check_kind(key, given[key], type(default))
    kinds, all_tokens = set(given.get("layer_types", ())), given["max_position_embeddings"]
    size = given.get("sliding_window", all_tokens) if keys.get("use_sliding_window", True) else all_tokens
    first = given.get("max_window_layers", 0) if "max_window_layers" in family.own_keys else 0
    if kinds - {"full_attention"} or not kinds and size < all_tokens and first < given["num_hidden_layers"]:
        key = "layer_types" if kinds else "sliding_window"
        raise UserError(f"config.json: {key} ({keys[key]!r}) gives layers a window, and moe_jax attends to all tokens")
    for key, value in keys.items():
        allowed = neutral.get(key, OFF)
        if key not in known and value not in allowed:
            rule = f"must be {' or '.join(map(repr, allowed))}, all that is known" if key in neutral else "is unknown"
            raise UserError(f"config.json: {key} ({value!r}) {rule} to moe_jax for {family.model_type!r} models")
    return {key: value for key, value in given.items() if key in known or key in neutral}


def _check_kind(key: str, value: Any, kind: type) -> None:
    if type(value) not in (kind, int if kind is float else kind):
        raise UserError(f"config.json: {key} ({value!r}) must be a {kind.__name__}")
    if kind is float and not abs(value) < 1e300 or kind is list and not {int, str} >= set(map(type, value)):
        raise UserError(f"config.json: {key} ({value!r}) must be finite, and lists hold numbers and names alone")


def _needed(keys: dict[str, Any], key: str) -> Any:
    if key not in keys:
        raise UserError(f"config.json has no {key!r}")
    return keys[key]


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
    given = {name: value for name, value in keys.get(key, {}).items() if value is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    kinds = ("default", "linear", "yarn") if family.latent else ("default", "linear")
    if kind not in kinds:
        raise UserError(f"config.json: {key}.rope_type ({kind!r}) must be one of {', '.join(kinds)}")
    known = {"rope_theta", "factor"} | (set() if kind == "linear" else set(YARN_KEYS))  # 'default' ignores all others
    for name, value in sorted(given.items()):
        if name in ("type", "partial_rotary_factor") and value in (kind, 1):
            continue
        if name not in known:
            raise UserError(f"config.json: {key}.{name} ({value!r}) is unknown to moe_jax")
        _check_kind(f"{key}.{name}", value, float)
    fields = {"rotary_base": float(given.get("rope_theta", keys["rope_theta"]))}
    if kind == "default":
        return fields
    if kind == "linear":
        return {**fields, "rotary_factor": float(given.get("factor", 1.0))}
    mscale, all_dim = (given.get(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if bool(mscale) != bool(all_dim):
        raise UserError(f"config.json: {key} must have both of mscale and mscale_all_dim, or neither of them")
    turns = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    yarn = _needed(given, "original_max_position_embeddings"), *turns, mscale or 1.0, all_dim
    return {**fields, "rotary_factor": float(_needed(given, "factor")), "rotary_yarn": tuple(map(float, yarn))}


def write_config(family: Family, model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """Return the config.json of a model in one family's words; whether it says all is for `find_export_family`."""
    (first, *_) = with_experts(segments_of(model, moe))
    flags, hidden, top_k = flags_of(model, moe), first.config.hidden_dim, first.moe.top_k
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rotary_yarn:
        rope |= {"rope_type": "yarn", "factor": model.rotary_factor}
        rope |= dict(zip(YARN_KEYS if model.rotary_yarn[4] else YARN_KEYS[:3], model.rotary_yarn, strict=False))
        rope["original_max_position_embeddings"] = int(model.rotary_yarn[0])
    elif model.rotary_factor != 1:
        rope |= {"rope_type": "linear", "factor": model.rotary_factor}
    keys = {key: getattr(model, field) for key, field in MODEL_KEYS.items()} | {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        family.experts_key: first.moe.num_experts,
        "num_experts_per_tok": top_k,
        "intermediate_size": model.ffn_dim if family.dense_blocks else hidden,
        "rope_parameters": rope,
        "dtype": model.dtype,
    }
    of_some = {  # families
        "router_aux_loss_coef": float(f"{moe.aux_loss_weight * sum(flags) / top_k:.12g}"),  # as before it was divided
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
    keys |= {"moe_intermediate_size": hidden} if family.dense_blocks else {}
    return keys | {key: of_some[key] for key in family.own_keys if key in of_some}


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
            written = described(*read_config(write_config(family, model, moe))[1:])
        except UserError:
            continue
        differing = [name for name in wanted if wanted[name] != written[name]]
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
    (first, *_) = of_experts = with_experts(segments)
    effective = {"kv_heads": "key_value_heads", "head_dim": "head_size", "v_head_dim": "value_size"}
    names = (*FIXED, *MODEL_KEYS.values(), "rotary_base", "rotary_factor", "rotary_yarn")
    names += ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")
    found = {f"ModelConfig.{name}": getattr(model, effective.get(name, name)) for name in names}
    names = ("residual", "renormalize", "routed_scale", "capacity_factor")
    found |= {f"MoEConfig.{name}": getattr(moe, name) for name in names}
    # a model is served by 'topk' where it was trained with 'group_limited', which insists on groups
    routers = {"group_limited": "topk"}
    experts = {
        (part.moe.num_experts, part.moe.top_k, routers.get(part.moe.router, part.moe.router), part.config.hidden_dim)
        for part in of_experts
    }
    return found | {
        "ModelConfig.segments": flags_of(model, moe),
        "ModelConfig.dense_hidden_dim": {part.config.ffn_dim for part in segments if part.config.moe_every != 1},
        "MoEConfig.num_experts": experts,
        "MoEConfig.shared_experts": moe.shared_ffn_dim(first.config.hidden_dim),
        "MoEConfig.expert_groups": (moe.expert_groups, moe.kept_groups if moe.expert_groups else 1),
    }
