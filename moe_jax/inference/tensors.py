"""safetensors folders, read and written tensor by tensor, and which tensor is which part of which leaf of ours.

Of files that are read only what is asked for is in memory; of files that are written one at a time. A matrix in the
files is [out, in], as PyTorch multiplies; ours are [in, out]. A leaf of the units is stacked over units, one of the
bank over MoE layers and experts.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy has bfloat16 once this is imported
import numpy as np

from moe_jax.errors import UserError
from moe_jax.inference.config_keys import Family
from moe_jax.models.config import ModelConfig
from moe_jax.models.segments import segments_of
from moe_jax.moe.config import MoEConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2**27
DTYPES = ("F32", "BF16", "F16")


def library() -> Any:
    """Return the package `safetensors`.

    Raises:
      UserError: it is not installed.
    """
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise UserError(
            "this needs the package 'safetensors', which is not installed; pip install 'moe_jax[hf]'"
        ) from error
    return safetensors


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises:
      UserError: there is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give a folder with a checkpoint of transformers") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); copy the folder again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, not a JSON object; copy the folder again")
    return found


class TensorFolder:
    """The tensors of a checkpoint.

    Attributes:
      names: of all tensors.
    """

    def __init__(self, path: Path):
        """Open the files; nothing is read but their headers.

        Raises:
          UserError: files that are missing, damaged, or disagree with the index.
        """
        self.path = path
        self._open: dict[Path, Any] = {}
        index = path / INDEX
        if index.exists():
            entries = read_json(index).get("weight_map")
            if not isinstance(entries, dict):
                raise UserError(f"{index} has no weight_map; copy the folder again")
            self._file = {name: path / str(file) for name, file in entries.items()}
        else:
            single = path / SINGLE
            if not single.exists():
                raise UserError(f"{path} has neither {SINGLE} nor {INDEX}; give a folder with safetensors files")
            self._file = dict.fromkeys(self._handle(single).keys(), single)
        for file in sorted(set(self._file.values())):
            held = set(self._handle(file).keys())
            for name in sorted(name for name, where in self._file.items() if where == file and name not in held):
                raise UserError(f"{file} has no tensor {name}, which {INDEX} says it has; copy the folder again")

    @property
    def names(self) -> set[str]:
        return set(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
          UserError: its dtype is none that can be read.
        """
        part = self._handle(self._file[name]).get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise UserError(f"{self._file[name]}: {name} is {part.get_dtype()}, and moe_jax reads {', '.join(DTYPES)}")
        return tuple(part.get_shape())

    def read(self, name: str) -> np.ndarray:
        """Return a tensor."""
        return self._handle(self._file[name]).get_tensor(name)

    def read_rows(self, name: str, expert: int, rows: slice) -> np.ndarray:
        """Return [expert, rows] of a tensor [E, ..., ...]."""
        return self._handle(self._file[name]).get_slice(name)[expert : expert + 1, rows][0]

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            safetensors = library()
            try:
                self._open[file] = safetensors.safe_open(str(file), framework="numpy")
            except FileNotFoundError as error:
                raise UserError(f"{file} does not exist, and {INDEX} names it; copy the folder again") from error
            except (safetensors.SafetensorError, OSError) as error:
                raise UserError(f"cannot read {file} ({error}): it is damaged or not whole; copy it again") from error
        return self._open[file]


class TensorWriter:
    """Write tensors that come one after the other into files of a folder, and the index of these."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES):
        self._folder, self._limit = folder, shard_bytes
        self._held: dict[str, np.ndarray] = {}
        self._files: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: np.ndarray) -> None:
        """Write a tensor, at once or together with those that come next."""
        held = sum(array.nbytes for array in self._held.values())
        if self._held and held + tensor.nbytes > self._limit:
            self._flush()
        self._held[name] = np.ascontiguousarray(tensor)
        self._total += tensor.nbytes

    def close(self) -> None:
        """Write what is left, and name the files as transformers looks for them."""
        self._flush()
        number = len(self._files)
        if number == 1:
            self._part(0).rename(self._folder / SINGLE)
            return
        weight_map = {}
        for index, names in enumerate(self._files):
            file = f"model-{index + 1:05d}-of-{number:05d}.safetensors"
            self._part(index).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}"

    def _flush(self) -> None:
        library().numpy.save_file(self._held, str(self._part(len(self._files))), metadata={"format": "pt"})
        self._files.append(list(self._held))
        self._held = {}


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
    layer = 0
    for segment in segments_of(model, moe):
        units, bank = f"params/dense/units/{segment.name}", f"params/bank/{segment.name}"
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
