"""Do not train on an exchange or a kernel that changes gradients: compare it with a proven one before the first step.

Enters: a `Session` and its state. Leaves: nothing, or an error. Two things that a run may use are not proven by the
tests of this project: `ragged_all_to_all`, young, with reports of wrong gradients, and the `hopper` grouped matmul,
never run here on the GPUs that it is for. So a run that uses one computes the gradients of its first microbatch twice,
and goes on only if they are equal but for rounding. Everything else costs nothing here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.errors import UserError
from moe_jax.models import LanguageModel, make_loss
from moe_jax.moe.grouped_matmul import choose_implementation
from moe_jax.training.feed import to_devices
from moe_jax.training.session import Session
from moe_jax.training.step import leaf_names

PROVEN = {"transport": ("ragged", "all_to_all"), "grouped_matmul": ("hopper", "fused")}  # field: (unproven, instead)
# of the largest entry of a leaf: only sums may run in another order
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2}


def check_first_step(session: Session, state: dict) -> None:
    """Compare gradients where the run uses something unproven; see `compare_gradients`."""
    used = fields_in_use(session)
    for field, (unproven, instead) in PROVEN.items():
        if used[field] == unproven:
            compare_gradients(session, state, field, instead)


def fields_in_use(session: Session) -> dict[str, str]:
    """Return the transport and the grouped matmul that the session's layers use, 'auto' resolved."""
    config, roles = session.config, session.roles
    dims = config.model.model_dim, config.model.hidden_dim // roles.size(roles.expert_shard)
    device, dtype = roles.mesh.devices.flat[0], jnp.dtype(config.model.dtype)
    matmul = choose_implementation(config.moe.grouped_matmul, device, dtype, dims)
    return {"transport": config.moe.transport, "grouped_matmul": matmul}


def compare_gradients(session: Session, state: dict, field: str, instead: str) -> float:
    """Compare the run's gradients of the first microbatch with those of the same model with one field changed.

    Args:
      field: of `MoEConfig`; instead: the proven choice.

    Returns:
      the largest difference of any leaf, over the leaf's largest entry.

    Raises:
      UserError: it is above the tolerance of the model's dtype, or not a number; or the run's own choice fails.
    """
    used, dtype = fields_in_use(session)[field], session.config.model.dtype
    proven = dataclasses.replace(session.model, moe=dataclasses.replace(session.model.moe, **{field: instead}))
    batch = to_devices(session.feed.read(0), session.placing.batch)
    arguments = (state["params"], batch, session.tables)
    try:
        got = jax.block_until_ready(_gradients(session, session.model)(*arguments))
    except UserError:
        raise
    except Exception as error:  # whatever lowering, compiling or running it may raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]  # some say nothing
        raise UserError(
            f"MoEConfig.{field} ({used!r}) fails before the first step: {reason}; set MoEConfig.{field} = {instead!r}"
        ) from error
    want = _gradients(session, proven)(*arguments)
    differences = np.asarray(jax.jit(_relative)(want, got))
    worst = int(np.argmax(np.where(np.isnan(differences), np.inf, differences)))
    if not differences[worst] <= TOLERANCE[dtype]:
        raise UserError(
            f"MoEConfig.{field} ({used!r}) gives other gradients than {instead!r} before the first step: "
            f"{leaf_names(state['params'])[worst]} differs by {differences[worst]:.2g} of its largest entry, more than "
            f"{TOLERANCE[dtype]:g} ({dtype}); set MoEConfig.{field} = {instead!r}"
        )
    return float(differences[worst])


def _gradients(session: Session, model: LanguageModel):
    train = session.config.train
    rows, length = train.batch_size // train.accumulate, session.config.data.sequence_length
    loss = make_loss(model, session.layout, rows, length, microbatches=train.accumulate)

    def gradients(params, batch, tables):
        first = jax.tree.map(lambda array: array[0], batch)
        normalizer = jnp.maximum(jnp.sum(first.weights), 1)
        return jax.grad(loss, has_aux=True)(params, first, tables, jax.random.key(0), jnp.int32(0), normalizer)[0]

    return jax.jit(gradients, out_shardings=session.placing.state["params"])


def _relative(want, got):
    """Return [leaves], max |want - got| / max |want| of each leaf."""
    tiny = 1e-30
    pairs = zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
    return jnp.stack([jnp.max(jnp.abs(a - b)) / (jnp.max(jnp.abs(a)) + tiny) for a, b in pairs])
