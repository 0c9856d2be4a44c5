"""Expert loads of a run, kept in parts while it trains and as one file when it ends.

Loads int32 [L, S, E] of a step, on the host, become loads/part_*.npz, then loads.npz with
    loads       int32 [Nt, L, S, E]   tokens that source s routed to expert e
    iterations  int64 [Nt]            the step of each sample, rising
    sources     int64 [Nt]            S of each sample; smaller than the array's S where the run resumed on another mesh
    M, F, K, dtype, mesh, ...        of the run that recorded them, see `LoadsOrigin`
When S differs between samples the missing sources are filled with zeros. Nothing here depends on the placement of the
experts. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_jax.errors import UserError
from moe_jax.shipped import here_or_shipped
from moe_jax.storage.run_folder import TEMPORARY_SUFFIX, RunFolder, atomic_file, disk_errors_named

SCALARS = {
    "model_dim": "M",
    "hidden_dim": "F",
    "top_k": "K",
    "dtype": "dtype",
    "activation": "activation",
    "moe_every": "moe_every",
    "dense_hidden_dim": "dense_F",
    "sequence_length": "sequence_length",
}  # field of `LoadsOrigin` -> key
KEYS = (*SCALARS.values(), "mesh", "devices_per_node", "cluster", "mesh_index")
SEGMENTS, PRECEDING = "segments", "preceding"  # where there are any
PART_RECORDS = 64
PART_BYTES = 4 << 20
MOST_BYTES = 128 << 20  # of all samples of a run

_log = logging.getLogger(__name__)


def device_load_max_over_mean(loads: np.ndarray, home: np.ndarray, devices: int) -> np.ndarray:
    """Divide the fullest device's tokens by the mean over devices, when every expert runs at its home.

    A step waits for its fullest device, so this is the factor by which expert compute exceeds the balanced one.

    Args:
      loads: integers [L, S, E], tokens that source s routed to expert e; home: integers [L, E], in 0 .. devices - 1.

    Returns:
      float64 [L], 1 when balanced (a layer without any token is), D at worst.
    """
    loads, home = np.asarray(loads), np.asarray(home)
    L = len(loads)
    per_device = np.zeros((L, devices), np.int64)
    np.add.at(per_device, (np.arange(L)[:, None], home), loads.sum(axis=1, dtype=np.int64))
    mean = per_device.mean(axis=1)
    return np.where(mean > 0, per_device.max(axis=1) / np.where(mean > 0, mean, 1.0), 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadsOrigin:
    """Describe the run that recorded a sample."""

    model_dim: int  # M
    hidden_dim: int  # F, of the first segment where there are several; so are K and what precedes the layer
    top_k: int  # K
    dtype: str  # what the model computes in
    mesh: tuple[tuple[str, int], ...]  # (axis, size) of the device mesh, slowest axis first
    devices_per_node: int  # devices of an expert-parallel group that share a node
    cluster: str = ""  # path of the cluster file that the run named, or ''
    activation: str = ""
    moe_every: int = 0
    dense_hidden_dim: int = 0
    sequence_length: int = 0
    # (MoE layers, E, F, K) of each run of equal layers, where they differ or do not fill the mesh
    segments: tuple[tuple[int, int, int, int], ...] = ()
    preceding: tuple[tuple[int, int], ...] = ()  # (moe_every, dense_hidden_dim) of each of them

    @property
    def sources(self) -> int:
        """S, members of the largest expert-parallel group."""
        devices = math.prod(size for axis, size in self.mesh if axis.partition("_of_")[0] in ("expert", "expert_mp"))
        return min(devices, max((experts for _, experts, _, _ in self.segments), default=devices))

    @property
    def expert_shards(self) -> int:
        """N_ESP, devices that share the hidden dim of an expert; 1 where the mesh is not known."""
        return math.prod(size for axis, size in self.mesh if axis in ("expert_shard", "expert_shard_mp"))


class LoadsTrace(NamedTuple):
    """A recorded trace."""

    loads: np.ndarray  # [Nt, L, S, E], non-negative integers
    iterations: np.ndarray  # [Nt], rising integers
    sources: np.ndarray | None = None  # [Nt], S of each sample; None where the file does not say: all the array's
    origins: tuple[LoadsOrigin | None, ...] = ()  # the run behind each sample, None where the file does not say


def read_loads(path: str | os.PathLike[str]) -> LoadsTrace:
    """Read and check a trace of loads; a UserError names the first bad entry.

    Args:
      path: an npz file with `loads` [Nt, L, S, E], whole numbers of any dtype, and `iterations` [Nt]; without
        `iterations` samples are numbered from 0; `sources` and the keys of `LoadsOrigin` are read where they are;
        other keys are ignored.
    """
    path = here_or_shipped(path)
    arrays = _read_arrays(path)
    loads = arrays["loads"]
    if loads.ndim != 4 or loads.dtype.kind not in "iuf":
        raise UserError(
            f"{path}: loads has shape {list(loads.shape)}; it must be [steps, layers, sources, experts], counts of"
            f" tokens, and has dtype {loads.dtype}"
        )
    iterations = arrays.get("iterations", np.arange(len(loads)))
    if iterations.dtype.kind not in "iu" or iterations.shape != loads.shape[:1]:
        raise UserError(
            f"{path}: iterations is {iterations.dtype} {list(iterations.shape)}; it must be integers [{len(loads)}],"
            " one for each step of loads"
        )
    wrong = loads < 0
    if loads.dtype.kind == "f":
        wrong |= ~np.isfinite(loads) | (loads != np.floor(loads))
    if wrong.any():
        sample, layer, source, expert = np.argwhere(wrong)[0].tolist()
        value = loads[sample, layer, source, expert]
        raise UserError(
            f"{path}: loads[{sample}, {layer}, {source}, {expert}] ({value}: layer {layer}, source {source}, expert"
            f" {expert}) is not a whole number of at least 0; they are counts of tokens"
        )
    iterations = iterations.astype(np.int64)
    later = np.diff(iterations) > 0
    if not later.all():
        sample = int(np.argmin(later)) + 1
        raise UserError(
            f"{path}: iterations[{sample}] ({iterations[sample]}) must be later than the one before it"
            f" ({iterations[sample - 1]})"
        )
    sources = arrays.get("sources")
    if sources is not None and (sources.shape != iterations.shape or sources.dtype.kind not in "iu"):
        sources = None  # a key of another program
    loads = loads if loads.dtype.kind in "iu" else loads.astype(np.int64)
    return LoadsTrace(loads, iterations, sources, _read_origins(arrays, len(loads), path))


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a trace's file by key, `loads` among them; a UserError where it is no such file."""
    expected = "a trace is an npz file with `loads` and `iterations`"
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path} is no file; {expected}")
    try:
        with open(path, "rb") as file:  # np.load leaves a damaged file open
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise UserError(f"{path} is a single array; {expected}")
            if "loads" not in archive:
                raise UserError(f"{path} has no loads; it has {sorted(archive)}")
            names = ("loads", "iterations", "sources", *KEYS, SEGMENTS, PRECEDING)
            return {name: archive[name] for name in names if name in archive}
    except UserError:
        raise
    except Exception as error:  # of NumPy, zipfile or zlib, by where the file is damaged
        raise UserError(f"{path} is not a readable npz file of plain arrays ({error})") from error


def _read_origins(arrays: Mapping[str, np.ndarray], samples: int, path: object) -> tuple[LoadsOrigin | None, ...]:
    """Return the origin of each of `samples` samples, None where the file does not say."""
    if not all(key in arrays for key in KEYS):  # a file of another program
        return (None,) * samples
    try:
        segments, preceding = (
            tuple(tuple(int(size) for size in row) for row in arrays.get(key, np.zeros((0, width))).tolist())
            for key, width in ((SEGMENTS, 4), (PRECEDING, 2))
        )
        if [len(row) for row in segments + preceding] != [4] * len(segments) + [2] * len(segments):
            raise ValueError(f"{PRECEDING} must have a row for each of the {SEGMENTS}")
        scalars = {field: arrays[key].item() for field, key in SCALARS.items()}
        model = {"segments": segments, "preceding": preceding, **scalars}
        known: list[LoadsOrigin | None] = []
        for text, per_node, cluster in zip(arrays["mesh"], arrays["devices_per_node"], arrays["cluster"], strict=True):
            mesh = tuple((str(axis), int(size)) for axis, size in json.loads(str(text) or "{}").items())
            where = {"mesh": mesh, "devices_per_node": int(per_node), "cluster": str(cluster)}
            known.append(LoadsOrigin(**where, **model) if mesh else None)
        index = arrays["mesh_index"].tolist()
        if len(index) != samples or not all(0 <= place < len(known) for place in index):
            raise ValueError(f"mesh_index must be {samples} numbers below {len(known)}")
        return tuple(known[place] for place in index)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: what it says of its run ({', '.join(KEYS)}) does not fit together ({error}); save it again with "
            "loads and iterations alone"
        ) from error


def _origin_arrays(origins: Sequence[LoadsOrigin | None]) -> dict[str, np.ndarray]:
    """Return the arrays of the file for one origin per sample; {} where none is known."""
    known = [origin for origin in origins if origin is not None]
    if not known:
        return {}
    models = list(dict.fromkeys((o.model_dim, o.hidden_dim, o.top_k, o.dtype, o.segments) for o in known))
    if len(models) > 1:
        raise UserError(
            f"samples have (M, F, K, dtype, segments) {models}: they are not of one model; use one folder for each"
        )
    of_each = [(o.mesh, o.devices_per_node, o.cluster) if o else ((), 0, "") for o in origins]
    meshes = list(dict.fromkeys(of_each))
    last = known[-1]
    return {
        **{key: np.array(getattr(last, field)) for field, key in SCALARS.items()},
        "mesh": np.array([json.dumps(dict(mesh)) if mesh else "" for mesh, _, _ in meshes]),
        "devices_per_node": np.array([per_node for _, per_node, _ in meshes], np.int64),
        "cluster": np.array([cluster for _, _, cluster in meshes]),
        "mesh_index": np.array([meshes.index(mesh) for mesh in of_each], np.int64),
        **{key: np.array(getattr(last, key), np.int64) for key in (SEGMENTS, PRECEDING) if last.segments},
    }


def sample_every(every: int, steps: int, sample_bytes: int) -> int:
    """Return the steps between samples, each kept with the step before it: `every`, or a multiple by MOST_BYTES."""
    all_bytes = steps // every * sample_bytes
    return every if min(2, every) * all_bytes <= MOST_BYTES else every * math.ceil(2 * all_bytes / MOST_BYTES)


class LoadsRecorder:
    """Take the loads of every n-th step, and of the one before it, from which a plan is judged on it.

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
          every: steps from one sample to the next.
          resume_step: the last step that the restored checkpoint contains; later samples are removed, and so is
            loads.npz until it is merged again. None starts a new run: all samples are removed.
        """
        self.every = every
        self._folder = RunFolder(folder)
        self._origin = origin
        self._loads: list[np.ndarray] = []
        self._iterations: list[int] = []
        with disk_errors_named(self._folder.loads_parts):
            self._folder.loads_parts.mkdir(exist_ok=True)
            self._folder.loads.unlink(missing_ok=True)
            for leftover in self._folder.loads_parts.glob("*" + TEMPORARY_SUFFIX):
                leftover.unlink()
        self.last_step = None
        last_kept = -1 if resume_step is None else resume_step
        for part in self._parts():
            if int(part.stem.removeprefix("part_")) > last_kept:
                with disk_errors_named(part):
                    part.unlink()
                continue
            if (trace := self._read_part(part)) is None:
                continue
            kept = int((trace.iterations <= last_kept).sum())  # they rise
            if kept < len(trace.iterations):
                self._write_part(trace.loads[:kept], trace.iterations[:kept], trace.origins[:kept])
            self.last_step = int(trace.iterations[kept - 1])

    def due(self, step: int) -> bool:
        """Return whether `record` would take this step, so that the loop fetches loads only then."""
        return step % self.every in (0, self.every - 1)

    def record(self, step: int, loads: np.ndarray) -> None:
        """Write the sample of a step, later than all before it, if it is due.

        Args:
          loads: integers [L, S, E], anything that NumPy can read.
        """
        if not self.due(step):
            return
        loads = np.asarray(loads)
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step ({step}) must be later than the last recorded one ({self.last_step})")
        full = len(self._loads) >= PART_RECORDS or sum(sample.nbytes for sample in self._loads) >= PART_BYTES
        if full or self._loads and self._loads[0].shape != loads.shape:
            self._loads, self._iterations = [], []
        self._loads.append(loads.astype(np.int32))
        self._iterations.append(int(step))
        iterations = np.asarray(self._iterations, np.int64)
        self._write_part(np.stack(self._loads), iterations, [self._origin] * len(iterations))
        self.last_step = int(step)

    def merge(self) -> Path | None:
        """Write loads.npz from the parts, which stay for a longer run, and return its path; None without any part.

        A UserError where they are of two models.
        """
        traces = [trace for part in self._parts() if (trace := self._read_part(part)) is not None]
        if not traces:
            return None
        shapes = [trace.loads.shape for trace in traces]
        if len({(L, E) for _, L, _, E in shapes}) > 1:
            raise UserError(f"the parts of {self._folder.loads_parts} have shapes {shapes}: they are not of one model")
        S = max(shape[2] for shape in shapes)
        if any(shape[2] != S for shape in shapes):
            _log.info("loads.npz: sources were %s along the run; filled with zeros to %d", [s[2] for s in shapes], S)
        missing = [((0, 0), (0, 0), (0, S - shape[2]), (0, 0)) for shape in shapes]  # sources, as zeros
        padded = [np.pad(trace.loads, sides) for trace, sides in zip(traces, missing, strict=True)]
        arrays = {
            "loads": np.concatenate(padded),
            "iterations": np.concatenate([trace.iterations for trace in traces]),
            "sources": np.concatenate([np.full(shape[0], shape[2], np.int64) for shape in shapes]),
            **_origin_arrays([origin for trace in traces for origin in trace.origins]),
        }
        # np.savez_compressed takes eight times as long, for a tenth less
        with atomic_file(self._folder.loads) as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for name, values in arrays.items():
                    with archive.open(name + ".npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, values, allow_pickle=False)
        return self._folder.loads

    def _parts(self) -> list[Path]:
        """Return the files of all parts, rising."""
        return sorted(part for part in self._folder.loads_parts.glob("part_*.npz") if part.stem[5:].isdecimal())

    def _read_part(self, part: Path) -> LoadsTrace | None:
        """Return the samples of a part; None where it is damaged, and so set aside: a run does not end by it."""
        try:
            trace = read_loads(part)
            if trace.iterations[0] == int(part.stem[5:]):
                return trace
            why = f"{part} begins with step {trace.iterations[0]}"
        except (UserError, IndexError) as error:
            why = str(error) or f"{part} is empty"
        _log.warning("%s; it is set aside, and its samples are missing", why)
        with disk_errors_named(part):
            part.replace(part.with_suffix(".damaged"))
        return None

    def _write_part(self, loads: np.ndarray, iterations: np.ndarray, origins: Sequence[LoadsOrigin | None]) -> None:
        """Write one part under the name of its first step, so that parts sort by time."""
        with disk_errors_named(self._folder.loads_parts):
            self._folder.loads_parts.mkdir(exist_ok=True)  # somebody may have deleted it
        with atomic_file(self._folder.loads_parts / f"part_{iterations[0]:010d}.npz") as file:
            np.savez(file, loads=loads, iterations=iterations, **_origin_arrays(origins))
