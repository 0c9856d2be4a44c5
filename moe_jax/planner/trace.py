"""Read and write traces of expert loads.

Enters: an npz with `loads` int [steps, layers, sources, experts] and, where known, `iterations` int [steps]; traces of
our own training and of others look alike. Leaves: a checked `Trace`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import zipfile

import numpy as np

from moe_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Hold loads int64 [n, L, S, E] and the iteration int64 [n] that each sample was taken at."""

    loads: np.ndarray
    iterations: np.ndarray

    def __post_init__(self):
        loads, iterations = np.asarray(self.loads), np.asarray(self.iterations)
        if loads.ndim != 4 or not loads.size:
            raise UserError(
                f"a trace's loads must have dims [steps, layers, sources, experts], not shape {loads.shape}"
            )
        if loads.dtype.kind not in "iuf":
            raise UserError(f"a trace's loads must be whole numbers, not {loads.dtype}")
        wrong = loads < 0
        if loads.dtype.kind == "f":
            wrong |= ~np.isfinite(loads) | (loads != np.floor(loads))
        if wrong.any():
            step, layer, source, expert = (int(i) for i in np.argwhere(wrong)[0])
            raise UserError(
                f"sample {step}, layer {layer}, source {source}, expert {expert}: load "
                f"{loads[step, layer, source, expert]} is "
                "not a whole number of tokens >= 0 (rule: loads count routed tokens); fix the trace"
            )
        if iterations.shape != loads.shape[:1] or iterations.dtype.kind not in "iu":
            raise UserError(
                f"iterations must be {len(loads)} whole numbers, one per sample, not shape {iterations.shape}"
            )
        if (np.diff(iterations) <= 0).any():
            at = int(np.argmax(np.diff(iterations) <= 0))
            raise UserError(
                f"iterations must rise, but sample {at} has {iterations[at]} and the next {iterations[at + 1]}"
            )
        object.__setattr__(self, "loads", loads.astype(np.int64))
        object.__setattr__(self, "iterations", iterations.astype(np.int64))


def read_trace(path: str | pathlib.Path) -> Trace:
    """Return the trace in an npz file; without `iterations` samples are numbered from 0."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"trace {str(path)!r} does not exist; give an npz with loads [steps, layers, sources, experts]")
    try:
        with np.load(path, allow_pickle=False) as file:
            if "loads" not in file:
                raise UserError(f"trace {path.name} has no array 'loads', only {', '.join(file.files) or 'nothing'}")
            loads = file["loads"]
            iterations = file["iterations"] if "iterations" in file else np.arange(len(loads))
    except (zipfile.BadZipFile, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"trace {path.name} is not an npz file of plain arrays: {error}") from error
    return Trace(loads=loads, iterations=iterations)


def write_trace(path: str | pathlib.Path, trace: Trace) -> None:
    """Write a trace as an npz with int32 loads."""
    np.savez_compressed(path, loads=trace.loads.astype(np.int32), iterations=trace.iterations)
