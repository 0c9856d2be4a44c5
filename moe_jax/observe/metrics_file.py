"""One strict JSON object per line and step, in the order of the steps, also after a kill.

Inputs: plain numbers and NumPy values of one step, already on the host. Outputs: metrics.jsonl (or evaluations.jsonl).
Floats that are not finite stand as the strings "nan", "inf" and "-inf", since JSON cannot express them; `read_metrics`
turns them back. It computes no metric.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.errors import UserError
from moe_jax.observe.atomic import disk_errors_named
from moe_jax.observe.run_folder import METRICS, RunFolder
from moe_jax.renames import metrics_of_today

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_log = logging.getLogger(__name__)


class MetricsWriter:
    """Append records to a jsonl file of a run folder, each flushed as it is written."""

    def __init__(
        self, folder: str | os.PathLike[str], *, resume_step: int | None = None, file_name: str = METRICS
    ) -> None:
        """Open the file, without lines later than the restored checkpoint.

        Args:
          folder: the run folder.
          resume_step: the last step that the restored checkpoint contains: lines of later steps are removed, so that
            each step stands once. None starts a new run: all lines are removed.
          file_name: METRICS or EVALUATIONS.

        Raises:
          UserError: the file cannot be written, or a line before the last one is not a record.
        """
        self.path = RunFolder(folder).path / file_name
        self.last_step = _cut_after(self.path, resume_step)
        if resume_step and file_name == METRICS and (self.last_step or 0) < resume_step:
            _log.warning(
                "%s ends at step %s but the run resumes after step %d: the steps between have no metrics",
                self.path.name,
                self.last_step,
                resume_step,
            )
        with disk_errors_named(self.path):
            # Unbuffered: a failed write must not be tried again when the file is closed.
            self._file = open(self.path, "ab", buffering=0)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one line and hand it to the operating system before returning.

        Args:
          step: later than every step written before.
          record: name -> float, integer, bool, text, None, NumPy scalar or array, or lists and dicts of these.

        Raises:
          ValueError: the step does not rise, or differs from `record["step"]`.
          TypeError: a value that is none of the above; names the key.
          UserError: the disk is full.
        """
        step = int(step)
        if int(record.get("step", step)) != step:
            raise ValueError(f"record['step'] ({record['step']}) differs from step ({step})")
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step ({step}) must be later than the last one in {self.path.name} ({self.last_step})")
        fields = {"step": step} | {name: _plain(value, name) for name, value in record.items() if name != "step"}
        data = (json.dumps(fields, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8")
        with disk_errors_named(self.path):
            while data:
                data = data[self._file.write(data) :]
        self.last_step = step

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(folder: str | os.PathLike[str], *, file_name: str = METRICS) -> list[dict[str, Any]]:
    """Return the records of a run, in order; also of one that is still being written or was killed.

    Args:
      folder: the run folder.
      file_name: METRICS or EVALUATIONS.

    Returns:
      One dict a line, with "nan", "inf" and "-inf" as floats again; empty when the file does not exist.

    Raises:
      UserError: a line before the last one is not a record; names file and line.
    """
    return [metrics_of_today(_with_floats(record)) for _, record in _complete_lines(Path(folder) / file_name)]


def column(records: Iterable[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps int64 [n], values float64 [n] or [n, layers]) of the records that have `name`.

    Infinite values come back as NaN, which plots leave out. Records whose list is of another length than the last one
    (no run has them, a file edited by hand may) are left out too.
    """
    rows = [
        (record["step"], np.asarray(record[name], np.float64)) for record in records if record.get(name) is not None
    ]
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0)
    shape = rows[-1][1].shape
    rows = [row for row in rows if row[1].shape == shape]
    values = np.stack([value for _, value in rows])
    return np.asarray([step for step, _ in rows], np.int64), np.where(np.isfinite(values), values, np.nan)


def _cut_after(path: Path, last_kept: int | None) -> int | None:
    """Cut the file after the line of step `last_kept` (None: before the first); return the last step that stays.

    Steps rise, so what stays is a prefix, and the file is truncated once: nothing is copied, a kill cannot leave it
    half done, and it works on a full disk too.
    """
    kept_bytes, last_step = 0, None
    if last_kept is not None:
        for line, record in _complete_lines(path):
            if record["step"] > last_kept:
                break
            kept_bytes += len(line)
            last_step = record["step"]
    if path.exists() and path.stat().st_size != kept_bytes:
        with disk_errors_named(path):
            os.truncate(path, kept_bytes)
    return last_step


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (bytes with the newline, record) of each whole line; a last line cut short by a kill is left out."""
    if not path.exists():
        return
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                record = _parsed(line) if line.endswith(b"\n") else None
                if record is not None:
                    yield line, record
                elif next(file, None) is not None:
                    raise UserError(f"{path} line {number} is not a JSON object with an integer step; remove that line")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); give another --workdir") from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _plain(value: Any, name: str) -> Any:
    """Return `value` in JSON's own types; `name` is for the error."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite_or_name(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind == "V":  # bfloat16 and others that NumPy itself lacks
            array = array.astype(np.float64)
        if array.dtype.kind in "biuf":
            return _plain(array.tolist(), name)
    raise TypeError(f"metric {name!r} has type {type(value).__name__}; give numbers, text, or lists and dicts of them")


def _finite_or_name(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _with_floats(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    return value
