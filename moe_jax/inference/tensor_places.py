"""Which tensor of a checkpoint of transformers is which part of which leaf of ours.

Inputs: a family and configs (`families.py`). Outputs: a `TensorPlace` for every tensor. A matrix in the files is [out,
in], as PyTorch multiplies; ours are [in, out]. A leaf of the units is stacked over units, one of the bank over MoE
layers and experts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from moe_jax.inference.families import Family
from moe_jax.models.config import ModelConfig, Segment, segments_of
from moe_jax.moe.config import MoEConfig
from moe_jax.storage.leaf_store import Index

# an FFN's matrices: SwiGLU's gate half, its other half, the matrix back
OURS, FFN, BACK = ("w_gate", "w_in", "w_out"), ("gate_proj", "up_proj", "down_proj"), 2


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """One tensor of the files, and which part of which leaf of ours it is."""

    name: str
    shape: tuple[int, ...]
    leaf: str  # such as 'params/dense/units/attention/q'
    index: Index  # numbers for the dims of the leaf that the part has one row of
    part: tuple[int, ...]  # shape of the part, whose numbers are those of the tensor
    transposed: bool = False  # once it is transposed, as a matrix
    float32: bool = False  # written in float32 whatever the dtype of the others
    # (name, expert, half or None) of the same numbers in files that hold all experts of a layer in one tensor:
    # [E, 2 F, M] with the gate half first, or [E, M, F]
    fused: tuple[str, int, int | None] | None = None
    # of the part's last dim so many, at its end, are pairs of rotated features: next to each other in the files, in two
    # halves here
    pairs: int = 0

    def part_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part, with all dims of a leaf of this shape."""
        index = (*self.index, *(slice(None),) * (len(shape) - len(self.index)))
        return tuple(size if isinstance(at, slice) else 1 for size, at in zip(shape, index, strict=True))

    def to_part(self, tensor: np.ndarray) -> np.ndarray:
        """Return the part of the leaf from the tensor."""
        part = (tensor.T if self.transposed else tensor).reshape(self.part)
        return part[..., self._order()] if self.pairs else part

    def to_tensor(self, part: np.ndarray) -> np.ndarray:
        """Return the tensor from the part of the leaf."""
        part = part[..., np.argsort(self._order())] if self.pairs else part
        return part.reshape(self.shape[::-1]).T if self.transposed else part.reshape(self.shape)

    def _order(self) -> np.ndarray:
        """Return which feature of the files each of ours is."""
        order = np.arange(self.part[-1])
        pairs = order[order.size - self.pairs :]
        return np.concatenate([order[: order.size - self.pairs], pairs[::2], pairs[1::2]])


def tensor_places(family: Family, model: ModelConfig, moe: MoEConfig) -> list[TensorPlace]:
    """Return every tensor of a checkpoint, in the order of our leaves' layers."""
    vocab, dim, dense = model.vocab_size, model.model_dim, "params/dense"
    places = [
        TensorPlace("model.embed_tokens.weight", (vocab, dim), f"{dense}/embedding/tokens", (), (vocab, dim)),
        _vector("model.norm.weight", f"{dense}/norm/scale", (), (dim,)),
    ]
    if not model.tied_head:
        places.append(TensorPlace("lm_head.weight", (vocab, dim), f"{dense}/embedding/head", (), (vocab, dim)))
    blocks = 0
    for segment in segments_of(model, moe):
        config, units = segment.config, f"{dense}/units/{segment.name}"
        kinds = (["dense"] if config.moe_every != 1 else []) + (["gate"] if segment.has_experts else [])
        for unit, kind in itertools.product(range(config.units), kinds):
            at, attention = f"model.layers.{blocks}", "dense_attention" if kind == "dense" else "attention"
            make = _latent_attention if config.kv_lora_rank else _attention
            places += make(config, at, f"{units}/{attention}", unit)
            norm = f"{units}/{kind}/norm/scale"
            places.append(_vector(f"{at}.post_attention_layernorm.weight", norm, (unit,), (dim,)))
            if kind == "gate":
                places += _experts(family, segment, at, units, unit)
            else:
                names = [f"{at}.mlp.{name}.weight" for name in FFN]
                places += _ffn(names, f"{units}/dense", (unit,), dim, config.ffn_dim)
            blocks += 1
    return places


def _attention(config: ModelConfig, at: str, module: str, unit: int) -> list[TensorPlace]:
    """Return the tensors of the attention `module` of a unit, in the block `at` of the files."""
    dim, size, queries, keys = config.model_dim, config.head_size, config.heads, config.key_value_heads
    if "qkv" in config.qkv_matrices:
        leaves = ("q", queries, "qkv", (0,)), ("k", keys, "qkv", (1,)), ("v", keys, "qkv", (2,))
    else:
        leaves = ("q", queries, "q", ()), ("k", keys, "kv", (0,)), ("v", keys, "kv", (1,))
    places = [_vector(f"{at}.input_layernorm.weight", f"{module}/norm/scale", (unit,), (dim,))]
    for name, heads, leaf, inner in leaves:
        tensor, leaf = f"{at}.self_attn.{name}_proj", f"{module}/{leaf}"
        sizes, part = (dim, heads * size), (dim, heads, size)
        places.append(_matrix(f"{tensor}.weight", leaf, (unit, slice(None), *inner), sizes, part))
        if config.attention_bias:
            places.append(_vector(f"{tensor}.bias", f"{leaf}_bias", (unit, *inner), (heads, size)))
        if config.qk_norm != "none" and name != "v":
            part = (heads, size) if config.qk_norm == "width" else (size,)
            places.append(_vector(f"{at}.self_attn.{name}_norm.weight", f"{module}/{name}_norm/scale", (unit,), part))
    return [*places, *_out(config, at, module, unit)]


def _out(config: ModelConfig, at: str, module: str, unit: int) -> list[TensorPlace]:
    """Return the tensors of attention's last matrix."""
    dim, heads, size, name = config.model_dim, config.heads, config.value_size, f"{at}.self_attn.o_proj"
    places = [_matrix(f"{name}.weight", f"{module}/out", (unit,), (heads * size, dim), (heads, size, dim))]
    if config.attention_bias:
        places.append(_vector(f"{name}.bias", f"{module}/out_bias", (unit,), (dim,)))
    return places


def _latent_attention(config: ModelConfig, at: str, module: str, unit: int) -> list[TensorPlace]:
    """Return the same of latent attention."""
    dim, heads, rank, rotated = config.model_dim, config.heads, config.kv_lora_rank or 0, config.qk_rope_head_dim or 0
    places, attn = [_vector(f"{at}.input_layernorm.weight", f"{module}/norm/scale", (unit,), (dim,))], f"{at}.self_attn"

    def add(name, leaf, sizes, part=(), pairs=0, bias=False):
        place = _matrix(f"{attn}.{name}.weight", f"{module}/{leaf}", (unit,), sizes, part)
        places.append(dataclasses.replace(place, pairs=pairs))
        if bias and config.attention_bias:
            place = _vector(f"{attn}.{name}.bias", f"{module}/{leaf}_bias", (unit,), sizes[1:])
            places.append(dataclasses.replace(place, pairs=pairs))

    inner, of_query = config.q_lora_rank, (heads, config.head_size)
    if inner:
        add("q_a_proj", "q_down", (dim, inner), bias=True)
        places.append(_vector(f"{attn}.q_a_layernorm.weight", f"{module}/q_norm/scale", (unit,), (inner,)))
        add("q_b_proj", "q_up", (inner, math.prod(of_query)), (inner, *of_query), rotated)
    else:
        add("q_proj", "q", (dim, math.prod(of_query)), (dim, *of_query), rotated)
    add("kv_a_proj_with_mqa", "kv_down", (dim, rank + rotated), pairs=rotated, bias=True)
    places.append(_vector(f"{attn}.kv_a_layernorm.weight", f"{module}/kv_norm/scale", (unit,), (rank,)))
    of_key = heads, config.head_size - rotated + config.value_size
    add("kv_b_proj", "kv_up", (rank, math.prod(of_key)), (rank, *of_key))
    return [*places, *_out(config, at, module, unit)]


def _experts(family: Family, segment: Segment, at: str, units: str, unit: int) -> list[TensorPlace]:
    """Return the tensors of the gate and the experts of a unit, in the block `at` of the files."""
    moe, dim, hidden = segment.moe, segment.config.model_dim, segment.config.hidden_dim
    places = [_matrix(f"{at}.{family.gate}", f"{units}/gate/w_gate", (unit,), (dim, moe.num_experts))]
    if moe.router == "sigmoid_bias":
        name, leaf = f"{at}.mlp.gate.e_score_correction_bias", f"{units}/gate/choice_bias"
        places.append(dataclasses.replace(_vector(name, leaf, (unit,), (moe.num_experts,)), float32=True))
    if shared := moe.shared_ffn_dim(hidden):
        names = [f"{at}.{family.shared}.{name}.weight" for name in FFN]
        places += _ffn(names, f"{units}/shared", (unit,), dim, shared)
    for j in range(moe.num_experts):
        names = [f"{at}.{family.experts.format(j=j)}.{name}.weight" for name in family.matrices]
        for matrix, place in enumerate(_ffn(names, f"params/bank/{segment.name}", (unit, j), dim, hidden)):
            half, tensor = (None, FFN[BACK]) if matrix == BACK else (matrix, "gate_up_proj")
            places.append(dataclasses.replace(place, fused=(f"{at}.mlp.experts.{tensor}", j, half)))
    return places


def _ffn(names: Sequence[str], leaf: str, index: Index, dim: int, hidden: int) -> list[TensorPlace]:
    sizes = (dim, hidden), (dim, hidden), (hidden, dim)
    return [_matrix(name, f"{leaf}/{own}", index, size) for name, own, size in zip(names, OURS, sizes, strict=True)]


def _matrix(name: str, leaf: str, index: Index, sizes: tuple[int, int], part: tuple[int, ...] = ()) -> TensorPlace:
    """Return the place of a matrix; sizes: of ours, before and after it; part: its shape where it has more dims."""
    return TensorPlace(name, sizes[::-1], leaf, index, part or sizes, transposed=True)


def _vector(name: str, leaf: str, index: Index, part: tuple[int, ...]) -> TensorPlace:
    return TensorPlace(name, (math.prod(part),), leaf, index, part)
