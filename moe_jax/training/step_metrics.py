"""From the arrays of one step to one record of metrics, and the check that the step was finite. Host side.

Inputs: the step's metrics as NumPy arrays, times, and the plan's homes. Outputs: a dictionary for metrics.jsonl.
Where a planner runs, `training/rejit.py` adds the plan's metrics and counts replicas in `device_load_max_over_mean`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moe_jax.errors import NonFiniteError
from moe_jax.observe import device_load_max_over_mean


def check_finite(
    step: int, metrics: dict, names: list[str], last_checkpoint: int | None, *, skipped: int = 0, allowed: int = 0
):
    """Raise NonFiniteError if the loss or the gradient of a step is not finite, and the step may not be skipped.

    Args:
      step: number of the step, from 1.
      metrics: of the step, as NumPy.
      names: of the gradient leaves, in the order of metrics['square_norms'].
      last_checkpoint: step of the last finished checkpoint, or None.
      skipped: steps that were not finite so far, this one among them.
      allowed: `train.max_skipped_steps`.
    """
    finite = np.isfinite(metrics["square_norms"])
    if allowed and skipped <= allowed:
        return
    if np.isfinite(metrics["loss"]) and finite.all() and not metrics.get("skipped", False):
        return
    gradient = "every gradient is finite"
    if not finite.all():
        gradient = f"gradient leaf {names[int(np.argmin(finite))]!r} is the first that is not finite"
    kept = (
        "there is no checkpoint yet" if last_checkpoint is None else f"the checkpoint of step {last_checkpoint} is kept"
    )
    beyond = f"; {skipped} such steps are more than train.max_skipped_steps ({allowed})" if allowed else ""
    tolerate = "" if allowed else ", or let train.max_skipped_steps leave out a few such steps"
    raise NonFiniteError(
        f"step {step}: the loss is {float(metrics['loss'])}, and {gradient}{beyond}; {kept}. Lower "
        f"train.learning_rate, or raise train.warmup_steps{tolerate}"
    )


def step_record(metrics: dict, choices: int, homes: Iterable[tuple[np.ndarray, int]]) -> dict:
    """Return one object of metrics.jsonl, without times and memory, which the loop adds.

    Args:
      metrics: of the step, as NumPy; see `make_train_step`.
      choices: of experts, by all tokens of the step in all MoE layers.
      homes: of each segment with experts, first layers first: int [L, E], the device that computes each expert, and
        D, devices of its expert-parallel group.
    """
    balance, dead, first = [], [], 0
    for home, devices in homes:
        own = metrics["loads"][first : first + len(home), :devices, : home.shape[1]]  # the rest is of larger segments
        balance.append(device_load_max_over_mean(own, home, devices))
        dead.append(np.count_nonzero(own.sum(axis=1, dtype=np.int64) == 0, axis=1))  # got no token
        first += len(home)
    record = {
        "loss": float(metrics["loss"]),
        "aux_loss": float(metrics["aux_loss"]),
        "z_loss": float(metrics["z_loss"]),
        "learning_rate": float(metrics["learning_rate"]),
        "grad_norm": float(metrics["grad_norm"]),
        "dropped_fraction": float(metrics["dropped"].sum() / choices),
        "overflow_steps": int(metrics["passes"].max() > 1),
        "passes": metrics["passes"],
        "device_load_max_over_mean": np.concatenate(balance),
        "dead_experts": np.concatenate(dead),
        "gate_entropy": metrics["gate_entropy"],
    }
    if "kl" in metrics:
        record["kl"] = float(metrics["kl"])
    if "completed" in metrics:
        record["completed"] = metrics["completed"]
    return record
