"""From the arrays of one step to one record of metrics, and the check that the step was finite. Host side.

Inputs: the step's metrics as NumPy arrays, times, and the plan's homes. Outputs: a dictionary for metrics.jsonl.
Where a planner runs, `replan/rejit.py` adds the plan's metrics and counts replicas in `device_load_max_over_mean`.
"""

from __future__ import annotations

import numpy as np

from moe_jax.errors import NonFiniteError
from moe_jax.observe import LoadsOrigin, dead_experts, device_load_max_over_mean
from moe_jax.replan.replanner import initial_placement
from moe_jax.training.program import Program


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


def step_record(
    metrics: dict,
    *,
    seconds: float,
    tokens: int,
    choices: int,
    flops: float,
    peak_device_bytes: int | None,
    compile_seconds: float | None,
    home: np.ndarray,
    devices: int,
) -> dict:
    """Return one object of metrics.jsonl.

    Args:
      metrics: of the step, as NumPy; see `make_train_step`.
      seconds: wall-clock seconds since the step before.
      tokens: tokens of the step; choices: tokens times top_k times MoE layers.
      flops: model FLOPs of the step, forward and backward.
      peak_device_bytes: most bytes in use on one device so far, or None where unknown.
      compile_seconds: where a compilation preceded the step.
      home: int [L, E], the device that computes each expert.
      devices: of one expert-parallel group.
    """
    record = {
        "loss": float(metrics["loss"]),
        "aux_loss": float(metrics["aux_loss"]),
        "z_loss": float(metrics["z_loss"]),
        "learning_rate": float(metrics["learning_rate"]),
        "grad_norm": float(metrics["grad_norm"]),
        "tokens_per_second": tokens / seconds,
        "model_flops_per_second": flops / seconds,
        "step_seconds": seconds,
        "peak_device_bytes": peak_device_bytes,
        "dropped_fraction": float(metrics["dropped"].sum() / choices),
        "overflow_steps": int(metrics["passes"].max() > 1),
        "passes": metrics["passes"],
        "device_load_max_over_mean": device_load_max_over_mean(metrics["loads"], home, devices),
        "dead_experts": dead_experts(metrics["loads"]),
        "gate_entropy": metrics["gate_entropy"],
    }
    if "kl" in metrics:
        record["kl"] = float(metrics["kl"])
    if "completed" in metrics:
        record["completed"] = metrics["completed"]
    if compile_seconds is not None:
        record["compile_seconds"] = compile_seconds
    return record


def loads_origin(program: Program) -> LoadsOrigin:
    """Return the sizes and the mesh that are stored with the recorded loads of a run, for a replay."""
    config = program.config
    return LoadsOrigin(
        model_dim=config.model.model_dim,
        hidden_dim=config.model.hidden_dim,
        top_k=config.moe.top_k,
        dtype=config.model.dtype,
        mesh=tuple(program.roles.mesh.shape.items()),
        devices_per_node=initial_placement(config, program.roles).devices_per_node,
        cluster=config.planner.cluster or config.moe.cluster,
        activation=config.model.activation,
        moe_every=config.model.moe_every,
        dense_hidden_dim=config.model.ffn_dim,
        sequence_length=config.data.sequence_length,
    )
