"""Checkpoints of a run: saved while training goes on, whole or absent, read under any mesh.

Inputs: the training state {'step', 'params', 'opt_state'} of global arrays, the homes of its experts, and a dictionary
of host data (position in the data, config text, ...). Outputs: one folder a checkpoint, named by its step; and the
state again, on whatever mesh, split and homes the reader has. Leaves of the expert bank are stored as [L, E, ...], of
each segment of the model for itself, so a file does not depend on mesh, schedule, placement or process count.

    checkpoints/00000120/                          finished: a name of digits alone
    checkpoints/00000130.orbax-checkpoint-tmp/     being written; renamed by process 0 when all is written
    checkpoints/00000090.deleted/                  being deleted

The state may be donated as soon as `save` returns: by then each leaf has been copied to buffers in host memory that
belong to the save alone, one leaf after the other (so a device holds at most one reordered leaf of the bank besides).
With several processes every method is called by all of them; they share the folder. Each wait for another process has a
time limit. Letters: docs/notation.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from absl import logging as absl_logging
from etils import epath
from jax.sharding import NamedSharding

from moe_jax.errors import HostLostError, UserError
from moe_jax.models.segments import flatten
from moe_jax.training.bank_order import FileOrder, FileOrders, Homes, file_sharding

FORMAT = "moe_jax checkpoint 1"
OPTIONAL = "ema"  # the part of a state that a run may keep or not


def agreed_part(stored: dict[str, Any], state: dict) -> tuple[dict[str, Any], dict]:
    """Return leaves of a file and a state to be read, both without the optional part where one of them lacks it."""
    kept = {name: leaf for name, leaf in stored.items() if not name.startswith(f"{OPTIONAL}/")}
    if OPTIONAL in state and len(kept) < len(stored):
        return stored, state
    return kept, {name: part for name, part in state.items() if name != OPTIONAL}


def check_same_leaves(path, stored: dict[str, Any], needed: dict[str, Any]) -> None:
    """Compare names, shapes and dtypes; orbax by itself casts dtypes silently.

    Args:
      path: of the checkpoint, for the message.
      stored, needed: {name: anything with shape and dtype}, in the file and in this run; in the file's order of dims.

    Raises:
      UserError: names the first leaf that differs, with both values.
    """
    names = [*needed, *(name for name in stored if name not in needed)]
    differing = [name for name in names if _described(stored, name) != _described(needed, name)]
    if not differing:
        return
    name = differing[0]
    more = f" (and {len(differing) - 1} more leaves differ)" if len(differing) > 1 else ""
    raise UserError(
        f"checkpoint {path} is not of this model: {name} is {_described(stored, name)} in the checkpoint and "
        f"{_described(needed, name)} in this run{more}; use the model, optimizer and tokenizer that it was trained "
        "with, or another --workdir"
    )


def _described(leaves: dict[str, Any], name: str) -> str:
    if name not in leaves:
        return "absent"
    leaf = leaves[name]
    return f"{np.dtype(leaf.dtype).name} {list(leaf.shape)}"


_UNFINISHED = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted)")
_WRITE_SECONDS = 1200
_START_SECONDS = 300
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Checkpointer:
    """The checkpoints of one folder.

    `save` returns while files are still being written; what goes wrong then is raised by the next `save`, `wait` or
    `close`. Only finished checkpoints are ever listed, read, or counted for `keep`.

    Args:
      folder: holds the checkpoints; made by the first save.
      keep: newest finished checkpoints that stay, at least 1; one is deleted only after a newer one has finished.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int):
        if keep < 1:
            raise UserError(f"train.keep_checkpoints ({keep}) must be at least 1")
        self.folder = Path(folder).absolute()
        self._keep = keep
        _quiet_orbax()
        self._pending: int | None = None  # step of a save that may still be writing

    # Reading.

    def steps(self) -> list[int]:
        """Return the steps of all finished checkpoints as this process sees the folder, rising."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self) -> int | None:
        """Return the step of the newest finished checkpoint, None without any; process 0 decides for all."""
        steps = self.steps()
        newest = steps[-1] if steps else -1
        if jax.process_count() > 1:
            with _lost_processes_named("agree on a checkpoint"):
                ocp.multihost.sync_global_processes(
                    f"moe_jax latest {self.folder}", timeout=_START_SECONDS, processes=_all_processes()
                )
            newest = int(ocp.multihost.broadcast_one_to_all(np.int32(newest)))
        return None if newest < 0 else newest

    def read_host(self, step: int) -> dict:
        """Return the host data of a checkpoint; reads one JSON file, and needs no device."""
        with self._reading_errors_named(step):
            custom = json.loads((self._path(step) / "_METADATA").read_text())["custom_metadata"]
            found = custom["format"]
        if found != FORMAT:
            raise UserError(
                f"{self._path(step)} has format {found!r}, but this program reads {FORMAT!r}; read it with the version "
                "that wrote it"
            )
        return custom["host"]

    def restore(self, step: int, abstract_state, home: Homes) -> tuple[Any, dict]:
        """Return (state, host data) of a checkpoint; without 'ema' where the file or `abstract_state` has none.

        Args:
          step: of a finished checkpoint.
          abstract_state: ShapeDtypeStructs with NamedShardings of this run's mesh; any mesh.
          home: int [L, E], where the experts are to be stored, bank rows numbered as `placement.bank_rows`
            does; of several segments with experts {segment: that}.

        Raises:
          UserError: the checkpoint is of another model (names the first leaf that differs), or cannot be read.
        """
        host = self.read_host(step)
        stored, abstract_state = agreed_part(self._stored(step), abstract_state)
        return self._read(step, stored, flatten(abstract_state), abstract_state, home), host

    def restore_params(self, step: int, abstract_params, home: Homes, part: str = "params"):
        """Return the parameters {'dense', 'bank'} alone; arguments and errors as in `restore`.

        Args:
          part: 'params', or 'ema' for their moving average.
        """
        self.read_host(step)
        params = {name: leaf for name, leaf in self._stored(step).items() if name.startswith(f"{part}/")}
        return self._read(step, params, flatten(abstract_params, part), abstract_params, home)

    def digest(self, step: int) -> str:
        """Return a hash of the parameters in a checkpoint: equal values, equal hash, whoever wrote the file.

        Leaf after leaf is read to the host of every process that asks; nothing is put on a device.
        """
        hashed, stored = hashlib.sha256(), self._stored(step)
        for name in sorted(name for name in stored if name.startswith("params/")):
            with self._reading_errors_named(step):
                leaf = _handler().restore(
                    epath.Path(self._path(step)),
                    args=ocp.args.PyTreeRestore(
                        item={name: jax.ShapeDtypeStruct(stored[name].shape, stored[name].dtype)},
                        restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
                        partial_restore=True,
                    ),
                )[name]
            hashed.update(f"{name} {leaf.dtype.name} {leaf.shape}\n".encode())
            hashed.update(np.ascontiguousarray(leaf).view(np.uint8).data)
        return hashed.hexdigest()

    def has_ema(self, step: int) -> bool:
        """Say whether a checkpoint holds a moving average of the parameters."""
        return any(name.startswith("ema/") for name in self._stored(step))

    def read_arrays(self, step: int) -> dict[str, np.ndarray]:
        """Return all leaves {name: array} on the host, as they are stored; for tools that compare checkpoints."""
        with self._reading_errors_named(step):
            numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in self._stored(step)}
            return _handler().restore(epath.Path(self._path(step)), args=ocp.args.PyTreeRestore(restore_args=numpy))

    # Writing.

    def save(self, step: int, state, home: Homes, host: dict) -> None:
        """Start to save a state; when this returns, the state may be donated or changed.

        A save that is still writing is waited for first.

        Args:
          step: number of finished steps; names the checkpoint.
          state: pytree of global jax.Arrays with NamedShardings; leaves under a key 'bank' are [D Rb, ...].
          home: int [L, E], home device of each expert in that bank; of several segments with experts {segment: that}.
          host: JSON data; tuples come back as lists, keys as text.

        Raises:
          UserError: this step is saved already, or this checkpoint or the one before cannot be written to the disk.
        """
        self.wait()
        if step in self.steps():
            raise UserError(f"{self._path(step)} exists already; move it away, or choose another --workdir")
        self._sweep_unfinished()
        self._check_space(step, state)
        host = json.loads(json.dumps(host))  # what it is now, whatever the caller does with it while files are written
        orders = FileOrders(home)
        arrays = {name: _own_copy(leaf, orders.of_leaf(name)) for name, leaf in flatten(state).items()}
        self._pending = step
        with self._writing_errors_named(step):
            self._writer.save(
                self._path(step),
                args=ocp.args.PyTreeSave(arrays, custom_metadata={"format": FORMAT, "step": step, "host": host}),
            )

    def wait(self) -> None:
        """Wait until the last save has finished, then delete what `keep` does not cover.

        Raises:
          UserError: it cannot be written to the disk; the checkpoints before it are as they were.
          HostLostError: another process did not write its part in time.
        """
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        with self._writing_errors_named(step):
            self._writer.wait_until_finished()
        if jax.process_index() == 0:
            for old in self.steps()[: -self._keep]:
                self._delete(self._path(old))

    def close(self) -> None:
        """Wait until the last save has finished, and end the threads."""
        try:
            self.wait()
        finally:
            if "_writer" in self.__dict__:
                self._writer.close()
                del self._writer

    # Internal.

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    @functools.cached_property
    def _writer(self) -> ocp.AsyncCheckpointer:
        # Naming the processes makes orbax wait at barriers of the coordination service, which have a time limit; its
        # default is a collective on the devices, which has none.
        processes = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=_all_processes())
        return ocp.AsyncCheckpointer(
            _writing_handler(processes),
            multiprocessing_options=processes,
            async_options=ocp.options.AsyncOptions(
                timeout_secs=_WRITE_SECONDS, create_directories_asynchronously=False
            ),
        )

    def _stored(self, step: int) -> dict[str, Any]:
        """Return {name: shape and dtype} of the leaves in a checkpoint."""
        with self._reading_errors_named(step):
            return flatten(_handler().metadata(epath.Path(self._path(step))).tree)

    def _read(self, step: int, stored: dict[str, Any], needed: dict[str, Any], tree, home: Homes):
        """Read the leaves `needed` and return them in the structure of `tree`."""
        orders = FileOrders(home)
        wanted = {name: _as_stored(name, leaf, orders.of_leaf(name)) for name, leaf in needed.items()}
        check_same_leaves(self._path(step), stored, wanted)
        with self._reading_errors_named(step):
            arrays = _handler().restore(
                epath.Path(self._path(step)),
                args=ocp.args.PyTreeRestore(
                    item=wanted,
                    restore_args={
                        name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
                        for name, leaf in wanted.items()
                    },
                    partial_restore=True,
                ),
            )
        leaves = []
        for name, leaf in needed.items():
            array = arrays.pop(name)
            if (order := orders.of_leaf(name)) is not None:
                array, in_file_order = order.from_file(array, leaf), array
                jax.block_until_ready(array)
                in_file_order.delete()  # not two banks at once
            leaves.append(array)
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def _sweep_unfinished(self) -> None:
        """Delete what a killed run or a failed save left; for writers only: a reader may run beside a job."""
        if jax.process_index() == 0 and self.folder.is_dir():
            for name in os.listdir(self.folder):
                if _UNFINISHED.fullmatch(name):
                    shutil.rmtree(self.folder / name, ignore_errors=True)

    def _delete(self, path: Path) -> None:
        """Delete a finished checkpoint; renamed first, so that a kill leaves no half of one under its name."""
        doomed = path.with_name(path.name + ".deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    @contextlib.contextmanager
    def _writing_errors_named(self, step: int) -> Iterator[None]:
        """Turn a full or failing disk into one line; whatever was written of this step is deleted."""
        try:
            with _lost_processes_named(f"save step {step}"):
                yield
        except HostLostError:
            raise
        except Exception as error:
            self._pending = None
            self._sweep_unfinished()
            if (cause := _disk_error(error)) is None:
                raise
            remedy = "free space on its disk" if cause in _DISK_FULL else "check its disk, or choose another --workdir"
            raise self._unwritten(step, os.strerror(cause), remedy) from error

    def _unwritten(self, step: int, cause: str, remedy: str) -> UserError:
        steps = self.steps()
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"
        return UserError(
            f"cannot write {self._path(step)} ({cause}); {remedy}, then give the same command again; {kept}"
        )

    def _check_space(self, step: int, state) -> None:
        """Refuse a save that cannot fit before anything is written; a quota shows only in the write itself."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        with self._writing_errors_named(step):
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise self._unwritten(step, f"{needed:,} bytes needed, {free:,} free", "free space on its disk")

    @contextlib.contextmanager
    def _reading_errors_named(self, step: int) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            if step not in self.steps():
                raise UserError(
                    f"{self.folder} has no finished checkpoint of step {step}, only {self.steps()}"
                ) from error
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"cannot read checkpoint {self._path(step)} ({line[:200]}); move it away to go on from an earlier one"
            ) from error


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Return orbax's reader."""
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _writing_handler(processes: ocp.options.MultiprocessingOptions) -> ocp.PyTreeCheckpointHandler:
    """Return orbax's writer.

    Files are not compressed: zstd makes trained floats only 7% smaller, and so sizes are known beforehand. What is
    replicated is written by one process: to divide that work, orbax would compile a slicing program for each shape,
    which takes a second at the first save.
    """
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,
        multiprocessing_options=processes,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )


def _all_processes() -> set[int] | None:
    return set(range(jax.process_count())) if jax.process_count() > 1 else None


def _own_copy(leaf: jax.Array, order: FileOrder | None) -> jax.Array:
    """Return a leaf as it is stored, in host buffers of its own; order: of a leaf of the bank."""
    ordered = leaf if order is None else order.to_file(leaf)
    copied = jax.device_put(ordered, ordered.sharding.with_memory_kind("pinned_host"))
    jax.block_until_ready(copied)
    if ordered is not leaf:
        ordered.delete()
    return copied


def _as_stored(name: str, leaf: jax.ShapeDtypeStruct, order: FileOrder | None) -> jax.ShapeDtypeStruct:
    """Return what the file holds for a leaf of the state, with the sharding that it is read with."""
    assert isinstance(leaf.sharding, NamedSharding), f"{name} has no NamedSharding"
    if order is None:
        return leaf
    return jax.ShapeDtypeStruct(order.file_shape(leaf), leaf.dtype, sharding=file_sharding(leaf.sharding))


@contextlib.contextmanager
def _lost_processes_named(task: str) -> Iterator[None]:
    """Turn a barrier that ran out of time into a HostLostError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in str(error):
            raise HostLostError(f"a process did not come to {task} within its time limit") from error
        raise


def _disk_error(error: BaseException | None) -> int | None:
    """Return the error number of the operating system behind an exception, if there is one; tensorstore quotes it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if quoted := re.search(r"os_error_code='(\d+)'", str(error)):
            return int(quoted[1])
        error = error.__cause__ or error.__context__
    return None


class _OrbaxIsQuiet(logging.Filter):
    """Keep orbax' progress, and the tracebacks of errors that `wait` raises again, out of absl's log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname or record.levelno == logging.WARNING


def _quiet_orbax() -> None:
    log = absl_logging.get_absl_logger()
    if not any(isinstance(known, _OrbaxIsQuiet) for known in log.filters):
        log.addFilter(_OrbaxIsQuiet())


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
