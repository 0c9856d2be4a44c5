"""The balance loss over the microbatches of a step: probabilities of each meet the loads of all up to it.

The model has two segments of different numbers of experts, of which one has a router with a state.
"""

import dataclasses

import jax
import numpy as np
import pytest
from support.tiny_run import bindings_of

from moe_jax.config.gin_files import parse_run_config
from moe_jax.models import make_loss
from moe_jax.moe.routers import build_router
from moe_jax.parallel.mesh import to_devices
from moe_jax.training.program import build_session

EXPERTS, MICROBATCHES = (8, 4), 2  # E of each layer
CHANGES = (
    "ModelConfig.segments = ('layers=1 num_experts=8', 'layers=1 num_experts=4 router=sigmoid_bias')",
    "MoEConfig.balance_over = 'step'", f"train.grad_accum_steps = {MICROBATCHES}", "MeshConfig.data = 2",
)  # fmt: skip


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("double")
def test_a_step_balances_over_its_microbatches(tmp_path):
    config, _ = parse_run_config((), bindings_of(tmp_path, *CHANGES, "ModelConfig.dtype = 'float64'"))
    session = build_session(config, jax.devices()[:2])
    rows, length = config.train.batch_size // MICROBATCHES, config.data.sequence_length
    evaluate = jax.jit(make_loss(session.model, session.model.layout(), rows, length, microbatches=MICROBATCHES))
    batch = to_devices(session.feed.read(0), session.state_shardings.batch)
    state = session.fresh_state()
    key = jax.random.fold_in(jax.random.key(config.train.seed + 1), 0)

    def look(index, counted):
        """Return (balance loss, choices int [L, E]) of a microbatch after earlier choices int [L, E]."""
        microbatch = jax.tree.map(lambda leaf: leaf[index], batch)
        microbatch = dataclasses.replace(microbatch, counted=np.asarray(counted, np.int32))
        _, stats = evaluate(
            state["params"], microbatch, session.tables, key, np.int32(index * rows), np.float32(rows * length)
        )
        return float(stats.aux_loss), np.asarray(stats.loads).sum(axis=1)

    none = np.zeros((2, max(EXPERTS)), int)
    first, counts = look(0, none)
    second, other = look(1, counts)
    assert abs(look(1, none)[0] - second) > 1e-4, "the microbatches differ"
    total = counts + other
    assert not counts[1, EXPERTS[1] :].any()
    want = 0.0
    for layer, experts in enumerate(EXPERTS):
        # a load of one expert alone, and a huge one, shows E times the mean probability of that expert, and the loss of
        # the other layer, which knows of no earlier choices; the mean over the two layers halves both
        shown = []
        for expert in range(experts):
            one = none.copy()
            one[layer, expert] = 2**30
            shown.append(2 * look(1, one)[0])
        other = (np.sum(shown) - experts) / experts  # the other layer's, for the probabilities have a sum of 1
        own = total[layer, :experts]
        want += np.sum(own * (np.array(shown) - other)) / np.sum(own) / 2
    np.testing.assert_allclose(second, want, rtol=1e-5)

    step, _ = session.compile_step()
    new_state, metrics = step(state, batch, session.tables, session.host_signals(0))
    np.testing.assert_allclose(metrics["aux_loss"], (first + second) / 2, rtol=1e-5)
    np.testing.assert_array_equal(np.sum(metrics["loads"], axis=1), total)

    # the state of the one layer that has one moves by the choices of its own experts in all microbatches
    segment = session.model.segments[1]
    router, still = build_router(segment.moe), {"choice_bias": np.zeros((1, 4), np.float32)}
    moved = router.next_state(still, total[1:, :4])["choice_bias"]
    gates = new_state["params"]["dense"]["units"]
    np.testing.assert_allclose(gates[segment.name]["gate"]["choice_bias"], moved, atol=1e-6)
    assert np.any(moved) and "choice_bias" not in gates["segment_0"]["gate"]
