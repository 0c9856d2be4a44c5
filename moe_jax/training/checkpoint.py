"""Checkpoints of a run: saved while training goes on, whole or absent, read under any mesh.

Inputs: the training state {'step', 'params', 'opt_state'} of global arrays, and 'ema' where one is kept, the homes of
its experts, and a dictionary of host data (position in the data, config text, ...). Outputs: one folder a checkpoint,
named by its step; the state again, on whatever mesh, split and homes the reader has; and the config that is next to it.
Letters: docs/notation.md.
"""

# Leaves of the expert bank are stored as [L, E, ...], of each segment of the model for itself, so a file does not
# depend on mesh, schedule, placement or process count. Orbax writes a folder: all leaves by name in one OCDBT store
# of zarr arrays, the host data as JSON in `_METADATA` (`custom_metadata`).
#
#     checkpoints/00000120/                          finished: a name of digits alone
#     checkpoints/00000130.orbax-checkpoint-tmp/     being written; renamed by process 0 when all is written
#     checkpoints/00000090.deleted/                  being deleted
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from absl import logging as absl_logging
from etils import epath
from jax.sharding import NamedSharding

from moe_jax.config.gin_files import parse_run_config
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import HostLostError, UserError
from moe_jax.models.language_model import flatten
from moe_jax.observe.run_folder import RunFolder
from moe_jax.training.bank_order import Homes, from_file, home_of, stored_as, to_file

FORMAT = "moe_jax checkpoint 1"
_UNFINISHED = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted)")
_WRITE_SECONDS = 1200
_START_SECONDS = 300
_BATCH_BYTES = 64 * 2**20
_CACHE_BYTES = 2**26
Index = tuple[int | slice, ...]  # of a part of a leaf: a number keeps one row of that dim, slice(None) all of it


def run_config(workdir: str | os.PathLike[str], bindings: Sequence[str] = ()) -> RunConfig:
    """Return the config of a run folder; `bindings` win over it. A UserError if there is no such run."""
    folder = RunFolder(workdir, create=False)
    if not folder.config.exists():
        raise UserError(f"run folder {folder.path} holds no config.gin; give the --workdir of a run that has trained")
    return parse_run_config([str(folder.config)], bindings)[0]


class Checkpointer:
    """The checkpoints of one folder, of which the newest `keep` stay; only finished ones are listed, read or counted.

    `save` returns while files are still being written; what goes wrong then, the next `save`, `wait` or `close` raises.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int):
        if keep < 1:
            raise UserError(f"train.keep_checkpoints ({keep}) must be at least 1")
        self.folder = Path(folder).absolute()
        self._keep = keep
        absl_logging.get_absl_logger().addFilter(_is_heard)
        self._pending: int | None = None  # step of a save that may still be writing

    # Reading.

    def steps(self) -> list[int]:
        """Return the steps of all finished checkpoints as this process sees the folder, rising."""
        try:
            return sorted(int(name) for name in os.listdir(self.folder) if name.isdecimal())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def latest(self) -> int | None:
        """Return the step of the newest finished checkpoint, None without any; process 0 decides for all."""
        steps = self.steps()
        newest = steps[-1] if steps else -1
        if jax.process_count() > 1:
            name, processes = f"moe_jax latest {self.folder}", set(range(jax.process_count()))
            with _lost_processes_named("agree on a checkpoint"):
                ocp.multihost.sync_global_processes(name, timeout=_START_SECONDS, processes=processes)
            newest = int(ocp.multihost.broadcast_one_to_all(np.int32(newest)))
        return None if newest < 0 else newest

    def choose(self, step: int | None = None, named: str = "--step") -> int:
        """Return `step`, or the newest for None; a UserError where it is not there tells to set what `named` names."""
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.folder} has no finished checkpoint; train first, or give the folder of another run")
        if step is not None and step not in steps:
            raise UserError(
                f"{self.folder} has no checkpoint of step {step}, only of {', '.join(map(str, steps))}; set {named} to "
                "one of these, or leave it out for the newest"
            )
        return steps[-1] if step is None else step

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
        """Return (state, host data) of a finished checkpoint; without 'ema' where it or `abstract_state` has none.

        Args:
          abstract_state: ShapeDtypeStructs with NamedShardings of this run's mesh; any mesh.
          home: {segment: int [L, E]}, where the experts are to be stored, bank rows numbered as `placement.bank_rows`
            does.

        Raises:
          UserError: the checkpoint is of another model (names the first leaf that differs), or cannot be read.
        """
        host, stored = self.read_host(step), self._stored(step)
        kept = {name: leaf for name, leaf in stored.items() if not name.startswith("ema/")}
        if "ema" not in abstract_state or len(kept) == len(stored):
            stored = kept
            abstract_state = {name: part for name, part in abstract_state.items() if name != "ema"}
        return self._read(step, stored, flatten(abstract_state), abstract_state, home), host

    def restore_params(self, step: int, abstract_params, home: Homes, part: str = "params"):
        """Return the parameters {'dense', 'bank'} alone, or 'ema', their moving average; else as `restore`."""
        self.read_host(step)
        if part == "ema" and not self.has_ema(step):
            raise UserError(
                f"{self._path(step)} holds no moving average of its parameters; leave out the flag that asks for it "
                "(--averaged, --init_from_ema), or give a run with train.ema_decay"
            )
        params = {name: leaf for name, leaf in self._stored(step).items() if name.startswith(f"{part}/")}
        return self._read(step, params, flatten(abstract_params, part), abstract_params, home)

    def digest(self, step: int) -> str:
        """Return a hash of the parameters in a checkpoint: equal values, equal hash; leaf after leaf on the host."""
        hashed = hashlib.sha256()
        for name in sorted(name for name in self._stored(step) if name.startswith("params/")):
            leaf = self.read_arrays(step, [name])[name]
            hashed.update(f"{name} {leaf.dtype.name} {leaf.shape}\n".encode())
            hashed.update(np.ascontiguousarray(leaf).view(np.uint8).data)
        return hashed.hexdigest()

    def has_ema(self, step: int) -> bool:
        """Say whether a checkpoint holds a moving average of the parameters."""
        return any(name.startswith("ema/") for name in self._stored(step))

    def read_arrays(self, step: int, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Return leaves {name: array} on the host, as they are stored; all leaves unless `names` are given."""
        stored = self._stored(step)
        wanted = {n: jax.ShapeDtypeStruct(stored[n].shape, stored[n].dtype) for n in names or stored}
        return self._restore(step, wanted, {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted})

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
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        with self._writing_errors_named(step):
            self.folder.mkdir(parents=True, exist_ok=True)
            # A quota shows only in the write itself; what a disk cannot hold is refused before anything is written.
            if (free := shutil.disk_usage(self.folder).free) < needed:
                raise OSError(errno.ENOSPC, f"{needed:,} bytes needed, {free:,} free")
        host = json.loads(json.dumps(host))  # what it is now, whatever the caller does with it while files are written
        arrays = {}
        for name, leaf in flatten(state).items():  # in host buffers of its own
            own = home_of(name, home)
            ordered = leaf if own is None else to_file(leaf, own)
            arrays[name] = jax.device_put(ordered, ordered.sharding.with_memory_kind("pinned_host"))
            jax.block_until_ready(arrays[name])
            if ordered is not leaf:
                ordered.delete()
        self._pending = step
        args = ocp.args.PyTreeSave(arrays, custom_metadata={"format": FORMAT, "step": step, "host": host})
        with self._writing_errors_named(step):
            self._writer.save(self._path(step), args=args)

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
                path = self._path(old)  # renamed first, so that a kill leaves no half of one under its name
                doomed = path.with_name(path.name + ".deleted")
                shutil.rmtree(doomed, ignore_errors=True)
                os.replace(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)

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
            multiprocessing_options=processes,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        )
        waits = ocp.options.AsyncOptions(timeout_secs=_WRITE_SECONDS, create_directories_asynchronously=False)
        return ocp.AsyncCheckpointer(handler, multiprocessing_options=processes, async_options=waits)

    def _stored(self, step: int) -> dict[str, Any]:
        """Return {name: shape and dtype} of the leaves in a checkpoint."""
        with self._reading_errors_named(step):
            reader = ocp.PyTreeCheckpointHandler(use_compression=False)
            return flatten(reader.metadata(epath.Path(self._path(step))).tree)

    def _read(self, step: int, stored: dict[str, Any], needed: dict[str, Any], tree, home: Homes):
        """Return the leaves `needed` in the structure of `tree`; UserError names the first that differs."""
        wanted = {}
        for name, leaf in needed.items():
            assert isinstance(leaf.sharding, NamedSharding), f"{name} has no NamedSharding"
            own = home_of(name, home)
            wanted[name] = leaf if own is None else stored_as(leaf, own)
        # orbax by itself casts dtypes silently
        kinds = [
            {name: f"{np.dtype(leaf.dtype).name} {list(leaf.shape)}" for name, leaf in leaves.items()}
            for leaves in (stored, wanted)
        ]
        differing = [name for name in {**wanted, **stored} if kinds[0].get(name) != kinds[1].get(name)]
        if differing:
            held, here = (kind.get(differing[0], "absent") for kind in kinds)
            more = f" (and {len(differing) - 1} more leaves differ)" if len(differing) > 1 else ""
            raise UserError(
                f"checkpoint {self._path(step)} is not of this model: {differing[0]} is {held} in the checkpoint and "
                f"{here} in this run{more}; use the model, optimizer and tokenizer that it was trained with, or "
                "another --workdir"
            )
        on_devices = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for name, leaf in wanted.items()
        }
        arrays, leaves = self._restore(step, wanted, on_devices), []
        for name, leaf in needed.items():
            array, own = arrays.pop(name), home_of(name, home)
            if own is not None:
                array, in_file_order = from_file(array, leaf, own), array
                jax.block_until_ready(array)
                in_file_order.delete()  # not two banks at once
            leaves.append(array)
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def _restore(self, step: int, wanted: dict, restore_args: dict) -> dict:
        """Return {name: array} of the leaves `wanted`."""
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
        with self._reading_errors_named(step):
            return ocp.PyTreeCheckpointHandler(use_compression=False).restore(epath.Path(self._path(step)), args=args)

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
        tspec["metadata"]["chunks"] = chunk
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
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    args = ocp.args.PyTreeSave(leaves, custom_metadata={"format": FORMAT, "step": 0, "host": host})
    with ocp.Checkpointer(handler) as writer:
        writer.save(epath.Path(folder.absolute() / f"{0:08d}"), args=args)


def read_parts(folder: str | os.PathLike[str], step: int, parts: Iterable[tuple[str, Index]]) -> Iterator[np.ndarray]:
    """Yield parts, each (name of its leaf, index), of a finished checkpoint; parts of a leaf follow one another.

    A program that trains stores what one device held of a leaf in one piece, and a part of it is read with the whole
    piece; pieces are kept for the parts that come next, up to 64 MiB.

    Raises:
      UserError: there is no such leaf, or it cannot be read.
    """
    path = Path(folder).absolute() / f"{step:08d}"
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    opened = None
    for name, index in parts:
        try:
            if name != opened:
                kvstore = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}
                spec = {"driver": "zarr", "kvstore": kvstore, "recheck_cached_data": False}
                store, opened = ts.open(spec, open=True, context=context).result(), name
            part = store[index].read().result()
        except (ValueError, OSError) as error:
            line = str(error).splitlines()[0][:200]
            raise UserError(f"cannot read {name} of checkpoint {path} ({line}); give the folder of a run") from error
        yield part
