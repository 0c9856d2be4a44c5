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

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath
from jax.sharding import NamedSharding

from moe_jax.errors import HostLostError, UserError
from moe_jax.models.leaf_names import flatten
from moe_jax.training.bank_order import FileOrder, FileOrders, Homes, file_sharding
from moe_jax.training.checkpoint_format import FORMAT, agreed_part, check_same_leaves

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
          home: int [L, E], where the experts are to be stored, bank rows numbered as `moe_jax.placement.bank_rows`
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
