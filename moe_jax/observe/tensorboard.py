"""TensorBoard events of a run, when tensorboardX is installed.

Inputs: the records that metrics.jsonl takes. Outputs: scalars under tensorboard/; a list over layers becomes its mean,
smallest and largest. metrics.jsonl is authoritative: events written shortly before a kill may be lost, and TensorBoard
puts the host's name into the names of its files, so they are not for publication.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_jax.observe.atomic import disk_errors_named
from moe_jax.observe.run_folder import RunFolder

_log = logging.getLogger(__name__)


class TensorBoardWriter:
    """Write scalars; without tensorboardX log it once and count what was not written."""

    def __init__(self, folder: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        """Open a new event file.

        Args:
          folder: the run folder.
          resume_step: the last step that the restored checkpoint contains; TensorBoard hides what earlier files say of
            later steps. None starts a new run.
        """
        self.records_missed = 0
        self._writer = None
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            _log.warning("no TensorBoard events: tensorboardX cannot be imported (%s); pip install tensorboardX", error)
            return
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # a line per NaN; a skipped step has several
        path = RunFolder(folder).tensorboard
        purge_step = 0 if resume_step is None else resume_step + 1
        with disk_errors_named(path):
            self._writer = SummaryWriter(os.fspath(path), purge_step=purge_step, flush_secs=10)

    @property
    def available(self) -> bool:
        return self._writer is not None

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Write the numbers of a step; text and nested records are left to metrics.jsonl."""
        if self._writer is None:
            self.records_missed += 1
            return
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Flatten a record to tag -> number: a list gives `tag/mean`, `tag/min` and `tag/max`; the step is no tag."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if name == "step" or value is None or isinstance(value, str | Mapping):
            continue
        values = np.asarray(value, np.float64)
        if values.ndim == 0:
            found[name] = float(values)
        elif values.size:
            found |= {
                f"{name}/{key}": float(f(values)) for key, f in (("mean", np.mean), ("min", np.min), ("max", np.max))
            }
    return {tag: value if math.isfinite(value) else math.nan for tag, value in found.items()}
