"""The same run gives the same loss curve at every device count, and however a step is cut into microbatches."""

import dataclasses

import jax
import numpy as np
import pytest
from support.placements import to_bank
from support.tiny_run import one_step, session_of

from moe_jax.parallel.mesh import to_devices
from moe_jax.planning.placement import Placement
from moe_jax.training.program import build_session

STEPS, MP = 30, ("MoEConfig.schedule = 'parm'", "MeshConfig.model = 2")


def curve(folder, devices: int, *changes: str):
    """Return (losses, gradient norms, loads of the last step summed over sources) of STEPS steps."""
    session = session_of(folder, devices, f"train.steps = {STEPS}", *changes)
    config, (executable, _) = session.config, session.compile_step()
    # start all runs from the one-device initial values: compiled for another mesh, the last bit may differ
    plain = dataclasses.replace(config.moe, schedule="s1")
    one = build_session(dataclasses.replace(config, mesh=type(config.mesh)(), moe=plain), jax.devices()[:1])
    params = jax.device_get(one.fresh_state()["params"])
    layers, group = config.model.moe_layers, session.roles.size(session.roles.expert)

    even = Placement.even(layers, config.moe.num_experts, group)  # one device holds (layer, expert) order
    experts = jax.tree.map(lambda leaf: leaf.reshape(layers, -1, *leaf.shape[1:]), params["bank"])
    params = {"dense": params["dense"], "bank": to_bank(experts, even)}
    state = session.fresh_state(to_devices(params, session.state_shardings.state["params"]))
    losses, norms = [], []
    for step in range(STEPS):
        state, metrics = one_step(session, executable, state, step)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return np.array(losses), np.array(norms), np.asarray(metrics["loads"]).sum(axis=1)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curves")
    losses, norms, loads = curve(folder, 1)
    assert losses[-1] < losses[0] - 0.5, "it must learn, or equal curves say little"
    return folder, losses, norms, loads


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (2, ()),
        (4, ("MeshConfig.data = 2", "train.zero_stage = 3")),
        pytest.param(8, ("train.zero_stage = 0",), marks=pytest.mark.slow),
        (8, ("MoEConfig.schedule = 'dp'", "MeshConfig.data = 8", "train.expert_zero_stage = 3")),
        pytest.param(8, (*MP, "MeshConfig.expert_shard = 2"), marks=pytest.mark.slow),
        pytest.param(8, ("MoEConfig.schedule = 'pairwise'", "MeshConfig.devices_per_node = 4"), marks=pytest.mark.slow),
        (2, ("train.grad_accum_steps = 2", "MoEConfig.aux_loss_weight = 0.0", "MoEConfig.z_loss_weight = 0.0")),
    ],
    ids=["ep2", "ep2_data2_zero3", "ep8_zero0", "dp8_stage3", "parm_mp2_esp2", "pairwise_ep8", "grad_accum_steps"],
)
def test_curve_is_the_same_at_every_device_count(expected, devices, changes):
    folder, losses, norms, loads = expected
    if "train.grad_accum_steps = 2" in changes:  # the balance loss is one of each microbatch, so it is left out here
        losses, norms, loads = curve(folder, 1, *changes[1:])
    got_losses, got_norms, got_loads = curve(folder, devices, *changes)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-4)
    np.testing.assert_allclose(got_norms, norms, rtol=1e-2)  # a last bit of difference grows over 30 steps
    assert got_loads.sum() == loads.sum()
