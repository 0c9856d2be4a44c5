"""safetensors folders, read and written tensor by tensor.

Inputs: a folder with model.safetensors, or with model.safetensors.index.json and the files that it names; or tensors in
turn. Outputs: NumPy arrays; or such a folder. Of files that are read only what is asked for is in memory; of files that
are written one at a time, at most `SHARD_BYTES` or a single larger tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy has bfloat16 once this is imported
import numpy as np

from moe_jax.errors import UserError

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
