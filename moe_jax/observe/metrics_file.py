"""Records of steps: one strict JSON object a line, in the order of the steps, also after a kill; and for TensorBoard.

Plain numbers and NumPy values of one step, already on the host, become lines of metrics.jsonl or evaluations.jsonl.
Floats that are not finite stand as the strings "nan", "inf" and "-inf"; `read_metrics` turns them back. TensorBoard
gets event files in the run folder, where the package tensorboardX is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.errors import UserError
from moe_jax.storage.run_folder import METRICS, RunFolder, disk_errors_named, readable

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# the first word of a tag; what no group names belongs to plans
GROUPS = {
    "loss": "loss aux_loss z_loss kl held_out_loss held_out_loss_ema bits_per_byte unigram_entropy perplexity",
    "balance": "device_load_max_over_mean dead_experts gate_entropy dropped_fraction passes overflow_steps loads",
    "optimizer": "learning_rate grad_norm skipped skipped_steps",
    "speed": "tokens_per_second model_flops_per_second step_seconds compile_seconds peak_device_bytes run_again "
    "steps_run_again",
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}
_told: set[Path] = set()  # files of which damaged lines were logged
_log = logging.getLogger(__name__)


class MetricsWriter:
    """Append records to a jsonl file of a run folder, opened for each: one that was deleted begins anew."""

    def __init__(
        self, folder: str | os.PathLike[str], *, resume_step: int | None = None, file_name: str = METRICS
    ) -> None:
        """Open the file METRICS or EVALUATIONS, without lines later than the restored checkpoint.

        Args:
          resume_step: the last step that the restored checkpoint contains: lines of later steps are removed, so that
            each step stands once. None starts a new run: all lines are removed.
        """
        self.path, self.last_step = RunFolder(folder).path / file_name, None
        # Steps rise, so what stays is a prefix, and the file is truncated once: nothing is copied, a kill cannot leave
        # it half done, and it works on a full disk too.
        kept_bytes = 0
        if resume_step is not None:
            kept_bytes, self.last_step = _end_of(self.path, resume_step)
        if resume_step and file_name == METRICS and (self.last_step or 0) < resume_step:
            _log.warning(
                f"{self.path.name} ends at step {self.last_step} but the run resumes after step {resume_step}: the "
                "steps between have no metrics"
            )
        with disk_errors_named(self.path):
            if readable(self.path).exists() and self.path.stat().st_size != kept_bytes:
                os.truncate(self.path, kept_bytes)
            open(self.path, "ab").close()  # says now whether it can be written

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one line and hand it to the operating system before returning.

        Args:
          step: later than every step written before.
          record: name -> float, integer, bool, text, None, NumPy scalar or array, or lists and dicts of these.
        """
        step = int(step)
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step ({step}) must be later than the last one in {self.path.name} ({self.last_step})")
        fields = {"step": step} | {name: _plain(value, name) for name, value in record.items() if name != "step"}
        data = (json.dumps(fields, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8")
        # Unbuffered: a failed write must not be tried again when the file is closed.
        with disk_errors_named(self.path), open(self.path, "ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]
        self.last_step = step


def read_metrics(
    folder: str | os.PathLike[str], *, file_name: str = METRICS, most: int | None = None
) -> list[dict[str, Any]]:
    """Return the records of a run, in order; also of one that is still being written or was killed.

    One dict a line of the file METRICS or EVALUATIONS, with "nan", "inf" and "-inf" as floats again. Lines that are no
    records are left out, which is logged.

    Args:
      most: of a longer file about so many records are read, at even distances, besides the last one and those of steps
        that compiled; `overflow_steps` of each then counts the steps since the record before it.
    """
    path, records = Path(folder) / file_name, []
    with contextlib.suppress(FileNotFoundError), reading(path), open(path, "rb") as file:
        apart, damaged, overflowed, line = 1, [], 0, b""
        if most is not None:
            apart = max(1, path.stat().st_size // (most * max(1, len(file.readline()))))
            file.seek(0)
        for number, line in enumerate(file, start=1):
            overflowed += b'"overflow_steps": 1' in line
            if number % apart == 0 or b'"compile_seconds"' in line:
                if (record := parse_line(line)) is not None:
                    records.append(_with_floats(record) | ({"overflow_steps": overflowed} if apart > 1 else {}))
                    overflowed, line = 0, b""
                elif line.endswith(b"\n"):  # a last line cut short by a kill is nothing to tell of
                    damaged.append(number)
        if (record := parse_line(line)) is not None:
            records.append(_with_floats(record) | {"overflow_steps": overflowed})
        if damaged and path not in _told:
            _told.add(path)
            _log.warning("%s: %d lines are damaged and left out, the first is line %d", path, len(damaged), damaged[0])
    return records


def column(records: Iterable[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps int64 [n], values float64 [n] or [n, layers]) of the records that have `name`.

    Infinite values come back as NaN, which plots leave out. Records whose list is of another length than the last one,
    or no number (no run has them, a file edited by hand may) are left out too.
    """
    rows = []
    for record in records:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if record.get(name) is not None:
                rows.append((record["step"], np.asarray(record[name], np.float64)))
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0)
    shape = rows[-1][1].shape
    rows = [row for row in rows if row[1].shape == shape]
    values = np.stack([value for _, value in rows])
    return np.asarray([step for step, _ in rows], np.int64), np.where(np.isfinite(values), values, np.nan)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line with its newline, None where it is none."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**53 else None


def _end_of(path: Path, step: int) -> tuple[int, int | None]:
    """Return where the last record up to `step` ends in the file, and its step; only the file's end is read."""
    with contextlib.suppress(FileNotFoundError), reading(path), open(path, "rb") as file:
        if path.stat().st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                end = len(text)
                while end:
                    start = text.rfind(b"\n", 0, end - 1) + 1
                    record = parse_line(text[start:end])
                    if record is not None and record["step"] <= step:
                        return end, record["step"]
                    end = start
    return 0, None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` raised while `path` is read into one line; a file that is not there stays that error."""
    try:
        readable(path)
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); give another --workdir") from error


def _plain(value: Any, name: str) -> Any:
    """Return `value` in JSON's own types; `name` is for the error."""
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, float):
        # also of NumPy's own floats; the names are those of _NON_FINITE
        return float(value) if math.isfinite(value) else str(float(value))
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


def _with_floats(value: Any, depth: int = 9) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list) and depth:  # what nests deeper is of no run
        return [_with_floats(item, depth - 1) for item in value]
    if isinstance(value, dict) and depth:
        return {key: _with_floats(item, depth - 1) for key, item in value.items()}
    return value


class TensorBoard:
    """Event files of a run, where tensorboardX is installed; one that cannot be imported is logged once."""

    def __init__(self, folder: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        """Open new files; what earlier ones say of steps after `resume_step` (None: all) is hidden."""
        self._events, run = None, RunFolder(folder)
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            if importlib.util.find_spec("tensorboardX"):  # an extra: whoever lacks it did not ask for events
                _log.warning("no TensorBoard events: tensorboardX cannot be imported (%s); install it again", error)
            return
        # a line per NaN; a skipped step has several
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        purge_step = 0 if resume_step is None else resume_step + 1
        with disk_errors_named(run.tensorboard):
            self._events = SummaryWriter(os.fspath(run.tensorboard), purge_step=purge_step, flush_secs=10)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Write the numbers of a step, of a list its mean, min and max; the rest is left to metrics.jsonl."""
        if self._events is None:
            return
        for name, value in record.items():
            if name == "step" or value is None or isinstance(value, str | Mapping):
                continue
            values, tag = np.asarray(value, np.float64), f"{_GROUP_OF.get(name, 'plan')}/{name}"
            scalars = {tag: values}
            if values.ndim:
                reduced = (("mean", np.mean), ("min", np.min), ("max", np.max)) if values.size else ()
                scalars = {f"{tag}/{key}": reduce(values) for key, reduce in reduced}
            for key, number in scalars.items():
                self._events.add_scalar(key, float(number) if np.isfinite(number) else math.nan, step)

    def close(self) -> None:
        """Write what is left of the files."""
        if self._events is not None:
            self._events.close()
