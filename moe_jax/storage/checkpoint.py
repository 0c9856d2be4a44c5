"""Checkpoints of a run: saved while training goes on, whole or absent, read under any mesh.

Inputs: the training state {'step', 'params', 'opt_state'} of global arrays, and 'ema' where one is kept, the homes of
its experts, and a dictionary of host data (position in the data, config text, ...). Outputs: one folder a checkpoint,
named by its step; the state again, on whatever mesh, split and homes the reader has; and the config that is next to it.
Letters: docs/notation.md.
"""

# Leaves of the expert bank are stored as [L, E, ...], of each segment of the model for itself, so a file does not
# depend on mesh, schedule, placement or process count. Orbax writes a folder: all leaves by name in one OCDBT store
# of zarr arrays, the host data as JSON in `_METADATA` (`custom_metadata`). Every chunk of an array (what one device
# held) ends with its CRC-32C, which tensorstore checks when it reads the chunk, on whatever mesh; so do the nodes of
# the store, which hold all names, shapes and dtypes; and the host data has a CRC of its own.
#
#     checkpoints/00000120/                          finished: a name of digits alone
#     checkpoints/00000130.orbax-checkpoint-tmp/     being written; renamed by process 0 when all is written
#     checkpoints/00000090.deleted/                  being deleted
#     checkpoints/00000110.damaged/                  found damaged by a run that went on from the one before it
#
# The state may be donated as soon as `save` returns: by then each leaf has been copied to buffers in host memory that
# belong to the save alone, one leaf after the other (so a device holds at most one reordered leaf of the bank besides).
# With several processes every method is called by all of them; they share the folder. Each wait for another process has
# a time limit.

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
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from absl import logging as absl_logging
from etils import epath
from orbax.checkpoint._src.serialization import replica_slices, tensorstore_utils

from moe_jax.config.gin_files import parse_run_config
from moe_jax.config.run_config import RunConfig, bindings_as_begun
from moe_jax.errors import HostLostError, UserError
from moe_jax.models.language_model import flatten
from moe_jax.storage.bank_order import Homes, copied, home_of, in_host_memory, read_leaves
from moe_jax.storage.run_folder import OpenFolder, RunFolder, disk_errors_named, readable

FORMAT, UNCHECKED_FORMAT = "moe_jax checkpoint 2", "moe_jax checkpoint 1"  # the older one has no CRC, and is still read
_UNFINISHED = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted)")
_WRITE_SECONDS = 1200
_START_SECONDS = 300
_BATCH_BYTES = 64 * 2**20
_CACHE_BYTES = 2**26
_HASHED_BYTES = 2**28  # that are in memory at once
_PASSING_ERRORS = re.compile("PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED|ABORTED")
_DAMAGE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EIO)  # other errors of the system may pass
_UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system that cannot do it
_log = logging.getLogger(__name__)
Index = tuple[int | slice, ...]  # of a part of a leaf: a number keeps one row of that dim, slice(None) all of it


def run_config(workdir: str | os.PathLike[str], bindings: Sequence[str] = ()) -> RunConfig:
    """Return the config of a run folder; `bindings` win over it. A UserError if there is no such run."""
    folder = RunFolder(workdir, create=False)
    if not folder.config.exists():
        raise UserError(f"run folder {folder.path} holds no config.gin; give the --workdir of a run that has trained")
    return parse_run_config([str(folder.config)], [*bindings_as_begun(folder.path), *bindings])[0]


class DamagedCheckpointError(UserError):
    """A checkpoint that is incomplete, or not what was written; its argument says which and why."""

    def __str__(self):
        return f"{self.args[0]}; move it away, and the one before it is taken"


class Checkpointer:
    """The checkpoints of one folder, of which the newest `keep` stay; only finished ones are listed, read or counted.

    `save` returns while files are still being written; what goes wrong then, the next `save`, `wait` or `close` raises.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int):
        self.folder = Path(folder).absolute()
        self._keep = keep
        absl_logging.get_absl_logger().addFilter(_is_heard)
        self._pending: tuple[int, OpenFolder] | None = None  # step of a save that may still be writing, and where

    # Reading.

    def steps(self) -> list[int]:
        """Return the steps of all finished checkpoints as this process sees the folder, rising."""
        try:
            return sorted(int(name) for name in os.listdir(self.folder) if re.fullmatch(r"[0-9]{8,}", name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UserError(
                f"cannot read {self.folder} ({error.strerror}); see that this user may read it and that its disk "
                "answers, then give the same command again"
            ) from error

    def latest(self, below: int | None = None) -> int | None:
        """Return the step of the newest finished checkpoint, None without any; process 0 decides for all.

        One whose folder is not what was written is named and passed over; arrays are checked when they are read.

        Args:
          below: only steps before this one count.

        Raises:
          UserError: there are checkpoints, and none of them will do.
        """
        newest = self._newest(below) if jax.process_index() == 0 else None
        if jax.process_count() > 1:
            name, processes = f"moe_jax latest {self.folder}", set(range(jax.process_count()))
            with _lost_processes_named("agree on a checkpoint"):
                ocp.multihost.sync_global_processes(name, timeout=_START_SECONDS, processes=processes)
            newest = int(ocp.multihost.broadcast_one_to_all(np.int32(-1 if newest is None else newest)))
            newest = None if newest < 0 else newest
        return newest

    def _newest(self, below: int | None = None) -> int | None:
        """Return what `latest` does, as this process sees the folder."""
        steps = self.steps()
        for step in reversed(steps):
            if below is not None and step >= below:
                continue
            try:
                self.read_host(step)
                return step
            except DamagedCheckpointError as error:
                _log.warning("%s; the one before it is taken", error.args[0])
        if steps:
            raise UserError(
                f"no checkpoint of {self.folder} is whole, of {len(steps)}; put one back from a copy, or move the "
                "folder away to train from the start"
            )
        return None

    def set_aside(self, step: int) -> None:
        """Rename, on process 0, the checkpoints after `step`, which were found damaged: they do not count any more."""
        if jax.process_index() == 0:
            for late in self.steps():
                if late > step:
                    self._rename(late, ".damaged")

    def choose(self, step: int | None = None, named: str = "--step") -> int:
        """Return `step`, or the newest for None; a UserError where it is not there tells to set what `named` names."""
        steps = self.steps()
        newest = self._newest() if step is None else step
        if not steps:
            raise UserError(f"{self.folder} has no finished checkpoint; train first, or give the folder of another run")
        if step is not None and step not in steps:
            raise UserError(
                f"{self.folder} has no checkpoint of step {step}, only of {', '.join(map(str, steps))}; set {named} to "
                "one of these, or leave it out for the newest"
            )
        return newest

    def read_host(self, step: int) -> dict:
        """Return the host data of a checkpoint; reads one JSON file, and needs no device."""
        with self._reading_errors_named(step):
            custom = json.loads(readable(self._path(step) / "_METADATA").read_text())["custom_metadata"]
            found = custom["format"]
            if found != UNCHECKED_FORMAT and custom.pop("crc32") != _crc(custom):
                raise ValueError("the CRC of its host data differs")
            if custom["step"] != step:
                raise ValueError(f"it is of step {custom['step']}: it was renamed")
            if found not in (FORMAT, UNCHECKED_FORMAT):
                raise UserError(
                    f"{self._path(step)} has format {found!r}, but this program reads {FORMAT!r}; read it with the "
                    "version that wrote it"
                )
            return dict(custom["host"])

    def restore(self, step: int, abstract_state, home: Homes) -> tuple[Any, dict]:
        """Return (state, host data) of a finished checkpoint; without 'ema' where it or `abstract_state` has none.

        Args:
          abstract_state: ShapeDtypeStructs with NamedShardings of this run's mesh; any mesh.
          home: {segment: int [L, E]}, where the experts are to be stored, bank rows numbered as `placement.bank_rows`
            does.

        Raises:
          UserError: the checkpoint is of another model (names the first leaf that differs), or cannot be read.
          DamagedCheckpointError: a part that this process reads is missing, or not what was written.
        """
        host = self.read_host(step)
        stored, abstract_state = without_ema(self._open(step), abstract_state)
        return self._read(step, stored, flatten(abstract_state), abstract_state, home), host

    def restore_params(self, step: int, abstract_params, home: Homes, part: str = "params", stored_dtype: str = ""):
        """Return the parameters {'dense', 'bank'} alone, or 'ema', their moving average; else as `restore`.

        Args:
          stored_dtype: of the file's leaves, where they are to be cast to those of `abstract_params`.
        """
        self.read_host(step)
        if part == "ema" and not self.has_ema(step):
            raise UserError(
                f"{self._path(step)} holds no moving average of its parameters; leave out the flag that asks for it "
                "(--averaged, --init_from_ema), or give a run with train.ema_decay"
            )
        params = {name: leaf for name, leaf in self._open(step).items() if name.startswith(f"{part}/")}
        return self._read(step, params, flatten(abstract_params, part), abstract_params, home, stored_dtype)

    def digest(self, step: int) -> str:
        """Return a hash of the parameters in a checkpoint: equal values, equal hash; part after part on the host."""
        hashed = hashlib.sha256()
        stored = self._open(step)
        for name in sorted(name for name in stored if name.startswith("params/")):
            leaf = stored[name]
            dtype, shape = leaf.dtype.numpy_dtype, tuple(leaf.shape)
            hashed.update(f"{name} {dtype.name} {shape}\n".encode())
            rows = max(1, _HASHED_BYTES * shape[0] // max(1, dtype.itemsize * math.prod(shape)))
            for first in range(0, shape[0], rows):
                with self._reading_errors_named(step):
                    part = leaf[first : min(first + rows, shape[0])].read().result()
                hashed.update(np.ascontiguousarray(part).view(np.uint8).data)
        return hashed.hexdigest()

    def has_ema(self, step: int) -> bool:
        """Say whether a checkpoint holds a moving average of the parameters."""
        return any(name.startswith("ema/") for name in self._open(step))

    def read_arrays(self, step: int, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Return leaves {name: array} on the host, as they are stored; all leaves unless `names` are given."""
        stored = self._open(step)
        with self._reading_errors_named(step):
            return {name: stored[name].read().result() for name in names or stored}

    # Writing.

    def save(self, step: int, state, home: Homes, host: dict) -> None:
        """Start to save a state, after the save before it; when this returns, the state may be donated or changed.

        Args:
          step: number of finished steps; names the checkpoint.
          state: pytree of global jax.Arrays with NamedShardings; leaves under a key 'bank' are [D Rb, ...].
          home: {segment: int [L, E]}, home device of each expert in that bank.
          host: JSON data; tuples come back as lists, keys as text.

        Raises:
          UserError: this step is saved already, or this checkpoint or the one before cannot be written to the disk.
        """
        self.wait()
        if step in self.steps():
            raise UserError(f"{self._path(step)} exists already; move it away, or choose another --workdir")
        self._sweep_unfinished()
        with self._writing_errors_named(step):
            self.folder.mkdir(parents=True, exist_ok=True)
            opened = OpenFolder(self.folder)
        self.check_room(step, state)
        host = json.loads(json.dumps(host))  # what it is now, whatever the caller does with it while files are written
        arrays = copied(state, home, lambda _, leaf: in_host_memory(leaf))
        for name, array in arrays.items():
            if (own := home_of(name, home)) is not None:
                _EXPERTS[id(array)] = own.shape[1]
        self._pending = step, opened
        args = ocp.args.PyTreeSave(arrays, custom_metadata=_host_record(step, host))
        with self._writing_errors_named(step):
            self._writer.save(self._path(step), args=args)  # it takes the parts of all arrays before it returns
        _EXPERTS.clear()

    def check_room(self, step: int, state) -> None:
        """Raise a UserError where the disk cannot hold a state, or one of this description; a quota shows later."""
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        with self._writing_errors_named(step):
            if (free := shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free) < needed:
                raise OSError(errno.ENOSPC, f"{needed:,} bytes needed, {free:,} free")

    def wait(self) -> bool:
        """Wait until the last save has finished, delete what `keep` does not cover; return False if its folder is gone.

        Raises:
          UserError: it cannot be written to the disk; the checkpoints before it are as they were.
          HostLostError: another process did not write its part in time.
        """
        if self._pending is None:
            return True
        (step, opened), self._pending = self._pending, None
        try:
            with self._writing_errors_named(step):
                self._writer.wait_until_finished()
        except Exception:
            if opened.is_there() or jax.process_count() > 1:
                raise
        if jax.process_index() == 0:
            if not opened.is_there():
                _log.warning("%s was deleted or renamed, and the save of step %d with it", self.folder, step)
                shutil.rmtree(self._path(step), ignore_errors=True)  # the writer may have made a part of it again
                return False
            with self._writing_errors_named(step):
                _sync(self._path(step))
            for old in self.steps()[: -self._keep]:
                shutil.rmtree(self._rename(old, ".deleted"), ignore_errors=True)
        return True

    def close(self) -> None:
        """Wait until the last save has finished, and end the threads."""
        try:
            self.wait()
        finally:
            if "_writer" in self.__dict__:
                self._writer.close()
                del self._writer

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    def _rename(self, step: int, suffix: str) -> Path:
        """Give a finished checkpoint a name that does not count, in one move, and return its path."""
        path = self._path(step).with_name(self._path(step).name + suffix)
        shutil.rmtree(path, ignore_errors=True)
        with disk_errors_named(path):
            os.replace(self._path(step), path)
        return path

    @functools.cached_property
    def _writer(self) -> ocp.AsyncCheckpointer:
        # Naming the processes makes orbax wait at barriers of the coordination service, which have a time limit; its
        # default is a collective on the devices, which has none. Files are not compressed: zstd makes trained floats
        # only 7% smaller, and so sizes are known beforehand. What is replicated is written by one process: to divide
        # that work, orbax would compile a slicing program for each shape, which takes a second at the first save.
        several = jax.process_count() > 1
        processes = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(jax.process_count())) if several else None
        )
        arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        handler = ocp.PyTreeCheckpointHandler(
            use_compression=False,
            use_zarr3=True,
            multiprocessing_options=processes,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        )
        waits = ocp.options.AsyncOptions(timeout_secs=_WRITE_SECONDS, create_directories_asynchronously=False)
        return ocp.AsyncCheckpointer(handler, multiprocessing_options=processes, async_options=waits)

    def _open(self, step: int) -> dict[str, ts.TensorStore]:
        """Return {name: array in the file} of the leaves in a checkpoint."""
        with self._reading_errors_named(step):
            return _open_leaves(self._path(step))

    def _read(self, step: int, stored: dict[str, ts.TensorStore], needed: dict, tree, home: Homes, stored_dtype=""):
        """Return the leaves `needed` in the structure of `tree`; UserError names the first that differs."""
        named = functools.partial(self._reading_errors_named, step)
        return read_leaves(stored, needed, tree, home, (f"checkpoint {self._path(step)}", named), stored_dtype)

    def _sweep_unfinished(self) -> None:
        """Delete what a killed run or a failed save left; for writers only: a reader may run next to a job."""
        if jax.process_index() == 0 and self.folder.is_dir():
            for name in os.listdir(self.folder):
                if _UNFINISHED.fullmatch(name):
                    shutil.rmtree(self.folder / name, ignore_errors=True)

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
            # the operating system's error behind the exception, if there is one; tensorstore quotes it
            behind, code = error, None
            while behind is not None and code is None:
                quoted = re.search(r"os_error_code='(\d+)'", str(behind))
                code, why = (behind.errno, behind.strerror) if isinstance(behind, OSError) else (None, None)
                code = int(quoted[1]) if code is None and quoted else code
                behind = behind.__cause__ or behind.__context__
            if code is None:
                raise
            full = code in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free space on its disk" if full else "check its disk, or choose another --workdir"
            steps = self.steps()
            kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"
            raise UserError(
                f"cannot write {self._path(step)} ({why or os.strerror(code)}); {remedy}, then give the same command "
                f"again; {kept}"
            ) from error

    @contextlib.contextmanager
    def _reading_errors_named(self, step: int) -> Iterator[None]:
        """Tell what is damaged, by a DamagedCheckpointError, from what this process cannot read now."""
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if step not in self.steps():
                raise UserError(
                    f"{self.folder} has no finished checkpoint of step {step}, only {self.steps()}"
                ) from error
            line = _first_line(error)
            if isinstance(error, OSError) and error.errno not in _DAMAGE or _PASSING_ERRORS.match(line):
                raise UserError(
                    f"cannot read checkpoint {self._path(step)} ({line}); see that this user may read it and that its "
                    "disk answers, then give the same command again"
                ) from error
            raise DamagedCheckpointError(f"checkpoint {self._path(step)} is damaged ({line})") from error


def without_ema(stored: dict[str, Any], abstract_state: dict) -> tuple[dict[str, Any], dict]:
    """Return {name: stored leaf} and the state to read, without the average unless both have it."""
    kept = {name: leaf for name, leaf in stored.items() if not name.startswith("ema/")}
    if "ema" in abstract_state and len(kept) < len(stored):
        return stored, abstract_state
    return kept, {name: part for name, part in abstract_state.items() if name != "ema"}


def _sync(folder: Path) -> None:
    """See that a new folder, all in it and its name are on the disk, before what it replaces is deleted."""
    inside = (os.path.join(root, name) for root, _, names in os.walk(folder, topdown=False) for name in (*names, ""))
    for path in (*inside, folder.parent, folder.parent.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _UNSYNCED:
                raise
        finally:
            os.close(descriptor)


def _first_line(error: Exception) -> str:
    """Return what an exception says, without what tensorstore appends of its arguments."""
    said = str(error).split(" [tensorstore_spec")[0].strip() or type(error).__name__
    return said.splitlines()[0][:300]


def _host_record(step: int, host: dict) -> dict:
    """Return what `_METADATA` holds besides orbax' own."""
    record = {"format": FORMAT, "step": step, "host": host}
    return {**record, "crc32": _crc(record)}


def _crc(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


_orbax_array = tensorstore_utils._build_zarr3_metadata


def _checked_array(global_shape, chunk_shape, use_compression) -> dict:
    """Return what the file says of an array: which chunks it has, and that a CRC-32C ends each."""
    if use_compression:  # none of ours: what else this process saves stays as orbax has it
        return _orbax_array(global_shape, chunk_shape, use_compression)
    return {
        "shape": global_shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }


# Orbax has no argument for codecs; its own have a CRC of where the chunks lie, and none of the chunks.
tensorstore_utils._build_zarr3_metadata = _checked_array


# A leaf of the bank whose experts its devices cannot share evenly ends in rows that belong to no file (`stored_as`).
_EXPERTS: dict[int, int] = {}  # {id of an array that is being saved, [L, D e, ...]: E}
_orbax_slices = replica_slices.get_replica_slices


def _slices_in_file(array, *args, **kwargs):
    """Return what this process writes of an array, and the shape of the file's."""
    found, experts = _orbax_slices(array, *args, **kwargs), _EXPERTS.get(id(array), 0)
    if not experts or experts == array.shape[1]:
        return found
    inside = [part for part in found.replica_slices if (part.index[1].start or 0) < experts]
    shape = (array.shape[0], experts, *array.shape[2:])
    return dataclasses.replace(found, global_shape=shape, replica_slices=inside)


replica_slices.get_replica_slices = _slices_in_file


def _open_leaves(path: Path) -> dict[str, ts.TensorStore]:
    """Return {name: array in the file} of all leaves of the checkpoint `path`, rising."""
    # a folder by its path, not as a URL, in which '#', '?' and '%' have a meaning
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    drivers = {"zarr.json": "zarr3", ".zarray": "zarr"}  # of FORMAT and of UNCHECKED_FORMAT
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


@contextlib.contextmanager
def _lost_processes_named(task: str) -> Iterator[None]:
    """Turn a barrier that ran out of time into a HostLostError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in str(error):
            raise HostLostError(f"a process did not come to {task} within its time limit") from error
        raise


def _is_heard(record: logging.LogRecord) -> bool:
    """Keep orbax' progress, and the tracebacks of errors that `wait` raises again, out of absl's log."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname or record.levelno == logging.WARNING


@dataclasses.dataclass(frozen=True)
class LeafParts:
    """A leaf that is not there yet, but for its parts."""

    shape: tuple[int, ...]  # of the leaf, as the file holds it ([L, E, ...] for a leaf of the bank)
    dtype: np.dtype
    indices: list[Index]  # of all parts, which together are the leaf; each keeps rows of the same dims
    read: Callable[[Index], np.ndarray]  # of one part; it is called once for each

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _PartsHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's way to write an array, which asks for its parts one after the other instead of for the array."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)
        self._turn = asyncio.Lock()  # leaves in turn: orbax starts all at once

    async def _open_and_write(self, value, tspec, ts_context):
        # the file stores a part, with all dims of the leaf, in one piece
        index = (*value.indices[0], *(slice(None),) * (len(value.shape) - len(value.indices[0])))
        chunk = [size if isinstance(at, slice) else 1 for size, at in zip(value.shape, index, strict=True)]
        tspec["metadata"]["chunk_grid"]["configuration"]["chunk_shape"] = chunk
        # as many parts at a time as fit into memory, one at least: each commit to the store costs a file
        number = max(1, _BATCH_BYTES // (math.prod(chunk) * np.dtype(value.dtype).itemsize))
        async with self._turn:
            store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
            for first in range(0, len(value.indices), number):
                batch = value.indices[first : first + number]
                await asyncio.gather(*(store[index].write(value.read(index)) for index in batch))


def write_params(folder: Path, leaves: dict[str, LeafParts], host: dict) -> None:
    """Write `folder`/00000000, a checkpoint of step 0: {name such as 'params/dense/norm/scale': its parts}."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()), (LeafParts, _PartsHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True, type_handler_registry=registry)
    args = ocp.args.PyTreeSave(leaves, custom_metadata=_host_record(0, json.loads(json.dumps(host))))
    with ocp.Checkpointer(handler) as writer:
        writer.save(epath.Path(folder.absolute() / f"{0:08d}"), args=args)


def read_parts(folder: str | os.PathLike[str], step: int, parts: Iterable[tuple[str, Index]]) -> Iterator[np.ndarray]:
    """Yield parts, each (name of its leaf, index), of a finished checkpoint; parts of a leaf follow one another.

    A program that trains stores what one device held of a leaf in one piece, and a part of it is read with the whole
    piece; pieces are kept for the parts that come next, up to 64 MiB.

    Raises:
      UserError: there is no such leaf, or it cannot be read.
    """
    path, leaves = Path(folder).absolute() / f"{step:08d}", None
    for name, index in parts:
        try:
            leaves = leaves or _open_leaves(path)
            part = leaves[name][index].read().result()
        except (ValueError, KeyError, OSError) as error:
            line = _first_line(error)
            raise UserError(f"cannot read {name} of checkpoint {path} ({line}); give the folder of a run") from error
        yield part
