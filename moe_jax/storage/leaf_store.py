"""The arrays of a checkpoint's file: written part by part, each with a checksum, and opened.

Inputs: leaves as a file is to hold them, whose parts are there or made when they are written. Outputs: a handler by
which orbax writes a tree of such leaves; and {name: array in the file} of what is there. It knows of no mesh.
"""

# One OCDBT store of zarr arrays. A part of a leaf is one chunk of its array (of more than 2 GiB: several) and ends with
# its CRC-32C, which tensorstore checks when it reads the chunk; so do the nodes of the store, which hold all names,
# shapes and dtypes.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

Index = tuple[int | slice, ...]  # of a part of a leaf: a number keeps one row of that dim, slice(None) all of it
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_CACHE_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class LeafParts:
    """A leaf to be written, in parts that are all of one size."""

    shape: tuple[int, ...]  # of the leaf, as the file holds it ([L, E, ...] for a leaf of the bank)
    dtype: np.dtype
    part_shape: tuple[int, ...]
    parts: list[tuple[Index, Callable[[], np.ndarray]]]  # those that this process writes; each is made once


def lies_in(index: Index, shape: tuple[int, ...]) -> bool:
    """Say whether a part of an array begins in this shape, which may be smaller than the array."""
    return all((at.start or 0) < size for at, size in zip(index, shape, strict=True) if size)


class PartsHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's way to write `LeafParts`, as what it takes for NumPy arrays when it reads the file without this class.

    Its handlers of arrays lack an argument for codecs, and theirs have no checksum of a chunk; they write arrays whole,
    also rows that belong into no file, and want all of an array in memory.
    """

    memory = math.inf  # as many parts at a time as fit into these bytes, one at least: each commit costs a file

    async def serialize(self, values, infos, args=None):
        """Start to write leaves, in a thread; return futures of orbax."""
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(values, infos), name="leaf_parts")]

    async def _write(self, leaves, infos):
        first, creating = jax.process_index() == 0, []  # process 0 writes an array's shape and dtype
        for leaf, info in zip(leaves, infos, strict=True):
            await info.await_path_creation()
            # Deprecated, and the only public name for where a process writes so that orbax joins what all of them
            # wrote. It has no argument for codecs.
            spec = ocp.type_handlers.get_json_tspec_write(
                info, True, leaf.shape, leaf.part_shape, leaf.dtype, process_index=jax.process_index()
            )
            spec["metadata"]["codecs"] = _CODECS
            creating.append(
                ts.open(ts.Spec(spec), open=True, create=first, assume_metadata=not first, context=info.ts_context)
            )
        writing, size = [], 0
        for leaf, store in zip(leaves, creating, strict=True):
            opened = store.result()
            for index, make in leaf.parts:
                part = make()
                if writing and size + part.nbytes > self.memory:
                    for started in writing:
                        started.result()
                    writing, size = [], 0
                writing.append(opened[index].write(part, can_reference_source_data_indefinitely=True))
                size += part.nbytes
        for started in writing:
            started.result()


def tree_handler(
    processes: ocp.options.MultiprocessingOptions | None = None, memory: float = math.inf
) -> ocp.PyTreeCheckpointHandler:
    """Return the handler of a tree of `LeafParts`; processes: those that write it; memory: as of `PartsHandler`.

    Files are not compressed: zstd makes trained floats only 7% smaller, and so sizes are known beforehand.
    """
    arrays, handler = (jax.Array, ocp.type_handlers.ArrayHandler()), PartsHandler()  # orbax warns without the first
    handler.memory = memory
    registry = ocp.type_handlers.create_type_handler_registry(arrays, (LeafParts, handler))
    processes = processes or ocp.options.MultiprocessingOptions()
    return ocp.PyTreeCheckpointHandler(
        use_compression=False, use_zarr3=True, multiprocessing_options=processes, type_handler_registry=registry
    )


def open_leaves(path: Path) -> dict[str, ts.TensorStore]:
    """Return {name: array in the file} of all leaves of the checkpoint `path`, rising; a ValueError without any."""
    # a folder by its path, not as a URL, in which '#', '?' and '%' have a meaning
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    drivers = {"zarr.json": "zarr3", ".zarray": "zarr"}  # the second: files of before there were checksums
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    opening = {}
    for key in ts.KvStore.open(store, context=context).result().list().result():
        name, _, file = key.decode().rpartition("/")
        if file in drivers:
            spec = {"driver": drivers[file], "kvstore": {**store, "path": f"{name}/"}, "recheck_cached_data": False}
            spec["fill_missing_data_reads"] = False  # an error instead
            opening[name] = ts.open(spec, open=True, context=context)
    if not opening:
        raise ValueError("it holds no array")
    return {name: opening[name].result() for name in sorted(opening)}
