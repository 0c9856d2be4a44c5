"""The headline numbers of a run.

Inputs: the records of metrics.jsonl and evaluations.jsonl. Outputs: a `RunSummary`, from which the report's headline
and the last lines of a training run are printed. What no record states is None.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_jax.observe.metrics_file import column, read_metrics
from moe_jax.observe.run_folder import EVALUATIONS

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Losses in nats per token; medians leave out steps that compiled; device load is max over mean, 1 = balanced."""

    steps: int | None
    loss_last: float | None
    held_out_loss_first: float | None
    held_out_loss_last: float | None
    unigram_entropy: float | None
    tokens_per_second: float | None
    model_flops_per_second: float | None
    step_seconds: float | None
    peak_device_bytes: float | None
    device_load_mean: float | None
    device_load_worst: float | None
    dropped_fraction: float | None
    overflow_steps: int | None
    skipped_steps: int | None = None
    steps_run_again: int | None = None
    held_out_loss_ema: float | None = None
    compilations: int
    compile_seconds: float
    rejit_stall_seconds: float | None

    @property
    def below_unigram_entropy(self) -> float | None:
        """How far the last held-out loss lies below the unigram entropy, as a fraction of it."""
        if self.held_out_loss_last is None or not self.unigram_entropy:
            return None
        return 1.0 - self.held_out_loss_last / self.unigram_entropy


def summarize(metrics: Records, evaluations: Records) -> RunSummary:
    """Condense records.

    Args:
      metrics: as `read_metrics` returns them, with the fields that the training loop writes; any may be absent.
        `overflow_steps` and `rejit_stall_seconds` count what happened in that record's step, and are summed;
        `skipped_steps` and `steps_run_again` count from the start of the run.
      evaluations: records with `held_out_loss` and, in at least one, `unigram_entropy`.
    """
    steady = [record for record in metrics if not record.get("compile_seconds")] or metrics
    compilations = column(metrics, "compile_seconds")[1]
    held_out = column(evaluations, "held_out_loss")[1]
    return RunSummary(
        steps=metrics[-1]["step"] if metrics else None,
        loss_last=_reduced(np.ravel(column(metrics, "loss")[1])[-1:], np.mean),
        held_out_loss_first=_reduced(held_out[:1], np.mean),
        held_out_loss_last=_reduced(held_out[-1:], np.mean),
        held_out_loss_ema=_reduced(column(evaluations, "held_out_loss_ema")[1][-1:], np.mean),
        unigram_entropy=_reduced(column(evaluations, "unigram_entropy")[1][-1:], np.mean),
        tokens_per_second=_reduced(column(steady, "tokens_per_second")[1], np.median),
        model_flops_per_second=_reduced(column(steady, "model_flops_per_second")[1], np.median),
        step_seconds=_reduced(column(steady, "step_seconds")[1], np.median),
        peak_device_bytes=_reduced(column(metrics, "peak_device_bytes")[1], np.max),
        device_load_mean=_reduced(column(metrics, "device_load_max_over_mean")[1], np.mean),
        device_load_worst=_reduced(column(metrics, "device_load_max_over_mean")[1], np.max),
        dropped_fraction=_reduced(column(metrics, "dropped_fraction")[1], np.mean),
        overflow_steps=_whole(_reduced(column(metrics, "overflow_steps")[1], np.sum)),
        skipped_steps=_whole(_reduced(column(metrics, "skipped_steps")[1], np.max)),
        steps_run_again=_whole(_reduced(column(metrics, "steps_run_again")[1], np.max)),
        compilations=int(np.count_nonzero(compilations)),
        compile_seconds=float(np.nansum(compilations)),
        rejit_stall_seconds=_reduced(column(metrics, "rejit_stall_seconds")[1], np.sum),
    )


def summarize_run(folder: str | os.PathLike[str]) -> RunSummary:
    """Condense the records of a run folder."""
    return summarize(read_metrics(folder), read_metrics(folder, file_name=EVALUATIONS))


def _reduced(values: np.ndarray, reduce: Any) -> float | None:
    finite = values[np.isfinite(values)]
    return float(reduce(finite)) if finite.size else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
