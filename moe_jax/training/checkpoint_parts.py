"""A checkpoint of parameters written and read part by part, so that no leaf is ever whole in memory.

Inputs: of each leaf its name, shape and dtype, and its parts in turn. Outputs: a folder as `Checkpointer` writes it,
with parameters and host data but no optimizer state, which it reads as any other; and parts of the leaves of any
checkpoint. For programs that convert checkpoints: one process, no devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from moe_jax.errors import UserError
from moe_jax.training.checkpoint_format import FORMAT

_BATCH_BYTES = 64 * 2**20
_CACHE_BYTES = 2**26
Index = tuple[int | slice, ...]  # of a part: a number keeps one row of that dim, slice(None) all of it


@dataclasses.dataclass(frozen=True)
class LeafParts:
    """A leaf that is not there yet, but for its parts.

    Attributes:
      shape, dtype: of the leaf, as the file holds it ([L, E, ...] for a leaf of the bank).
      indices: of all parts, which together are the leaf; each keeps rows of the same dims.
      read: function (index) -> array, one part. It is called once for each.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    indices: list[Index]
    read: Callable[[Index], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def chunk(self) -> list[int]:
        """The shape of a part with all dims of the leaf: what the file stores in one piece."""
        whole = (slice(None),) * (len(self.shape) - len(self.indices[0]))
        return [n if isinstance(at, slice) else 1 for n, at in zip(self.shape, (*self.indices[0], *whole), strict=True)]


class _PartsHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's way to write an array, which asks for its parts one after the other instead of for the array."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)
        self._turn = asyncio.Lock()  # leaves in turn: orbax starts all at once

    async def _open_and_write(self, value, tspec, ts_context):
        tspec["metadata"]["chunks"] = value.chunk
        async with self._turn:
            store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
            for batch in _batches(value):  # many at once: each commit to the store costs a file
                await asyncio.gather(*(store[index].write(value.read(index)) for index in batch))


def _batches(leaf: LeafParts) -> Iterator[list[Index]]:
    """Yield the indices of a leaf's parts, as many at a time as fit into `_BATCH_BYTES`, one at least."""
    number = max(1, _BATCH_BYTES // (math.prod(leaf.chunk) * np.dtype(leaf.dtype).itemsize))
    for first in range(0, len(leaf.indices), number):
        yield leaf.indices[first : first + number]


def write_params(folder: Path, leaves: dict[str, LeafParts], host: dict) -> None:
    """Write `folder`/00000000, a checkpoint of step 0.

    Args:
      folder: the run's folder of checkpoints; exists.
      leaves: {name such as 'params/dense/norm/scale': its parts}.
      host: JSON data; 'config' is the text of the run's config.
    """
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()), (LeafParts, _PartsHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    custom = {"format": FORMAT, "step": 0, "host": host}
    with ocp.Checkpointer(handler) as writer:
        writer.save(
            epath.Path(folder.absolute() / f"{0:08d}"), args=ocp.args.PyTreeSave(leaves, custom_metadata=custom)
        )


class PartsReader:
    """Parts of the leaves of a finished checkpoint.

    A program that trains stores what one device held of a leaf in one piece, and a part of it is read with the whole
    piece; pieces are kept for the parts that are asked for next, up to 64 MiB.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int):
        self.path = Path(folder).absolute() / f"{step:08d}"
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._stores: dict[str, Any] = {}

    def leaf(self, name: str) -> Any:
        """Return the store of a leaf: it has a shape, a dtype, and parts that are read when they are asked for.

        Raises:
          UserError: there is no such leaf, or it cannot be read.
        """
        if name not in self._stores:
            kvstore = {"driver": "ocdbt", "base": f"file://{self.path}/", "path": f"{name}/"}
            with self._errors_named(name):
                spec = {"driver": "zarr", "kvstore": kvstore, "recheck_cached_data": False}
                self._stores[name] = ts.open(spec, open=True, context=self._context).result()
        return self._stores[name]

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return one part of a leaf."""
        store = self.leaf(name)
        with self._errors_named(name):
            return store[index].read().result()

    @contextlib.contextmanager
    def _errors_named(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            line = str(error).splitlines()[0][:200]
            raise UserError(
                f"cannot read {name} of checkpoint {self.path} ({line}); give the folder of a run"
            ) from error
