"""Steps and states that are not finite: the first leaf that is not is named, and the run ends.

Inputs: the metrics of a step, on the host; a state, on the devices. Outputs: an error that names the first leaf that is
not finite, and where the run can go on.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.errors import NonFiniteError
from moe_jax.models.language_model import flatten

REMEDY = "Lower train.learning_rate, or raise train.warmup_steps"


def check_finite(
    step: int, metrics: dict, names: list[str], last_checkpoint: int | None, *, skipped: int = 0, allowed: int = 0
):
    """Raise NonFiniteError if the loss or gradient of step `step` (from 1) is not finite, and it may not be skipped.

    Args:
      metrics: of the step, as NumPy.
      names: of the gradient leaves, in the order of metrics['square_norms'].
      last_checkpoint: step of the last finished checkpoint, or None.
      skipped: steps that were not finite so far, this one among them, of at most `allowed`.
    """
    finite = np.isfinite(metrics["square_norms"])
    if allowed and skipped <= allowed:
        return
    if metrics.get("overflowed", False):
        return  # of a scaled loss, whose scale is lowered
    if np.isfinite(metrics["loss"]) and finite.all() and not metrics.get("skipped", False):
        return
    gradient = "every gradient is finite"
    if not finite.all():
        gradient = f"gradient leaf {names[int(np.argmin(finite))]!r} is the first that is not finite"
    beyond = f"; {skipped} such steps are more than train.max_skipped_steps ({allowed})" if allowed else ""
    tolerate = "" if allowed else ", or let train.max_skipped_steps leave out a few such steps"
    raise NonFiniteError(
        f"step {step}: the loss is {float(metrics['loss'])}, and {gradient}{beyond}; "
        f"{last_finite(last_checkpoint)}. {REMEDY}{tolerate}"
    )


def build_local_finite(state: dict, mesh: jax.sharding.Mesh) -> Callable:
    """Return jitted (leaves of a state) -> bool [devices, leaves]: whether a device's part of a leaf is finite."""

    # no collective, so that it may be dispatched behind steps in flight
    def check(leaves):
        return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])[None]

    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(state)]
    rows = jax.sharding.PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(check, mesh=mesh, in_specs=(specs,), out_specs=rows))


def check_state(step: int, state: dict, local_finite: Callable, last_checkpoint: int | None):
    """Raise NonFiniteError where this process' part of a state is not finite; one that raises ends the others too.

    What no step can go on from would push out, as a checkpoint, what one can.

    Args:
      step: of the state; local_finite: of `build_local_finite`; last_checkpoint: its step, or None.
    """
    shards = local_finite(jax.tree.leaves(state)).addressable_shards
    finite = np.all([np.asarray(shard.data)[0] for shard in shards], axis=0)
    if finite.all():
        return
    name, hint = list(flatten(state))[int(np.argmin(finite))], f"{last_finite(last_checkpoint)}. {REMEDY}"
    if last_checkpoint == step:  # from which it was read
        hint = "move the checkpoint of this step away, and the one before it is taken"
    raise NonFiniteError(
        f"step {step}: {name!r} is the first leaf of the state that is not finite, so it is not saved; {hint}"
    )


def last_finite(checkpoint: int | None) -> str:
    """Return in words where a run that ends now can go on; only finite states are saved."""
    if checkpoint is None:
        return "there is no checkpoint yet"
    return f"the checkpoint of step {checkpoint} is the last finite one"
