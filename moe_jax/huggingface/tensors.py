"""Which tensor of a checkpoint's files is which part of which leaf of ours.

Inputs: a family and the configs. Outputs: a list of `TensorPlace`. A matrix in the files is [out, in], as PyTorch
multiplies; ours are [in, out]. A leaf of the units is stacked over units, one of the bank over MoE layers and experts.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.huggingface.families import Family
from moe_jax.models.config import ModelConfig
from moe_jax.models.segments import path_of, segments_of, with_experts
from moe_jax.moe.config import MoEConfig

Index = tuple[int | slice, ...]
ALL = slice(None)
GATE, UP, BACK = range(3)  # of an expert's or FFN's matrices: SwiGLU's gate half, its other half, the matrix back
OURS = ("w_gate", "w_in", "w_out")


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """One tensor.

    Attributes:
      name: in the files.
      shape: in the files.
      leaf: name of our leaf, such as 'params/dense/units/attention/q'.
      index: which part of the leaf it is, numbers for the dims that it has one row of.
      part: shape of that part, whose numbers are those of the tensor, transposed if it is a matrix.
      transposed: whether it is.
      float32: whether it is written in float32 whatever the dtype of the others.
      fused: (name, expert, half or None) of the same numbers in files that hold all experts of a layer in one tensor:
        [E, 2 F, M] with the gate half first, or [E, M, F].
    """

    name: str
    shape: tuple[int, ...]
    leaf: str
    index: Index
    part: tuple[int, ...]
    transposed: bool = False
    float32: bool = False
    fused: tuple[str, int, int | None] | None = None

    def to_part(self, tensor: np.ndarray) -> np.ndarray:
        """Return the part of the leaf from the tensor."""
        return (tensor.T if self.transposed else tensor).reshape(self.part)

    def to_tensor(self, part: np.ndarray) -> np.ndarray:
        """Return the tensor from the part of the leaf."""
        return part.reshape(self.shape[::-1]).T if self.transposed else part.reshape(self.shape)


def tensor_places(family: Family, model: ModelConfig, moe: MoEConfig) -> list[TensorPlace]:
    """Return every tensor of a checkpoint, in the order of our leaves' layers."""
    vocab, dim = model.vocab_size, model.model_dim
    whole = [
        TensorPlace("model.embed_tokens.weight", (vocab, dim), _dense("embedding/tokens"), (), (vocab, dim)),
        TensorPlace("model.norm.weight", (dim,), _dense("norm/scale"), (), (dim,)),
    ]
    if not model.tied_head:
        whole.append(TensorPlace("lm_head.weight", (vocab, dim), _dense("embedding/head"), (), (vocab, dim)))
    segments, layer = segments_of(model, moe), 0
    in_bank = with_experts(segments)
    for segment in segments:
        units = "/".join(("params/dense/units", *path_of(segment, segments)))
        bank = "/".join(("params/bank", *path_of(segment, in_bank))) if segment.has_experts else ""
        for unit in range(segment.units):
            names = _Layer(family, segment.config, segment.moe, units, unit, bank)
            if segment.config.moe_every != 1:
                whole += names.attention(layer, "dense_attention") + names.dense(layer)
                layer += 1
            if segment.has_experts:
                whole += names.attention(layer, "attention") + names.experts(layer)
                layer += 1
    return whole


def _dense(name: str) -> str:
    return f"params/dense/{name}"


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The tensors of the blocks of one unit.

    Attributes:
      config, moe: of its segment; units, bank: names that its leaves begin with; unit: its place in the segment.
    """

    family: Family
    config: ModelConfig
    moe: MoEConfig
    units: str
    unit: int
    bank: str

    def attention(self, layer: int, module: str) -> list[TensorPlace]:
        config, at = self.config, f"model.layers.{layer}"
        dim, size, queries, keys = config.model_dim, config.head_size, config.heads, config.key_value_heads
        places = [self._vector(f"{at}.input_layernorm.weight", f"{module}/norm/scale", (dim,))]
        fused = "qkv" in config.qkv_matrices
        for number, (name, heads) in enumerate((("q", queries), ("k", keys), ("v", keys))):
            leaf = "qkv" if fused else "q" if name == "q" else "kv"
            inner = (number,) if fused else () if name == "q" else (number - 1,)
            tensor = f"{at}.self_attn.{name}_proj"
            index = (self.unit, ALL, *inner)
            places.append(
                TensorPlace(
                    f"{tensor}.weight", (heads * size, dim), f"{self.units}/{module}/{leaf}", index,
                    (dim, heads, size), transposed=True,
                )
            )  # fmt: skip
            if config.attention_bias:
                places.append(
                    self._vector(f"{tensor}.bias", f"{module}/{leaf}_bias", (heads * size,), inner, (heads, size))
                )
        if config.qk_norm != "none":
            for name, heads in (("q", queries), ("k", keys)):
                width = config.qk_norm == "width"
                shape, part = ((heads * size,), (heads, size)) if width else ((size,), (size,))
                places.append(
                    self._vector(f"{at}.self_attn.{name}_norm.weight", f"{module}/{name}_norm/scale", shape, (), part)
                )
        out = TensorPlace(
            f"{at}.self_attn.o_proj.weight", (dim, queries * size), f"{self.units}/{module}/out", (self.unit,),
            (queries, size, dim), transposed=True,
        )  # fmt: skip
        places.append(out)
        if config.attention_bias:
            places.append(self._vector(f"{at}.self_attn.o_proj.bias", f"{module}/out_bias", (dim,)))
        return places

    def dense(self, layer: int) -> list[TensorPlace]:
        config, at = self.config, f"model.layers.{layer}"
        norm = self._vector(f"{at}.post_attention_layernorm.weight", "dense/norm/scale", (config.model_dim,))
        return [norm, *self._ffn(f"{at}.mlp", "dense", config.ffn_dim)]

    def experts(self, layer: int) -> list[TensorPlace]:
        config, moe, family, at = self.config, self.moe, self.family, f"model.layers.{layer}"
        dim, hidden, number = config.model_dim, config.hidden_dim, moe.num_experts
        places = [
            self._vector(f"{at}.post_attention_layernorm.weight", "gate/norm/scale", (dim,)),
            self._matrix(f"{at}.{family.gate}", "gate/w_gate", dim, number),
        ]
        if moe.router == "sigmoid_bias":
            name = f"{at}.mlp.gate.e_score_correction_bias"
            places.append(dataclasses.replace(self._vector(name, "gate/choice_bias", (number,)), float32=True))
        shared = moe.shared_ffn_dim(hidden)
        if shared:
            places += self._ffn(f"{at}.{family.shared}", "shared", shared)
        for j in range(number):
            for matrix, name in enumerate(family.matrices):
                sizes = (hidden, dim) if matrix == BACK else (dim, hidden)
                fused = f"{at}.mlp.experts.{'down_proj' if matrix == BACK else 'gate_up_proj'}"
                places.append(
                    TensorPlace(
                        f"{at}.{family.experts.format(j=j)}.{name}.weight", sizes[::-1], f"{self.bank}/{OURS[matrix]}",
                        (self.unit, j), sizes, transposed=True, fused=(fused, j, None if matrix == BACK else matrix),
                    )
                )  # fmt: skip
        return places

    def _ffn(self, module: str, ours: str, hidden: int) -> list[TensorPlace]:
        dim, places = self.config.model_dim, []
        for matrix, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            sizes = (hidden, dim) if matrix == BACK else (dim, hidden)
            places.append(self._matrix(f"{module}.{name}.weight", f"{ours}/{OURS[matrix]}", *sizes))
        return places

    def _matrix(self, name: str, leaf: str, before: int, after: int) -> TensorPlace:
        """Return the place of a matrix, ours [before, after]."""
        return TensorPlace(
            name, (after, before), f"{self.units}/{leaf}", (self.unit,), (before, after), transposed=True
        )

    def _vector(self, name: str, leaf: str, shape, inner: Index = (), part=None) -> TensorPlace:
        return TensorPlace(name, shape, f"{self.units}/{leaf}", (self.unit, *inner), part or shape)
