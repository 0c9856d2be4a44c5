"""A checkpoint of transformers as a run folder, and a run folder as a checkpoint of transformers.

Inputs: a folder with config.json and safetensors files; or the folder of a run. Outputs: the other, or the adapters of
a run alone: adapter_config.json and adapter_model.safetensors, as peft reads them. Parameters pass tensor by tensor, so
the memory needed does not grow with the model. A run folder made here holds config.gin, a checkpoint of step 0 with
parameters alone, and the files of the tokenizer and of generation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.config.run_config import RunConfig, config_differences, config_text
from moe_jax.config.train_config import TrainConfig
from moe_jax.data.chat import special_ids
from moe_jax.data.corpus import DataConfig
from moe_jax.data.tokenizer import END_FILES, FILE, carry_files, check_inside, find_tokenizer, read_json
from moe_jax.errors import UserError
from moe_jax.inference.families import (
    DTYPES,
    HARMLESS,
    Family,
    find_export_family,
    quantized_blocks,
    read_config,
    upcycled_keys,
    write_config,
)
from moe_jax.inference.tensor_places import BACK, FFN, TensorPlace, file_shapes, tensor_places
from moe_jax.models import LanguageModel
from moe_jax.models.config import ModelConfig
from moe_jax.models.counts import shapes_and_layout
from moe_jax.models.language_model import flatten, segment_of
from moe_jax.models.lora import is_adapter
from moe_jax.models.transformer import matrix_dims
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import LORA_A, LORA_B
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.storage.checkpoint import Checkpointer, HostData, run_config, write_params
from moe_jax.storage.leaf_store import LeafParts
from moe_jax.storage.run_folder import RunFolder, disk_errors_named, write_atomically
from moe_jax.training.feed import padded_vocabulary
from moe_jax.training.frozen_models import checked_base

PREFIX = "base_model.model."  # of names in peft
NOT_NEEDED = (".rotary_emb.inv_freq",)  # tables that are computed
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2**27
# of a model that is trained on; from scratch it is some hundred times as large, and would undo what the model knows
LEARNING_RATE = 1e-5
READ_DTYPES = ("F32", "BF16", "F16")
FLOAT8, SCALE = "F8_E4M3", "_scale_inv"  # a scale multiplies its block, whatever it is called
_LOG = logging.getLogger(__name__)


def import_folder(
    source: str | os.PathLike[str],
    workdir: str | os.PathLike[str],
    upcycling: Upcycling | None = None,
    allow_nonfinite: bool = False,
) -> RunConfig:
    """Write the run folder `workdir` from a checkpoint of transformers; return its config.

    Args:
      upcycling: of a dense checkpoint, how it becomes a mixture of experts.
      allow_nonfinite: take tensors that hold NaN or infinity too.

    Raises:
      UserError: another architecture, keys or tensors that are missing, unknown or of a wrong shape, damaged files, a
        folder that is there already, or one that cannot be written. Nothing is left behind then.
    """
    source, workdir = Path(source).expanduser(), Path(workdir).expanduser()
    if not (keys := read_json(source, "config.json")):
        raise UserError(f"{source}/config.json does not exist; give a folder with a checkpoint of transformers")
    if upcycling is not None:
        keys = upcycled_keys(keys, upcycling.experts, upcycling.top_k)
    family, model, moe = read_config(keys)
    tensors = TensorFolder(source, quantized_blocks(keys))
    if model.tied_head and {TABLE, HEAD} <= tensors.names:
        alike = tensors.shape(TABLE) == tensors.shape(HEAD)
        if not alike or not np.array_equal(tensors.read(TABLE), tensors.read(HEAD)):
            _LOG.warning("%s: tie_word_embeddings is true, but %s is another table; the model is untied", source, HEAD)
            model = dataclasses.replace(model, tied_head=False)
    places = tensor_places(family, model, moe)
    sources = {place.name: _source(tensors, place, upcycling) for place in places}
    read = {wanted[0] for wanted in sources.values() if wanted is not None}
    _check_rest(tensors, read | ({HEAD} if model.tied_head else set()), family, keys)

    def part_of(place: TensorPlace) -> np.ndarray:
        if (wanted := sources[place.name]) is None:  # a router, which the dense checkpoint has none of
            tensor = place.shape[1] ** -0.5 * upcycling.drawn(place.name, place.shape)
        else:
            tensor = tensors.read(*wanted)
            tensor = upcycling.expert(place.name, tensor) if upcycling and place.fused else tensor
        return _noted(place.name, place.to_part(tensor), np.dtype(model.param_dtype), odd)

    odd: list[str] = []
    data = DataConfig()  # bytes, where the checkpoint has no tokenizer
    if (source / FILE).exists():
        data = DataConfig(tokenizer=str(workdir.absolute() / FILE))
    run = RunConfig(train=TrainConfig(learning_rate=LEARNING_RATE), model=model, moe=moe, data=data)
    # what differs from the defaults is marked as set in config.gin
    text = config_text(run, bound={binding for binding, *_ in config_differences("", config_text(run))})
    with new_folder(workdir, () if allow_nonfinite else odd) as folder:
        (folder / "checkpoints").mkdir()
        host = HostData(config=text, parameters_only=True).to_json()
        write_params(folder / "checkpoints", _leaves(model, moe, places, part_of), host)
        write_atomically(RunFolder(folder, create=False).config, text)
        carry_files(source, folder)
    return run


def _check_rest(tensors: TensorFolder, read: set[str], family: Family, keys: dict[str, Any]) -> None:
    """Raise a UserError for a tensor that is not `read` and means something to a model of config.json's `keys`."""
    left = tensors.names - read - tensors.scales
    # layers that predict tokens farther ahead, which moe_jax does not do
    first, count = keys["num_hidden_layers"], {**family.own_keys, **keys}.get("num_nextn_predict_layers") or 0
    layers = tuple(f"model.layers.{first + i}." for i in range(count))
    if ahead := {name for name in left if name.startswith(layers)}:
        _LOG.warning(
            "%s: %d tensors predict tokens farther ahead and are skipped: %s, ...", tensors.path, len(ahead), min(ahead)
        )
    for name in sorted(name for name in left - ahead if not name.endswith(NOT_NEEDED)):
        raise UserError(f"{tensors.path}: the tensor {name} is unknown to moe_jax for {family.model_type!r} models")


def _leaves(model: ModelConfig, moe: MoEConfig, places: list[TensorPlace], part_of: Callable) -> dict[str, LeafParts]:
    """Return {name: the leaf}, which `part_of` reads place by place."""
    by_leaf: dict[str, list[TensorPlace]] = {}
    for place in places:
        by_leaf.setdefault(place.leaf, []).append(place)
    leaves, shapes = {}, file_shapes(model, moe)
    assert by_leaf.keys() == shapes.keys(), f"no leaf, or no place, is called {by_leaf.keys() ^ shapes.keys()}"
    for name, shape in shapes.items():
        of_leaf = by_leaf[name]
        assert sum(math.prod(place.part) for place in of_leaf) == math.prod(shape), name
        parts = [(place.index, functools.partial(part_of, place)) for place in of_leaf]
        every = itertools.zip_longest(shape, of_leaf[0].index, fillvalue=slice(None))
        part_shape = tuple(size if isinstance(at, slice) else 1 for size, at in every)
        leaves[name] = LeafParts(shape, np.dtype(model.param_dtype), part_shape, parts)
    return leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upcycling:
    """How a dense checkpoint becomes a mixture of experts (Komatsuzaki et al. 2023, "Sparse Upcycling").

    The FFN of every block is copied to all experts of that block, and routers are drawn anew. The weights of a token's
    experts add up to 1, so without noise the new model computes what the dense one did.
    """

    experts: int  # E
    top_k: int = 2
    noise: float = 0.0  # standard deviation of what is added to each expert's matrices, over that of the matrix
    seed: int = 0  # of routers and noise

    def __post_init__(self):
        if self.experts < 2 or not 1 <= self.top_k <= self.experts:
            raise UserError(
                f"--upcycle ({self.experts}) must be at least 2 experts, and --upcycle_top_k ({self.top_k}) between 1 "
                "and that"
            )
        if not 0 <= self.noise < float("inf"):
            raise UserError(f"--upcycle_noise ({self.noise}) must be a number of at least 0")
        if self.seed < 0:
            raise UserError(f"--upcycle_seed ({self.seed}) must be at least 0")

    def drawn(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return standard normal numbers, which the seed and a tensor's name decide."""
        return np.random.default_rng([self.seed, *name.encode()]).standard_normal(shape, np.float32)

    def expert(self, name: str, matrix: np.ndarray) -> np.ndarray:
        """Return the matrix of one expert, float32, from the dense one's."""
        copied = matrix.astype(np.float32)
        return copied + self.noise * np.std(copied) * self.drawn(name, copied.shape) if self.noise else copied


def export_folder(
    workdir: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str = "",
    adapter: bool = False,
    allow_nonfinite: bool = False,
) -> Family:
    """Write the folder `target` for transformers from the last checkpoint of a run; return what kind it is.

    Args:
      dtype: of the tensors, 'float32', 'bfloat16' or 'float16'; '' takes ModelConfig.dtype.
      adapter: write the adapters of a run alone, as peft reads them, instead of a model that they are merged into.
      allow_nonfinite: write tensors that hold NaN or infinity too.

    Raises:
      UserError: a run without a checkpoint, a model that no known architecture computes, or as `import_folder`.
    """
    folder, run = RunFolder(workdir, create=False), run_config(workdir)
    dtype = dtype or run.model.dtype
    if dtype not in DTYPES:
        raise UserError(f"--dtype ({dtype!r}) must be one of {', '.join(DTYPES)}")
    if adapter and not run.lora.rank:
        raise UserError(f"{workdir} holds a whole model and no adapters; write that with --to_hf")
    checkpoints = Checkpointer(folder.checkpoints)
    step = checkpoints.choose()
    host = HostData.from_json(checkpoints.read_host(step))
    tokenizer = find_tokenizer(run.data, folder.path, host.tokenizer)
    model = dataclasses.replace(run.model, vocab_size=padded_vocabulary(tokenizer, run.model))
    family = find_export_family(model, run.moe)
    places = sorted(tensor_places(family, model, run.moe), key=lambda place: place.leaf)
    odd: list[str] = []
    with new_folder(target, () if allow_nonfinite else odd) as out:
        adapters = Adapters(run, model.vocab_size, checkpoints, step) if run.lora.rank else None
        if adapter:
            named = adapters.peft_tensors(places)
            arrays = {name: _noted(name, array, array.dtype, odd) for name, array in named}
            library().numpy.save_file(arrays, str(out / "adapter_model.safetensors"))
            write_json(out / "adapter_config.json", adapters.peft_config(places))
            return family
        whole, at = (checkpoints, step) if adapters is None else checked_base(host.base)

        def tensors() -> Iterator[tuple[str, np.ndarray]]:
            parts = whole.read_parts(at, [(place.leaf, place.index) for place in places])
            for place, part in zip(places, parts, strict=True):
                tensor = place.to_tensor(part)
                tensor = tensor if adapters is None else adapters.merged(place, tensor)
                of_file = np.dtype("float32" if place.float32 else dtype)
                yield place.name, _noted(place.name, tensor, of_file, odd)

        write_tensors(out, tensors())
        # files to be carried: the run's own, or those of the tokenizer that it was trained with
        is_own = (folder.path / FILE).exists() or run.data.tokenizer == "byte"
        source = folder.path if is_own else Path(run.data.tokenizer).expanduser().parent
        carry_files(source, out, add_special_tokens=run.data.add_special_tokens)
        keys = write_config(family, model, run.moe) | {"dtype": dtype}
        _write_configs(out, special_ids(tokenizer, model.vocab_size), keys)
    return family


def _write_configs(folder: Path, ids: dict[str, Any], keys: dict[str, Any]) -> None:
    """Write config.json and, where it was not carried along, generation_config.json, with a tokenizer's ids."""
    generation, config = (folder / name for name in END_FILES)
    carried = read_json(folder, config.name)
    known = ids | {key: value for key, value in carried.items() if key in HARMLESS}
    if not generation.exists():
        write_json(generation, {key: known[key] for key in ids})
    write_json(config, known | keys)


def _noted(name: str, tensor: np.ndarray, dtype: np.dtype, odd: list[str]) -> np.ndarray:
    """Return a tensor in a dtype; `odd` gets its name where it has NaN or infinity then."""
    with np.errstate(over="ignore"):
        tensor = tensor.astype(dtype, order="C", copy=False)
    if not np.isfinite(tensor).all():
        odd.append(name)
    return tensor


def write_json(path: Path, keys: dict[str, Any]) -> None:
    """Write a JSON object, its keys sorted."""
    path.write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], odd: Collection[str] = ()) -> Iterator[Path]:
    """Yield a folder to fill, `path`.partial; it is renamed to `path` at the end, and removed after an error.

    A UserError if `path` is there already and not empty, or cannot be written; and at the end, when no thread writes
    any more, where `odd` names tensors that hold NaN or infinity.
    """
    target = Path(path).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{path} exists already; name another folder, or move it away")
    partial = target.with_name(target.name + ".partial")
    with disk_errors_named(target):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            for name in odd:
                raise UserError(f"{name} holds NaN or infinity; take other files or --dtype, or set --allow_nonfinite")
            if target.exists():
                target.rmdir()
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


class Adapters:
    """The adapters in a checkpoint of a run (`models/lora.py`), on the host; as files peft reads, or for a whole model.

    transformers 5 holds all experts of a layer in two tensors, [E, 2 F, M] of the gate half and the other, and
    [E, M, F]. peft adapts each by one pair of factors for an expert (`target_parameters`), so those of the halves
    become one pair of twice the rank: A the one above the other, B the two as blocks, which is exactly the same sum.
    """

    def __init__(self, run: RunConfig, vocab_size: int, checkpoints: Checkpointer, step: int):
        roles = build_mesh(MeshConfig(), 1)
        model = LanguageModel(config=run.model, moe=run.moe, vocab_size=vocab_size, roles=roles, lora=run.lora)
        names = [name for name in flatten(shapes_and_layout(model)[0], "params") if is_adapter(name)]
        self.lora, self._arrays = run.lora, checkpoints.read_arrays(step, names)

    def factors(self, place: TensorPlace) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what adapts the tensor [out, in] of a place: (A [rank, in], B [out, rank]), None without any."""
        if place.leaf + LORA_A not in self._arrays:
            return None
        rank, stacked = self.lora.rank, 2 if segment_of(place.leaf) else 1
        inner, _ = matrix_dims(place.leaf.rsplit("/", 1)[-1])
        of_b = tuple(at for dim, at in enumerate(place.index) if dim - stacked not in inner)
        a, b = self._arrays[place.leaf + LORA_A][place.index], self._arrays[place.leaf + LORA_B][of_b]
        out, into = place.shape
        a = dataclasses.replace(place, shape=(rank, into), pairs=0).to_tensor(a)
        return a, dataclasses.replace(place, shape=(out, rank)).to_tensor(b)

    def merged(self, place: TensorPlace, tensor: np.ndarray) -> np.ndarray:
        """Return the tensor of a place with its adapters added."""
        if (pair := self.factors(place)) is None:
            return tensor
        a, b = pair
        return tensor + (self.lora.alpha / self.lora.rank) * (b @ a)

    def peft_tensors(self, places: list[TensorPlace]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, array) as peft has them: lora_A [rank, in], lora_B [out, rank], of all experts side by side."""
        fused: dict[str, dict[int | None, list[tuple]]] = {}
        adapted = []  # (module, A, B)
        for place in places:
            if (pair := self.factors(place)) is None:
                continue
            if place.fused:
                name, _, half = place.fused
                fused.setdefault(name, {}).setdefault(half, []).append(pair)
            else:
                adapted.append((place.name.removesuffix(".weight"), *pair))
        for name, halves in fused.items():
            module, _, tensor = name.rpartition(".")
            all_a, all_b = [], []  # of a half each: [E, rank, in] and [E, out, rank], rows of the other half zero
            for half, pairs in halves.items():
                a, b = map(np.stack, zip(*pairs, strict=True))
                above = (half or 0) * b.shape[1]
                below = 0 if half is None else b.shape[1] - above
                all_a.append(a)
                all_b.append(np.pad(b, ((0, 0), (above, below), (0, 0))))
            a, b = np.concatenate(all_a, axis=1), np.concatenate(all_b, axis=2)
            # peft wraps the module once for each of its tensors, the first one innermost
            if tensor == "gate_up_proj" and f"{module}.down_proj" in fused:
                module += ".base_layer"
            adapted.append((module, a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)))
        for module, a, b in adapted:
            yield f"{PREFIX}{module}.lora_A.weight", np.ascontiguousarray(a)
            yield f"{PREFIX}{module}.lora_B.weight", np.ascontiguousarray(b)

    def peft_config(self, places: list[TensorPlace]) -> dict:
        """Return adapter_config.json."""
        adapted = [place for place in places if place.leaf + LORA_A in self._arrays]
        modules = sorted({place.name.removesuffix(".weight") for place in adapted if not place.fused})
        fused = [place.fused for place in adapted if place.fused]
        tensors = sorted({re.sub(r"^model\.layers\.\d+\.", "", name) for name, *_ in fused}, reverse=True)
        halves = {half for *_, half in fused}
        rank, alpha = self.lora.rank, self.lora.alpha
        wide = {"mlp.experts.gate_up_proj": 2} if {0, 1} <= halves else {}
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
            "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
            "target_modules": modules, "target_parameters": tensors or None,
            "rank_pattern": {name: times * rank for name, times in wide.items()},
            "alpha_pattern": {name: times * alpha for name, times in wide.items()},
        }  # fmt: skip


def _source(tensors: TensorFolder, place: TensorPlace, upcycling: Upcycling | None):
    """Return the arguments of `TensorFolder.read` for a place; None where upcycling draws it.

    A UserError if the tensor is missing, or has another shape than config.json says.
    """
    if upcycling is not None and place.leaf.endswith("gate/w_gate"):
        return None
    shape, names, fused = place.shape, [place.name, place.name.replace(".block_sparse_moe.", ".mlp.")], place.fused
    if upcycling is not None and fused:
        # the matrix of the dense FFN that an expert's is copied from
        matrix = FFN[BACK if fused[2] is None else fused[2]]
        names, fused = [f"{'.'.join(place.name.split('.')[:3])}.mlp.{matrix}.weight"], None
    name, part = next((name for name in names if name in tensors.names), None), None
    if name is None and fused and fused[0] in tensors.names:
        name, expert, half = fused
        (rows, columns), start = shape, (half or 0) * shape[0]
        shape = (*tensors.shape(name)[:1], rows if half is None else 2 * rows, columns)
        part = expert, slice(start, start + rows)
    if name is None:
        raise UserError(f"{tensors.path}: the tensor {names[0]} is missing; copy the folder again")
    if (stored := tensors.shape(name)) != shape:
        raise UserError(
            f"{tensors.path}: {name} is {list(stored)}, but {list(shape)} by config.json; one of the two is of another "
            "model"
        )
    return name, part


def library() -> Any:
    """Return the package `safetensors`, or raise a UserError where it is not installed."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise UserError(
            "this needs the package 'safetensors', which is not installed; pip install safetensors"
        ) from error
    return safetensors


class TensorFolder:
    """The tensors of a checkpoint: `names` of all of them; a UserError for files that are missing or damaged."""

    def __init__(self, path: Path, blocks: tuple[int, int] | None = None):
        """Open the files; nothing is read but their headers.

        Args:
          blocks: of `quantized_blocks`, where a float8 matrix has a scale for each block, `NAME_scale_inv`.
        """
        index, self.path, self.blocks = check_inside(path, INDEX), path, blocks
        self._stored: dict[str, tuple[Path, Any]] = {}  # of each tensor its file, and that opened
        self._header: tuple[Path, int, dict] | None = None  # of the file read last: where its tensors begin, and which
        expected: dict[Path, list[str]] = {check_inside(path, SINGLE): []}
        if index.exists():
            entries, expected = read_json(path, INDEX).get("weight_map"), {}
            if not isinstance(entries, dict):
                raise UserError(f"{index} has no weight_map; copy the folder again")
            for name in sorted(entries):
                expected.setdefault(check_inside(path, str(entries[name])), []).append(name)
        elif not (path / SINGLE).exists():
            raise UserError(f"{path} has neither {SINGLE} nor {INDEX}; give a folder with safetensors files")
        safetensors = library()
        for file in sorted(expected):
            try:
                handle = safetensors.safe_open(str(file), framework="numpy")
            except FileNotFoundError as error:
                raise UserError(f"{file} does not exist, and {INDEX} names it; copy the folder again") from error
            except (safetensors.SafetensorError, OSError) as error:
                raise UserError(f"cannot read {file} ({error}): it is damaged or not whole; copy it again") from error
            names = set(handle.keys())
            for name in expected[file] or names:
                if name not in names:
                    raise UserError(f"{file} has no tensor {name}, which {INDEX} says it has; copy the folder again")
                self._stored[name] = file, handle
        self.names = set(self._stored)
        scaled = {name for name in self.names if blocks and name + SCALE in self.names}
        stored = {name: self._stored[name][1].get_slice(name).get_dtype() for name in scaled}
        self.scales = {name + SCALE for name, dtype in stored.items() if dtype == FLOAT8}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, or raise a UserError where its dtype is none that can be read."""
        file, handle = self._stored[name]
        part = handle.get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if self.blocks and dtype == FLOAT8:
            scale = name + SCALE
            if scale not in self.names:
                raise UserError(f"{file}: {name} is {dtype} and has no {scale}; copy the folder again")
            blocks = tuple(-(-size // block) for size, block in zip(shape, self.blocks, strict=False))
            if len(shape) != 2 or self.shape(scale) != blocks:
                its = list(self.shape(scale))
                raise UserError(f"{file}: {scale} is {its}, which are not the blocks of {list(shape)} by config.json")
        elif dtype not in READ_DTYPES:
            raise UserError(f"{file}: {name} is {dtype}, and moe_jax reads {', '.join(READ_DTYPES)}")
        return shape

    def read(self, name: str, part: tuple[int, slice] | None = None) -> np.ndarray:
        """Return a tensor, or of one [E, ..., ...] the rows of an expert, `part`."""
        file, handle = self._stored[name]
        if name + SCALE in self.scales:
            scale = self.read(name + SCALE).astype(np.float32)
            rows, columns = self.shape(name)
            scale = scale.repeat(self.blocks[0], axis=0)[:rows].repeat(self.blocks[1], axis=1)[:, :columns]
            # from its bytes: `safetensors` makes no NumPy array of float8
            if self._header is None or self._header[0] != file:
                with open(file, "rb") as opened:
                    size = int.from_bytes(opened.read(8), "little")
                    self._header = file, 8 + size, json.loads(opened.read(size))
            _, begin, header = self._header
            first, last = header[name]["data_offsets"]
            stored = np.fromfile(file, np.dtype("float8_e4m3fn"), last - first, offset=begin + first)
            return stored.reshape(header[name]["shape"]).astype(np.float32) * scale
        if part is None:
            return handle.get_tensor(name)
        expert, rows = part
        return handle.get_slice(name)[expert : expert + 1, rows][0]


def write_tensors(folder: Path, named: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write tensors, (name, array) one after the other, into files of a folder, as transformers looks for them.

    One file has at most SHARD_BYTES, but for a tensor that is larger by itself; several files get an index.
    """
    files, total, size = [{}], 0, 0  # of each file its tensors; those of the last one are still in memory

    def flush():
        library().numpy.save_file(files[-1], str(folder / f"part-{len(files)}"), metadata={"format": "pt"})
        files[-1] = list(files[-1])

    for name, tensor in named:
        if files[-1] and size + tensor.nbytes > SHARD_BYTES:
            flush()
            files.append({})
            size = 0
        files[-1][name] = np.ascontiguousarray(tensor)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "part-1").rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
