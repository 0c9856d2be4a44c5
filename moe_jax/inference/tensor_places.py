"""Which tensor of a checkpoint of transformers is which part of which leaf of ours.

Inputs: a family and configs (`families.py`). Outputs: a `TensorPlace` for every tensor. A matrix in the files is [out,
in], as PyTorch multiplies; ours are [in, out]. A leaf of the units is stacked over units, one of the bank over MoE
layers and experts. Tables name the leaves that a model may have; its shapes say which of them it has.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from moe_jax.inference.families import Family
from moe_jax.models.config import ModelConfig, segments_of
from moe_jax.models.counts import leaf_shapes
from moe_jax.models.language_model import segment_of
from moe_jax.models.transformer import matrix_dims
from moe_jax.moe.config import MoEConfig
from moe_jax.storage.leaf_store import Index

# an FFN's matrices: SwiGLU's gate half, its other half, the matrix back
OURS, FFN, BACK = ("w_gate", "w_in", "w_out"), ("gate_proj", "up_proj", "down_proj"), 2
# of a block: the module in the files, the leaf of our attention, which of the matrices in that leaf
ATTENTION = (
    ("input_layernorm", "norm/scale", ()),
    *((f"self_attn.{name}_proj", "qkv", (i,)) for i, name in enumerate("qkv")),
    ("self_attn.q_proj", "q", ()),
    *((f"self_attn.{name}_proj", "kv", (i,)) for i, name in enumerate("kv")),
    ("self_attn.q_norm", "q_norm/scale", ()),
    ("self_attn.k_norm", "k_norm/scale", ()),
    ("self_attn.o_proj", "out", ()),
)
LATENT_ATTENTION = (
    ("input_layernorm", "norm/scale", ()),
    ("self_attn.q_proj", "q", ()),
    ("self_attn.q_a_proj", "q_down", ()),
    ("self_attn.q_a_layernorm", "q_norm/scale", ()),
    ("self_attn.q_b_proj", "q_up", ()),
    ("self_attn.kv_a_proj_with_mqa", "kv_down", ()),
    ("self_attn.kv_a_layernorm", "kv_norm/scale", ()),
    ("self_attn.kv_b_proj", "kv_up", ()),
    ("self_attn.o_proj", "out", ()),
)
ROTATED = ("q", "q_up", "kv_down")  # leaves of latent attention that end in rotated features


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
    shapes, places, blocks = file_shapes(model, moe), [], itertools.count()

    def add(name, leaf, index: Index = (), **more):
        """Add the place of a tensor that is the part `index` of a leaf, if the model has that."""
        if leaf not in shapes:
            return
        every = itertools.zip_longest(shapes[leaf], index, fillvalue=slice(None))
        part = tuple(size for size, at in every if isinstance(at, slice))
        shape = part if "/embedding/" in leaf else (math.prod(part),)
        if (dims := matrix_dims(leaf.rpartition("/")[2])) is not None:
            shape = math.prod(part[len(dims[0]) :]), math.prod(part[: len(dims[0])])  # [out, in]
        places.append(TensorPlace(name, shape, leaf, index, part, transposed=dims is not None, **more))

    add("model.embed_tokens.weight", "params/dense/embedding/tokens")
    add("model.norm.weight", "params/dense/norm/scale")
    add("lm_head.weight", "params/dense/embedding/head")
    for segment in segments_of(model, moe):
        config, units = segment.config, f"params/dense/units/{segment.name}"
        kinds = (["dense"] if config.moe_every != 1 else []) + (["gate"] if segment.has_experts else [])
        for unit, kind in itertools.product(range(config.units), kinds):
            at, attention = f"model.layers.{next(blocks)}", "dense_attention" if kind == "dense" else "attention"
            for module, leaf, which in LATENT_ATTENTION if config.kv_lora_rank else ATTENTION:
                leaf, pairs = f"{units}/{attention}/{leaf}", config.qk_rope_head_dim or 0 if leaf in ROTATED else 0
                add(f"{at}.{module}.weight", leaf, (unit, slice(None), *which) if which else (unit,), pairs=pairs)
                add(f"{at}.{module}.bias", f"{leaf}_bias", (unit, *which), pairs=pairs)
            add(f"{at}.post_attention_layernorm.weight", f"{units}/{kind}/norm/scale", (unit,))
            add(f"{at}.{family.gate}", f"{units}/gate/w_gate", (unit,))
            add(f"{at}.mlp.gate.e_score_correction_bias", f"{units}/gate/choice_bias", (unit,), float32=True)
            module, ffn = ("mlp", "dense") if kind == "dense" else ("mlp.shared_experts", "shared")
            for matrix, leaf in zip(FFN, OURS, strict=True):
                add(f"{at}.{module}.{matrix}.weight", f"{units}/{ffn}/{leaf}", (unit,))
            for expert, matrix in itertools.product(range(segment.moe.num_experts if kind == "gate" else 0), range(3)):
                name = f"{at}.{family.experts.format(j=expert)}.{family.matrices[matrix]}.weight"
                half, tensor = (None, FFN[BACK]) if matrix == BACK else (matrix, "gate_up_proj")
                fused = f"{at}.mlp.experts.{tensor}", expert, half
                add(name, f"params/bank/{segment.name}/{OURS[matrix]}", (unit, expert), fused=fused)
    return places


def file_shapes(model: ModelConfig, moe: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the parameters in a checkpoint; leaves of the bank are [L, E, ...]."""
    segments = {segment.name: segment for segment in segments_of(model, moe)}
    shapes = {}
    for name, shape in leaf_shapes(model, moe, model.vocab_size).items():
        if segment := segments.get(segment_of(name)):
            shape = (segment.config.moe_layers, segment.moe.num_experts, *shape[1:])
        shapes[f"params/{name}"] = shape
    return shapes
