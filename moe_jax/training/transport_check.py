"""Do not train on a transport that changes gradients: compare it with the padded one before the first step.

Enters: a `Session` and its state. Leaves: nothing, or an error. `ragged_all_to_all` is young: there are reports of
wrong gradients. So a run that opts for it computes the gradients of its first microbatch twice, and goes on only if
they are equal but for rounding. The other transports are proven in the tests and cost nothing here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.errors import UserError
from moe_jax.models import LanguageModel, make_loss
from moe_jax.training.feed import to_devices
from moe_jax.training.session import Session
from moe_jax.training.step import leaf_names

UNPROVEN = ("ragged",)
# of the largest entry of a leaf: rows travel unchanged, only sums may run in another order
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2}


def check_first_step(session: Session, state: dict) -> None:
    """Compare gradients where the run's transport needs it; see `compare_gradients`."""
    if session.config.moe.transport in UNPROVEN:
        compare_gradients(session, state)


def compare_gradients(session: Session, state: dict) -> float:
    """Compare the gradients under the run's transport with those of the padded all-to-all, on the first microbatch.

    Returns:
      the largest difference of any leaf, over the leaf's largest entry.

    Raises:
      UserError: it is above the tolerance of the model's dtype, or not a number.
    """
    transport, dtype = session.config.moe.transport, session.config.model.dtype
    padded = dataclasses.replace(session.model, moe=dataclasses.replace(session.model.moe, transport="all_to_all"))
    batch = to_devices(session.feed.read(0), session.placing.batch)
    arguments = (state["params"], batch, session.tables)
    got, want = (_gradients(session, model)(*arguments) for model in (session.model, padded))
    differences = np.asarray(jax.jit(_relative)(want, got))
    worst = int(np.argmax(np.where(np.isnan(differences), np.inf, differences)))
    if not differences[worst] <= TOLERANCE[dtype]:
        raise UserError(
            f"MoEConfig.transport ({transport!r}) gives other gradients than 'all_to_all' before the first step: "
            f"{leaf_names(state['params'])[worst]} differs by {differences[worst]:.2g} of its largest entry, more than "
            f"{TOLERANCE[dtype]:g} ({dtype}); set MoEConfig.transport = 'all_to_all'"
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
