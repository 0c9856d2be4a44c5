"""Checkpoints of a run: saved while training goes on, whole or absent, read under any mesh.

Inputs: the training state {'step', 'params', 'opt_state'} of global arrays, and 'ema' where one is kept, the homes of
its experts, and a dictionary of host data (position in the data, config text, ...). Outputs: one folder a checkpoint,
named by its step; the state again, on whatever mesh, split and homes the reader has; and the config that is next to it.
Letters: docs/notation.md.
"""

# Leaves of the expert bank are stored as [L, E, ...], of each segment of the model for itself, so a file does not
# depend on mesh, schedule, placement or process count. Orbax writes a folder: all leaves by name in one store of arrays
# (leaf_store.py), the host data as JSON in `_METADATA` (`custom_metadata`). Every part of a leaf ends with its CRC-32C,
# and the host data has a CRC of its own.
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
from collections.abc import Iterable, Iterator, Sequence
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
from moe_jax.config.run_config import RunConfig, bindings_as_begun
from moe_jax.errors import HostLostError, UserError
from moe_jax.models.language_model import flatten
from moe_jax.parallel.mesh import replace_leaf
from moe_jax.storage.bank_order import Homes, file_shape, from_file, home_of, in_order, to_file
from moe_jax.storage.leaf_store import Index, LeafParts, lies_in, open_leaves, tree_handler
from moe_jax.storage.run_folder import OpenFolder, RunFolder, disk_errors_named, readable

FORMAT, UNCHECKED_FORMAT = "moe_jax checkpoint 2", "moe_jax checkpoint 1"  # the older one has no CRC, and is still read
_UNFINISHED = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted)")
_WRITE_SECONDS = 1200
_MADE_BYTES = 2**26  # parts that are made while they are written, in memory at once
_HASHED_BYTES = 2**28  # the same of parts that are hashed
_PASSING_ERRORS = re.compile("PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED|ABORTED")
_DAMAGE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EIO)  # other errors of the system may pass
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Name a model of another run, whose weights a checkpoint does not hold."""

    folder: str
    step: int
    parameters: str  # their hash


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostData:
    """Hold what a run keeps beside its arrays, of this or an earlier version.

    In JSON what is at its default is not written, and what a checkpoint lacks is at its default.
    """

    config: str = ""  # the run's, as text
    parameters_only: bool = False  # of a converted model: runs start from it, and none goes on
    tokenizer: str | None = None  # its name
    teacher: ModelIdentity | None = None  # kept after it has left too
    base: ModelIdentity | None = None  # the model under adapters
    skipped_steps: int = 0  # so far, as far as metrics were read
    overflowed: tuple[int, ...] = ()  # the last optimistic steps that did, from 0, as far as metrics were read
    run_again: int = 0  # of the whole run: steps that took the complete program after the common one
    changes: tuple[dict, ...] = ()  # what --override changed: {'step', 'binding', 'was', 'is'}
    data: dict | None = None  # of `TokenStream.position`
    plan: dict | None = None  # of `RejitEngine.state`

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HostData:
        """Return the record of what `to_json` returned, in any version."""
        before = data.get("overflows", {"steps": (), "run_again": 0})  # of an earlier version
        data = {"overflowed": before["steps"], "run_again": before["run_again"], **data}
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        for name, kind in _NESTED.items():
            if record := known.get(name):
                known[name] = kind(**{field: record[field] for field in kind.__dataclass_fields__})
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        told = {name: value for name, value in vars(self).items() if value != getattr(HostData, name)}
        return told | {name: vars(told[name]) for name in _NESTED.keys() & told.keys()}


_NESTED = {"teacher": ModelIdentity, "base": ModelIdentity}


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

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 1):
        """Open a folder, which need not be there yet; keep: how many of the newest stay when others are saved."""
        self.folder, self._keep = Path(folder).absolute(), keep
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
        """Return the step of the newest finished checkpoint, as this process sees the folder; None without any.

        One whose folder is not what was written is named and passed over; arrays are checked when they are read.

        Args:
          below: only steps before this one count.

        Raises:
          UserError: there are checkpoints, and none of them will do.
        """
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

    def choose(self, step: int | None = None, remedy: str = "set --step to one of these") -> int:
        """Return `step`, or the newest for None; a UserError where it is not there tells to do what `remedy` says."""
        if not (steps := self.steps()):
            raise UserError(f"{self.folder} has no finished checkpoint; train first, or give the folder of another run")
        if step is not None and step not in steps:
            raise UserError(
                f"{self.folder} has no checkpoint of step {step}, only of {', '.join(map(str, steps))}; {remedy}"
            )
        return self.latest() if step is None else step

    def read_host(self, step: int) -> dict:
        """Return the host data of a checkpoint; reads one JSON file, and needs no device."""
        with self._reading_errors_named(step):
            custom = json.loads(readable(self._path(step) / "_METADATA").read_text())["custom_metadata"]
            written = custom["format"]
            if written != UNCHECKED_FORMAT and custom.pop("crc32") != _crc(custom):
                raise ValueError("the CRC of its host data differs")
            if custom["step"] != step:
                raise ValueError(f"it is of step {custom['step']}: it was renamed")
            if written not in (FORMAT, UNCHECKED_FORMAT):
                raise UserError(
                    f"{self._path(step)} has format {written!r}, but this program reads {FORMAT!r}; read it with the "
                    "version that wrote it"
                )
            return dict(custom["host"])

    def restore(self, step: int, tree, home: Homes, part: str = "", stored_dtype: str = ""):
        """Return the leaves that `tree` describes, in its structure, from a finished checkpoint.

        Args:
          tree: ShapeDtypeStructs with NamedShardings of this run's mesh; any mesh.
          home: {segment: int [L, E]}, where the experts are to be stored, bank rows numbered as `placement.bank_rows`
            does.
          part: '' is a whole state; 'params' the parameters {'dense', 'bank'} alone; 'ema' their moving average.
          stored_dtype: of the file's leaves, where they are to be cast to those of `tree`.

        Raises:
          UserError: the checkpoint is of another model (names the first leaf that differs), or cannot be read.
          DamagedCheckpointError: a part that this process reads is missing, or not what was written.
        """
        self.read_host(step)  # whole, and of a known format
        stored = {name: leaf for name, leaf in self._open(step).items() if name.startswith(part and f"{part}/")}
        if part == "ema" and not stored:
            raise UserError(
                f"{self._path(step)} holds no moving average of its parameters; leave out the flag that asks for it "
                "(--averaged, --init_from_ema), or give a run with train.ema_decay"
            )
        wanted, needed, leaves = flatten(tree, part), {}, []
        for name, leaf in wanted.items():
            needed[name] = leaf.update(dtype=stored_dtype or leaf.dtype)
        there = {name: f"{leaf.dtype.name} {list(leaf.shape)}" for name, leaf in stored.items()}
        shapes = {name: list(file_shape(leaf, home_of(name, home))) for name, leaf in needed.items()}
        here = {name: f"{leaf.dtype.name} {shapes[name]}" for name, leaf in needed.items()}
        if differing := [name for name in {**here, **there} if there.get(name) != here.get(name)]:
            first, kinds = differing[0], [leaves.get(differing[0], "absent") for leaves in (there, here)]
            more = f" (and {len(differing) - 1} more leaves differ)" if len(differing) > 1 else ""
            raise UserError(
                f"checkpoint {self._path(step)} is not of this model: {first} is {kinds[0]} in the checkpoint and "
                f"{kinds[1]} in this run{more}; use the model, optimizer and tokenizer that it was trained with, or "
                "another --workdir"
            )
        for name, leaf in needed.items():
            array, dtype = self._read_leaf(step, stored[name], leaf, home_of(name, home)), wanted[name].dtype
            if array.dtype != dtype:
                array = replace_leaf(lambda array, dtype=dtype: array.astype(dtype), array, leaf.sharding)
            leaves.append(array)
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

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

    def read_parts(self, step: int, parts: Iterable[tuple[str, Index]]) -> Iterator[np.ndarray]:
        """Yield parts, each (name of its leaf, index), of a checkpoint; parts of a leaf follow one another.

        A program that trains stores what one device held of a leaf in one piece, and a part of it is read with the
        whole piece; pieces are kept for the parts that come next, up to 64 MiB.
        """
        stored = self._open(step)
        for name, index in parts:
            with self._reading_errors_named(step):
                if name not in stored:
                    raise ValueError(f"it holds no {name}")
                part = stored[name][index].read().result()
            yield part

    def _open(self, step: int) -> dict[str, ts.TensorStore]:
        """Return {name: array in the file} of the leaves in a checkpoint."""
        with self._reading_errors_named(step):
            return open_leaves(self._path(step))

    def _read_leaf(self, step: int, stored: ts.TensorStore, leaf: jax.ShapeDtypeStruct, home: np.ndarray | None):
        """Return a leaf on the mesh, all of whose parts for this process are read at once."""
        assert isinstance(leaf.sharding, NamedSharding), "a leaf has no NamedSharding"
        ordered = in_order(leaf, home)
        indices = ordered.sharding.addressable_devices_indices_map(ordered.shape).values()
        with self._reading_errors_named(step):
            reading = {repr(index): stored[index].read() for index in indices if lies_in(index, stored.shape)}
            parts = {index: part.result() for index, part in reading.items()}
        beyond = np.zeros(ordered.sharding.shard_shape(ordered.shape), leaf.dtype)  # parts that are in no file
        array = jax.make_array_from_callback(
            ordered.shape, ordered.sharding, lambda index: parts.get(repr(index), beyond)
        )
        return from_file(array, leaf, home)

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
        args = ocp.args.PyTreeSave(_in_host_memory(state, home), custom_metadata=_host_record(step, host))
        self._pending = step, opened
        with self._writing_errors_named(step):
            self._writer.save(self._path(step), args=args)

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
                # a new folder, all in it and its name are to be on the disk before what it replaces is deleted
                folders = os.walk(self._path(step), topdown=False)
                inside = (os.path.join(root, name) for root, _, names in folders for name in (*names, ""))
                for path in (*inside, self.folder, self.folder.parent):
                    descriptor = os.open(path, os.O_RDONLY)
                    with contextlib.suppress(
                        OSError
                    ):  # of a file system that cannot; of arrays tensorstore would say so
                        os.fsync(descriptor)
                    os.close(descriptor)
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
        # default is a collective on the devices, which has none.
        several = jax.process_count() > 1
        processes = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(jax.process_count())) if several else None
        )
        waits = ocp.options.AsyncOptions(timeout_secs=_WRITE_SECONDS, create_directories_asynchronously=False)
        return ocp.AsyncCheckpointer(tree_handler(processes), multiprocessing_options=processes, async_options=waits)

    def _sweep_unfinished(self) -> None:
        """Delete what a killed run or a failed save left; for writers only: a reader may run next to a job."""
        if jax.process_index() == 0 and self.folder.is_dir():
            for name in os.listdir(self.folder):
                if _UNFINISHED.fullmatch(name):
                    shutil.rmtree(self.folder / name, ignore_errors=True)

    @contextlib.contextmanager
    def _writing_errors_named(self, step: int) -> Iterator[None]:
        """Turn a full or failing disk, and a barrier that ran out of time, into one line.

        Whatever was written of this step is deleted where all processes are there.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in str(error):
                raise HostLostError(f"a process did not come to save step {step} within its time limit") from error
            self._pending = None
            self._sweep_unfinished()
            cause, behind = error, None  # the operating system's error, which tensorstore quotes
            while cause is not None and behind is None:
                if isinstance(cause, OSError) and cause.errno is not None:
                    behind = cause
                elif quoted := re.search(r"os_error_code='(\d+)'", str(cause)):
                    behind = OSError(int(quoted[1]), os.strerror(int(quoted[1])))
                cause = cause.__cause__ or cause.__context__
            if behind is None:
                raise
            steps = self.steps()
            kept = f"; the checkpoint of step {steps[-1]} is kept" if steps else "; there is no checkpoint yet"
            with disk_errors_named(self._path(step), kept):
                raise behind from error

    @contextlib.contextmanager
    def _reading_errors_named(self, step: int) -> Iterator[None]:
        """Tell what is damaged, by a DamagedCheckpointError, from what this process cannot read now."""
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if step not in self.steps():
                there = f"has no finished checkpoint of step {step}, only {self.steps()}"
                raise UserError(f"{self.folder} {there}") from error
            # without what tensorstore appends of its arguments
            said = str(error).split(" [tensorstore_spec")[0].strip() or type(error).__name__
            line = said.splitlines()[0][:300]
            if isinstance(error, OSError) and error.errno not in _DAMAGE or _PASSING_ERRORS.match(line):
                raise UserError(
                    f"cannot read checkpoint {self._path(step)} ({line}); see that this user may read it and that its "
                    "disk answers, then give the same command again"
                ) from error
            raise DamagedCheckpointError(f"checkpoint {self._path(step)} is damaged ({line})") from error


def _in_host_memory(state, home: Homes) -> dict[str, LeafParts]:
    """Return the leaves of a state as a file holds them, copied to host memory that is theirs alone.

    A leaf of the bank that was reordered is gone before the next one is.
    """
    copies, leaves = {}, flatten(state)
    for name, leaf in leaves.items():
        ordered = to_file(leaf, home_of(name, home))
        copies[name] = jax.device_put(ordered, ordered.sharding.with_memory_kind("pinned_host"))
        if ordered is not leaf:
            jax.block_until_ready(copies[name])
            ordered.delete()
    jax.block_until_ready(copies)
    written = {}
    for name, array in copies.items():
        # Of equal parts on several devices one is written, by one process: to divide that work among processes, a
        # program that slices each shape would have to be compiled, which takes a second at the first save. The array
        # may go on behind the end of what the file holds.
        shape = file_shape(leaves[name], home_of(name, home))
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0 and lies_in(shard.index, shape)]
        parts = [(shard.index, lambda data=shard.data: np.asarray(data)) for shard in shards]
        written[name] = LeafParts(shape, array.dtype, array.sharding.shard_shape(array.shape), parts)
    return written


def write_params(folder: Path, leaves: dict[str, LeafParts], host: dict) -> None:
    """Write `folder`/00000000, a checkpoint of step 0: {name such as 'params/dense/norm/scale': its parts}."""
    args = ocp.args.PyTreeSave(leaves, custom_metadata=_host_record(0, host))
    with ocp.Checkpointer(tree_handler(memory=_MADE_BYTES)) as writer:
        writer.save(epath.Path(folder.absolute() / f"{0:08d}"), args=args)


def _host_record(step: int, host: dict) -> dict:
    """Return what `_METADATA` holds besides orbax' own: a copy, whatever the caller does while files are written."""
    record = json.loads(json.dumps({"format": FORMAT, "step": step, "host": host}))
    return {**record, "crc32": _crc(record)}


def _crc(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _is_heard(record: logging.LogRecord) -> bool:
    """Keep orbax' progress, and the tracebacks of errors that `wait` raises again, out of absl's log."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname or record.levelno == logging.WARNING
