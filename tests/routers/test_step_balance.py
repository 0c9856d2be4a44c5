"""The balance loss over the microbatches of a step: probabilities of each meet the loads of all up to it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from support.tiny_run import bindings_of

from moe_jax.config import parse_run_config
from moe_jax.mesh.global_arrays import to_devices
from moe_jax.models import make_loss
from moe_jax.routers import counts_so_far
from moe_jax.training.session import build_session

EXPERTS, MICROBATCHES = 8, 2
CHANGES = (
    "ModelConfig.layers = 1", "MoEConfig.balance_over = 'step'", f"train.grad_accum_steps = {MICROBATCHES}",
    "MeshConfig.data = 2",
)  # fmt: skip


def test_counts_so_far():
    """Loads 3 and 1 after 0 and 4: of 8 choices 3 and 5, as 4 choices 1.5 and 2.5; without earlier ones as they are."""
    counts, before = jnp.array([[3, 1]]), jnp.array([[0, 4]])
    np.testing.assert_allclose(counts_so_far(counts, before), [[1.5, 2.5]])
    np.testing.assert_array_equal(counts_so_far(counts, jnp.zeros_like(before)), counts)


def test_a_step_balances_over_its_microbatches(tmp_path):
    config, _, _ = parse_run_config((), bindings_of(tmp_path, *CHANGES))
    session = build_session(config, jax.devices()[:2])
    rows, length = config.train.batch_size // MICROBATCHES, config.data.sequence_length
    evaluate = jax.jit(make_loss(session.model, session.layout, rows, length, microbatches=MICROBATCHES))
    batch = to_devices(session.feed.read(0), session.state_shardings.batch)
    state = session.fresh_state()
    key = jax.random.fold_in(jax.random.key(config.train.seed + 1), 0)

    def losses(index, counted):
        """Return (balance loss, choices int [1, E]) of a microbatch after earlier choices int [E]."""
        microbatch = jax.tree.map(lambda leaf: leaf[index], batch)
        microbatch = dataclasses.replace(microbatch, counted=np.asarray(counted, np.int32)[None])
        _, stats = evaluate(
            state["params"], microbatch, session.tables, key, np.int32(index * rows), np.float32(rows * length)
        )
        return float(stats.aux_loss), np.asarray(stats.loads).sum(axis=1)[0]

    first, counts = losses(0, np.zeros(EXPERTS))
    second, other = losses(1, counts)
    # a load of one expert alone, and a huge one, shows E times the mean probability of that expert
    shown = [losses(1, np.where(np.arange(EXPERTS) == e, 2**30, 0))[0] for e in range(EXPERTS)]
    total = counts + other
    np.testing.assert_allclose(second, np.sum(total * np.array(shown)) / np.sum(total), rtol=1e-5)
    alone, _ = losses(1, np.zeros(EXPERTS))
    assert abs(alone - second) > 1e-4, "the microbatches differ"

    step, _ = session.compile_train_step()
    _, metrics = step(state, batch, session.tables, session.host_signals(0))
    np.testing.assert_allclose(metrics["aux_loss"], (first + second) / 2, rtol=1e-5)
    np.testing.assert_array_equal(np.sum(metrics["loads"], axis=1)[0], counts + other)
