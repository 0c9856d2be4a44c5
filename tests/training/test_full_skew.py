"""All tokens on one expert for ten steps in a row: none is lost, and memory stays within what the plan predicts.

The gate is tilted between two steps of a run that plans ahead, so the first tilted step meets a plan for other loads.
What XLA allocates for an executable does not depend on what the tokens choose; the ten steps use those that the engine
had compiled or asks for on the way, and each of them is held to the prediction for its own shape.
"""

import jax
import numpy as np
from support.tiny_run import one_step, session_of

from moe_jax.models.counts import device_bytes
from moe_jax.parallel.mesh import to_devices
from moe_jax.training.loop import compiled_peak
from moe_jax.training.rejit import build_engine
from moe_jax.training.replanner import sizes_of

SIZES = (
    "ModelConfig.model_dim = 64", "ModelConfig.hidden_dim = 128", "MoEConfig.num_experts = 8", "MoEConfig.top_k = 1",
    "MoEConfig.aux_loss_weight = 0.0", "train.batch_size = 32", "MeshConfig.expert = 4", "train.zero_stage = 0",
)  # fmt: skip
PLANNER = ("PlannerConfig.name = 'balanced'", "PlannerConfig.replica_slots = 2", "PlannerConfig.swap_after = 3")
HOT = 5


def tilt(state):
    """Give expert HOT of every layer a logit that nobody else reaches: the norm's bias is one, its column large."""
    gate = state["params"]["dense"]["units"]["segment_0"]["gate"]
    for name, value in (("bias", np.ones), ("scale", np.zeros)):
        old = gate["norm"][name]
        gate["norm"][name] = to_devices(value(old.shape, np.float32), old.sharding)
    old = gate["w_gate"]
    weight = np.zeros(old.shape, np.float32)
    weight[:, :, HOT] = 1.0
    gate["w_gate"] = to_devices(weight, old.sharding)
    return state


def test_ten_steps_on_one_expert(tmp_path):
    session = session_of(tmp_path, 4, *SIZES, *PLANNER)
    config = session.config
    engine = build_engine(session)
    engine.start()
    plain = session_of(tmp_path, 4, *SIZES)
    plain_step, _ = plain.compile_step()
    tokens = config.train.batch_size * config.data.sequence_length
    state, used, passes, replicas = session.fresh_state(), {}, [], []
    other = jax.tree.map(lambda leaf: leaf.copy(), state)
    for step in range(11):
        if step == 1:
            state, other = tilt(state), tilt(other)
        batch = to_devices(session.feed.read(step), session.state_shardings.batch)
        programs, tables, host_signals, state = engine.before_step(step, state, 0)
        executable = used[engine.shape["segment_0"]] = programs[1].result()[0]
        replicas.append(len(engine.placement["segment_0"].replicas))
        state, metrics = executable(state, batch, tables, host_signals)
        engine.after_dispatch(step)
        metrics = jax.device_get(metrics)
        engine.observe(step, metrics)
        # the same training without a planner and without replicas
        other, want = one_step(plain, plain_step, other, step)
        np.testing.assert_allclose(metrics["loss"], float(want["loss"]), rtol=1e-5)
        assert not metrics["dropped"].any()
        np.testing.assert_array_equal(metrics["loads"].sum((1, 2)), [tokens] * 2)
        if step >= 1:
            np.testing.assert_array_equal(metrics["loads"].sum(1)[:, HOT], [tokens] * 2)
            passes.append(int(metrics["passes"].max()))
    engine.close()
    assert passes[0] > 1  # nobody had foreseen this
    assert replicas[-1] > 0 and passes[-1] < passes[0]  # the plan followed
    for shape, executable in used.items():
        want = device_bytes(sizes_of(config, session.roles, session.model.vocab_size), {"segment_0": shape})
        peak = compiled_peak(executable)
        assert peak <= want.at_most <= 2 * peak, (shape, peak, want)
