"""Expert loads of a run, kept in parts while it trains and as one file when it ends.

Inputs: loads int32 [L, S, E] of a step, on the host. Outputs: loads/part_*.npz, then loads.npz with
    loads       int32 [Nt, L, S, E]   tokens that source s routed to expert e
    iterations  int64 [Nt]            the step of each sample, rising
    sources     int64 [Nt]            S of each sample; smaller than the array's S where the run resumed on another mesh
    M, F, K, dtype, mesh, ...        of the run that recorded them, see `loads_origin.py`
When S differs between samples the missing sources are filled with zeros. `load_trace.py` reads such files of any
origin. Nothing here depends on the placement of the experts.
Letters: docs/notation.md.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from moe_jax.errors import UserError
from moe_jax.observe.atomic import TEMPORARY_SUFFIX, atomic_file, disk_errors_named
from moe_jax.observe.load_trace import read_loads
from moe_jax.observe.loads_origin import LoadsOrigin, origin_arrays
from moe_jax.observe.run_folder import RunFolder

PART_RECORDS = 64
PART_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class LoadsRecorder:
    """Take the loads of every n-th step.

    A sample is on the disk when `record` returns: the open part is rewritten atomically with each sample, and is closed
    at PART_RECORDS samples or PART_BYTES, which bounds that work. So a kill loses no sample of a step that a checkpoint
    contains.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int,
        *,
        resume_step: int | None = None,
        origin: LoadsOrigin | None = None,
    ) -> None:
        """Open the parts, without samples later than the restored checkpoint.

        Args:
          folder: the run folder.
          every: steps from one sample to the next; 0 records none.
          resume_step: the last step that the restored checkpoint contains; later samples are removed, and so is
            loads.npz until it is merged again. None starts a new run: all samples are removed.
          origin: what is written beside the samples about this run; None writes nothing.

        Raises:
          UserError: `every` is negative, or a part is damaged or cannot be written.
        """
        if every < 0:
            raise UserError(f"train.loads_every ({every}) must be 0 (record none) or a positive number of steps")
        self.every = every
        self._folder = RunFolder(folder)
        self._origin = origin
        self._older: list[tuple[LoadsOrigin | None, int, int, int]] = []  # origin, S, samples, last step of each part
        self._loads: list[np.ndarray] = []
        self._iterations: list[int] = []
        with disk_errors_named(self._folder.loads_parts):
            self._folder.loads_parts.mkdir(exist_ok=True)
            self._folder.loads.unlink(missing_ok=True)
            for leftover in self._folder.loads_parts.glob("*" + TEMPORARY_SUFFIX):
                leftover.unlink()
        self.last_step = self._cut_after(-1 if resume_step is None else resume_step)

    def describe_older(self) -> str | None:
        """Return what became of samples that an earlier start recorded on another mesh; None where there are none."""
        if self._origin is None:
            return None
        meshes: dict[str, int] = {}
        last_step = 0
        for origin, S, samples, step in self._older:
            if S == self._origin.sources and (origin is None or origin.mesh == self._origin.mesh):
                continue
            name = f"{S} sources" if origin is None else f"{origin.describe_mesh()}, {S} sources"
            meshes[name] = meshes.get(name, 0) + samples
            last_step = step
        if not meshes:
            return None
        listed = "; ".join(f"{count} of ({name})" for name, count in meshes.items())
        return (
            f"recorded loads: samples of other meshes up to step {last_step} are kept as they are: {listed}; those of "
            f"this mesh ({self._origin.describe_mesh()}, {self._origin.sources} sources) begin a new part, and "
            "loads.npz will hold all of them and say which mesh each is of"
        )

    def due(self, step: int) -> bool:
        """Return whether `record` would take this step, so that the loop fetches loads only then."""
        return self.every > 0 and step % self.every == 0

    def record(self, step: int, loads: np.ndarray) -> bool:
        """Write the sample of a step if it is due; return whether it was.

        Args:
          step: later than every step recorded before.
          loads: integers [L, S, E], anything that NumPy can read.
        """
        if not self.due(step):
            return False
        loads = np.asarray(loads)
        if loads.ndim != 3 or loads.dtype.kind not in "iu":
            raise ValueError(
                f"loads must be integers [layers, sources, experts], not {loads.dtype} {list(loads.shape)}"
            )
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step ({step}) must be later than the last recorded one ({self.last_step})")
        if self._loads and (self._loads[0].shape != loads.shape or self._part_is_full()):
            self._loads, self._iterations = [], []
        self._loads.append(loads.astype(np.int32))
        self._iterations.append(int(step))
        iterations = np.asarray(self._iterations, np.int64)
        self._write_part(np.stack(self._loads), iterations, [self._origin] * len(iterations))
        self.last_step = int(step)
        return True

    def merge(self) -> Path | None:
        """Write loads.npz from the parts, one part in memory at a time; the parts stay, so that a longer run can go on.

        Returns:
          Its path; None, and no file, when nothing was recorded.

        Raises:
          UserError: a part is damaged, the parts are of two models, or the disk is full.
        """
        parts = self._parts()
        if not parts:
            return None
        shapes, iterations, origins = [], [], []
        for part in parts:
            trace = read_loads(part)
            shapes.append(trace.loads.shape)
            iterations.append(trace.iterations)
            origins += trace.origins
        if len({(L, E) for _, L, _, E in shapes}) > 1:
            raise UserError(f"the parts of {self._folder.loads_parts} have shapes {shapes}: they are not of one model")
        Nt, S = sum(shape[0] for shape in shapes), max(shape[2] for shape in shapes)
        if any(shape[2] != S for shape in shapes):
            _log.info("loads.npz: sources were %s along the run; filled with zeros to %d", [s[2] for s in shapes], S)
        sources = np.concatenate([np.full(shape[0], shape[2], np.int64) for shape in shapes])
        with atomic_file(self._folder.loads) as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                with archive.open("loads.npy", "w", force_zip64=True) as member:
                    _write_loads(member, parts, (Nt, shapes[0][1], S, shapes[0][3]))
                small = {"iterations": np.concatenate(iterations), "sources": sources, **origin_arrays(origins)}
                for name, values in small.items():
                    with archive.open(name + ".npy", "w") as member:
                        np.lib.format.write_array(member, np.asanyarray(values), allow_pickle=False)
        return self._folder.loads

    def _parts(self) -> list[Path]:
        return sorted(self._folder.loads_parts.glob("part_*.npz"))

    def _part_is_full(self) -> bool:
        return len(self._loads) >= PART_RECORDS or sum(sample.nbytes for sample in self._loads) >= PART_BYTES

    def _write_part(self, loads: np.ndarray, iterations: np.ndarray, origins: Sequence[LoadsOrigin | None]) -> None:
        """Write one part under the name of its first step, so that parts sort by time."""
        with atomic_file(self._folder.loads_parts / f"part_{iterations[0]:010d}.npz") as file:
            np.savez(file, loads=loads, iterations=iterations, **origin_arrays(origins))

    def _cut_after(self, last_kept: int) -> int | None:
        """Drop all samples after step `last_kept`; return the last step that stays."""
        last_step = None
        for part in self._parts():
            if int(part.stem.removeprefix("part_")) > last_kept:
                with disk_errors_named(part):
                    part.unlink()
                continue
            trace = read_loads(part)
            kept = int((trace.iterations <= last_kept).sum())  # they rise
            if kept < len(trace.iterations):
                self._write_part(trace.loads[:kept], trace.iterations[:kept], trace.origins[:kept])
            last_step = int(trace.iterations[kept - 1])
            self._older.append((trace.origins[0], trace.loads.shape[2], kept, last_step))
        return last_step


def _write_loads(member: IO[bytes], parts: list[Path], shape: tuple[int, int, int, int]) -> None:
    """Stream the samples of all parts into one .npy, missing sources as zeros."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.int32)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(member, header)
    for part in parts:
        loads = read_loads(part).loads.astype(np.int32)
        missing = shape[2] - loads.shape[2]
        member.write(np.pad(loads, ((0, 0), (0, 0), (0, missing), (0, 0))).tobytes())
