"""safetensors folders, read and written tensor by tensor, and which tensor is which part of which leaf of ours.

Of files that are read only what is asked for is in memory; of files that are written one at a time. A matrix in the
files is [out, in], as PyTorch multiplies; ours are [in, out]. A leaf of the units is stacked over units, one of the
bank over MoE layers and experts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy has bfloat16 once this is imported
import numpy as np

from moe_jax.errors import UserError
from moe_jax.inference.config_keys import Family
from moe_jax.models.config import ModelConfig, Segment, segments_of
from moe_jax.moe.config import MoEConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2**27
DTYPES = ("F32", "BF16", "F16")


def library() -> Any:
    """Return the package `safetensors`, or raise a UserError where it is not installed."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise UserError(
            "this needs the package 'safetensors', which is not installed; pip install 'moe_jax[hf]'"
        ) from error
    return safetensors


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file, or raise a UserError."""
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
    """The tensors of a checkpoint: `names` of all of them; a UserError for files that are missing or damaged."""

    def __init__(self, path: Path):
        """Open the files; nothing is read but their headers."""
        self.path = path
        self._open: dict[Path, Any] = {}
        index, single = path / INDEX, path / SINGLE
        if index.exists():
            entries = read_json(index).get("weight_map")
            if not isinstance(entries, dict):
                raise UserError(f"{index} has no weight_map; copy the folder again")
            self._file = {name: path / str(file) for name, file in entries.items()}
        elif single.exists():
            self._file = dict.fromkeys(self._handle(single).keys(), single)
        else:
            raise UserError(f"{path} has neither {SINGLE} nor {INDEX}; give a folder with safetensors files")
        for file in sorted(set(self._file.values())):
            held = set(self._handle(file).keys())
            for name in sorted(name for name, where in self._file.items() if where == file and name not in held):
                raise UserError(f"{file} has no tensor {name}, which {INDEX} says it has; copy the folder again")
        self.names = set(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, or raise a UserError where its dtype is none that can be read."""
        part = self._handle(self._file[name]).get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise UserError(f"{self._file[name]}: {name} is {part.get_dtype()}, and moe_jax reads {', '.join(DTYPES)}")
        return tuple(part.get_shape())

    def read(self, name: str, part: tuple[int, slice] | None = None) -> np.ndarray:
        """Return a tensor, or of one [E, ..., ...] the rows of an expert, `part`."""
        handle = self._handle(self._file[name])
        if part is None:
            return handle.get_tensor(name)
        expert, rows = part
        return handle.get_slice(name)[expert : expert + 1, rows][0]

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


def write_tensors(folder: Path, named: Iterable[tuple[str, np.ndarray]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors, (name, array) one after the other, into files of a folder, as transformers looks for them.

    Args:
      shard_bytes: of one file, at most, but for a tensor that is larger by itself; several files get an index.
    """
    files, held, total = [], {}, 0

    def flush():
        path = folder / f"part-{len(files)}"
        library().numpy.save_file(held, str(path), metadata={"format": "pt"})
        files.append((path, list(held)))
        held.clear()

    for name, tensor in named:
        if held and sum(array.nbytes for array in held.values()) + tensor.nbytes > shard_bytes:
            flush()
        held[name] = np.ascontiguousarray(tensor)
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        files[0][0].rename(folder / SINGLE)
        return
    weight_map = {}
    for number, (path, names) in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


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

    def to_tensor(self, part: np.ndarray) -> np.ndarray:
        """Return the tensor from the part of the leaf."""
        return part.reshape(self.shape[::-1]).T if self.transposed else part.reshape(self.shape)


def tensor_places(family: Family, model: ModelConfig, moe: MoEConfig) -> list[TensorPlace]:
    """Return every tensor of a checkpoint, in the order of our leaves' layers."""
    vocab, dim, dense = model.vocab_size, model.model_dim, "params/dense"
    places = [
        TensorPlace("model.embed_tokens.weight", (vocab, dim), f"{dense}/embedding/tokens", (), (vocab, dim)),
        TensorPlace("model.norm.weight", (dim,), f"{dense}/norm/scale", (), (dim,)),
    ]
    if not model.tied_head:
        places.append(TensorPlace("lm_head.weight", (vocab, dim), f"{dense}/embedding/head", (), (vocab, dim)))
    layer = 0
    for segment in segments_of(model, moe):
        config, units, bank = segment.config, f"{dense}/units/{segment.name}", f"params/bank/{segment.name}"
        for unit in range(segment.config.units):
            if config.moe_every != 1:
                at, norm = f"model.layers.{layer}", f"{units}/dense/norm/scale"
                places += _attention(config, at, f"{units}/dense_attention", unit)
                places.append(_vector(f"{at}.post_attention_layernorm.weight", norm, unit, (config.model_dim,)))
                places += _ffn(f"{at}.mlp", f"{units}/dense", unit, config.model_dim, config.ffn_dim)
                layer += 1
            if segment.has_experts:
                at = f"model.layers.{layer}"
                places += _attention(config, at, f"{units}/attention", unit)
                places += _experts(family, segment, at, (units, bank), unit)
                layer += 1
    return places


def _attention(config: ModelConfig, at: str, module: str, unit: int) -> list[TensorPlace]:
    """Return the tensors of the attention `module` of a unit, in the block `at` of the files."""
    dim, size, queries, keys = config.model_dim, config.head_size, config.heads, config.key_value_heads
    places = [_vector(f"{at}.input_layernorm.weight", f"{module}/norm/scale", unit, (dim,))]
    fused = "qkv" in config.qkv_matrices
    for number, (name, heads) in enumerate((("q", queries), ("k", keys), ("v", keys))):
        leaf = "qkv" if fused else "q" if name == "q" else "kv"
        inner = (number,) if fused else () if name == "q" else (number - 1,)
        tensor, shape, part = f"{at}.self_attn.{name}_proj", (heads * size, dim), (dim, heads, size)
        index = (unit, ALL, *inner)
        places.append(TensorPlace(f"{tensor}.weight", shape, f"{module}/{leaf}", index, part, transposed=True))
        if config.attention_bias:
            shape, part, index = (heads * size,), (heads, size), (unit, *inner)
            places.append(TensorPlace(f"{tensor}.bias", shape, f"{module}/{leaf}_bias", index, part))
    for name, heads in (("q", queries), ("k", keys)) if config.qk_norm != "none" else ():
        width = config.qk_norm == "width"
        shape, part = ((heads * size,), (heads, size)) if width else ((size,), (size,))
        name = f"{at}.self_attn.{name}_norm.weight", f"{module}/{name}_norm/scale"
        places.append(TensorPlace(name[0], shape, name[1], (unit,), part))
    name, shape, part = f"{at}.self_attn.o_proj", (dim, queries * size), (queries, size, dim)
    places.append(TensorPlace(f"{name}.weight", shape, f"{module}/out", (unit,), part, transposed=True))
    if config.attention_bias:
        places.append(_vector(f"{name}.bias", f"{module}/out_bias", unit, (dim,)))
    return places


def _experts(family: Family, segment: Segment, at: str, ours: tuple[str, str], unit: int) -> list[TensorPlace]:
    """Return the tensors of the experts of a unit and of what is beside them; ours: leaves of units, of the bank."""
    config, moe, (units, bank) = segment.config, segment.moe, ours
    dim, hidden, number = config.model_dim, config.hidden_dim, moe.num_experts
    places = [
        _vector(f"{at}.post_attention_layernorm.weight", f"{units}/gate/norm/scale", unit, (dim,)),
        _matrix(f"{at}.{family.gate}", f"{units}/gate/w_gate", (unit,), (dim, number)),
    ]
    if moe.router == "sigmoid_bias":
        name, leaf = f"{at}.mlp.gate.e_score_correction_bias", f"{units}/gate/choice_bias"
        places.append(dataclasses.replace(_vector(name, leaf, unit, (number,)), float32=True))
    shared = moe.shared_ffn_dim(hidden)
    if shared:
        places += _ffn(f"{at}.{family.shared}", f"{units}/shared", unit, dim, shared)
    for j in range(number):
        for matrix, name in enumerate(family.matrices):
            sizes = (hidden, dim) if matrix == BACK else (dim, hidden)
            together = f"{at}.mlp.experts.{'down_proj' if matrix == BACK else 'gate_up_proj'}"
            tensor = f"{at}.{family.experts.format(j=j)}.{name}.weight"
            place = _matrix(tensor, f"{bank}/{OURS[matrix]}", (unit, j), sizes)
            places.append(dataclasses.replace(place, fused=(together, j, None if matrix == BACK else matrix)))
    return places


def _ffn(module: str, ours: str, unit: int, dim: int, hidden: int) -> list[TensorPlace]:
    places = []
    for matrix, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        sizes = (hidden, dim) if matrix == BACK else (dim, hidden)
        places.append(_matrix(f"{module}.{name}.weight", f"{ours}/{OURS[matrix]}", (unit,), sizes))
    return places


def _matrix(name: str, leaf: str, index: Index, sizes: tuple[int, int]) -> TensorPlace:
    """Return the place of a matrix; sizes: of ours, before and after it."""
    return TensorPlace(name, sizes[::-1], leaf, index, sizes, transposed=True)


def _vector(name: str, leaf: str, unit: int, shape: tuple[int, ...]) -> TensorPlace:
    return TensorPlace(name, shape, leaf, (unit,), shape)
