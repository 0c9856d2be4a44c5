"""Read traces of expert loads, those of our own runs and those of others, for pictures and for replay.

Inputs: an npz with `loads` [Nt, L, S, E] and, where known, `iterations` [Nt]. Outputs: a checked `LoadsTrace`.
Letters: docs/notation.md.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from typing import NamedTuple

import numpy as np

from moe_jax.errors import UserError
from moe_jax.observe.loads_origin import KEYS, LAYER_KEYS, PRECEDING, SEGMENTS, LoadsOrigin, read_origins


class LoadsTrace(NamedTuple):
    """A recorded trace.

    Attributes:
      loads: [Nt, L, S, E], non-negative integers.
      iterations: [Nt], rising integers.
      sources: [Nt], S of each sample; None where the file does not say, which means that all are the array's.
      origins: the run behind each sample, Nt of them, None where the file does not say.
    """

    loads: np.ndarray
    iterations: np.ndarray
    sources: np.ndarray | None = None
    origins: tuple[LoadsOrigin | None, ...] = ()


def read_loads(path: str | os.PathLike[str]) -> LoadsTrace:
    """Read and check a trace of loads.

    Args:
      path: an npz file with `loads` [Nt, L, S, E], whole numbers of any dtype, and `iterations` [Nt]; without
        `iterations` samples are numbered from 0; `sources` and what `loads_origin.py` names are read where they are;
        other keys are ignored.

    Returns:
      A `LoadsTrace`.

    Raises:
      UserError: the file is missing or no npz, lacks `loads`, or its arrays break a rule above; names the first bad
        entry.
    """
    arrays = _arrays(path)
    loads, iterations = check_loads(arrays["loads"], arrays["iterations"], path)[:2]
    sources = arrays.get("sources")
    if sources is not None and (sources.shape != iterations.shape or sources.dtype.kind not in "iu"):
        sources = None  # a key of another program
    return LoadsTrace(loads, iterations, sources, read_origins(arrays, len(loads), path))


def check_loads(loads: np.ndarray, iterations: np.ndarray, path: str | os.PathLike[str]) -> LoadsTrace:
    """Return the arrays of a trace as integers, or raise a UserError that names `path`; see `read_loads`."""
    if loads.ndim != 4:
        raise UserError(f"{path}: loads has shape {list(loads.shape)}; it must be [steps, layers, sources, experts]")
    if loads.dtype.kind not in "iuf":
        raise UserError(f"{path}: loads has dtype {loads.dtype}; they are counts of tokens and must be whole numbers")
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
    if (np.diff(iterations.astype(np.int64)) <= 0).any():
        sample = int(np.argmax(np.diff(iterations.astype(np.int64)) <= 0)) + 1
        raise UserError(
            f"{path}: iterations[{sample}] ({iterations[sample]}) must be later than the one before it"
            f" ({iterations[sample - 1]})"
        )
    return LoadsTrace(loads if loads.dtype.kind in "iu" else loads.astype(np.int64), iterations)


def _arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return `loads`, `iterations` and what else is known here, as they stand in the file."""
    try:
        # Opened here, since np.load leaves a damaged file open.
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise UserError(f"{path} is a single array; a trace is an npz file with `loads` and `iterations`")
            if "loads" not in archive:
                raise UserError(f"{path} has no loads; it has {sorted(archive)}")
            loads = archive["loads"]
            names = ("iterations", "sources", *KEYS, SEGMENTS, PRECEDING, *LAYER_KEYS.values())
            known = (name for name in names if name in archive)
            return {"loads": loads, "iterations": np.arange(len(loads)), **{name: archive[name] for name in known}}
    except UserError:
        raise
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not a readable npz file of plain arrays ({error})") from error
