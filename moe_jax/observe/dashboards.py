"""What TensorBoard and Weights & Biases show of a run while it trains: the same tags and pictures in both.

Inputs: the record of a step, loads [L, D, E]. Outputs: event files in the run folder, and where WANDB_PROJECT is set in
the environment a run of `wandb` (WANDB_MODE=offline keeps it in the run folder). Either package may be absent.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_jax.storage.run_folder import RunFolder, disk_errors_named

PROJECT = "WANDB_PROJECT"
# the first word of a tag; what no group names belongs to plans
GROUPS = {
    "loss": "loss aux_loss z_loss kl held_out_loss held_out_loss_ema bits_per_byte unigram_entropy perplexity",
    "balance": "device_load_max_over_mean dead_experts gate_entropy dropped_fraction passes overflow_steps loads",
    "optimizer": "learning_rate grad_norm loss_scale overflowed_updates skipped skipped_steps",
    "speed": "tokens_per_second model_flops_per_second step_seconds compile_seconds peak_device_bytes run_again "
    "steps_run_again",
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}
_PIXELS = 8  # a side of one cell of a picture
_log = logging.getLogger(__name__)


class Dashboards:
    """Write to each of them that is there; one that was asked for and cannot be imported is logged once."""

    def __init__(self, folder: str | os.PathLike[str], *, resume_step: int | None = None, config: str = "") -> None:
        """Open them; what earlier ones say of steps after `resume_step` (None: all) is hidden or written over.

        config: the run's, as text.
        """
        self._events = self._online = None
        run = RunFolder(folder)
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            if importlib.util.find_spec("tensorboardX"):  # an extra: whoever lacks it did not ask for events
                _log.warning("no TensorBoard events: tensorboardX cannot be imported (%s); install it again", error)
        else:
            # a line per NaN; a skipped step has several
            logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
            purge_step = 0 if resume_step is None else resume_step + 1
            with disk_errors_named(run.tensorboard):
                self._events = SummaryWriter(os.fspath(run.tensorboard), purge_step=purge_step, flush_secs=10)
        if not os.environ.get(PROJECT):
            return
        try:
            import wandb
        except ImportError as error:
            _log.warning("nothing for %s: wandb cannot be imported (%s); pip install wandb", PROJECT, error)
            return
        self._wandb, where = wandb, os.fspath(run.path.resolve())
        identity = hashlib.sha256(where.encode()).hexdigest()[:16]
        bound = dict(line.split(" = ", 1) for line in config.splitlines() if " = " in line)
        self._online = wandb.init(dir=where, name=run.path.name, id=identity, resume="allow", config=bound)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Write the numbers of a step, of a list its mean, min and max; the rest is left to metrics.jsonl."""
        scalars = {}
        for name, value in record.items():
            if name == "step" or value is None or isinstance(value, str | Mapping):
                continue
            values, tag = np.asarray(value, np.float64), f"{_GROUP_OF.get(name, 'plan')}/{name}"
            if values.ndim == 0:
                scalars[tag] = float(values)
            elif values.size:
                for key, reduce in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                    scalars[f"{tag}/{key}"] = float(reduce(values))
        if self._events is not None:
            for tag, number in scalars.items():
                self._events.add_scalar(tag, number if math.isfinite(number) else math.nan, step)
        if self._online is not None:
            self._online.log(scalars, step=step)

    def write_loads(self, step: int, segment: str, loads: np.ndarray) -> None:
        """Write a picture of a segment's loads [L, D, E]: layers down, experts to the right; see `load_picture`."""
        if self._events is None and self._online is None:
            return
        tag, picture = f"balance/expert_load/{segment}", load_picture(loads.sum(axis=1))
        if self._events is not None and importlib.util.find_spec("PIL"):  # which draws for it
            self._events.add_image(tag, picture, step, dataformats="HWC")
        if self._online is not None:
            self._online.log({tag: self._wandb.Image(picture)}, step=step)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._online is not None:
            self._online.finish()


def load_picture(loads: np.ndarray) -> np.ndarray:
    """Return uint8 [8 L, 8 E, 3] of loads [L, E] over their layer's mean: white at the mean, red four times as much and
    more, blue a quarter and less, black for none."""
    mean = loads.mean(axis=1, keepdims=True)
    ratio = np.divide(loads, mean, out=np.ones(loads.shape), where=mean > 0)
    level = np.clip(np.log2(np.maximum(ratio, 1e-9)) / 2, -1.0, 1.0)  # -1 blue, 0 white, 1 red
    colours = np.stack([1 + np.minimum(level, 0), 1 - np.abs(level), 1 - np.maximum(level, 0)], axis=-1)
    colours[ratio == 0] = 0
    return np.rint(255 * colours).astype(np.uint8).repeat(_PIXELS, axis=0).repeat(_PIXELS, axis=1)
