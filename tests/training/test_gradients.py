"""The devices' gradients are those of one device; of several microbatches they are summed once a step."""

import math
import re

import jax
import numpy as np
import pytest
from support.tiny_run import session_of

from moe_jax.parallel.mesh import to_devices
from moe_jax.training.step import make_gradients

SIZES = (
    "ModelConfig.layers = 1",  # so that the bank of any mesh is in the order of one device's
    "train.batch_size = 16",
    "MoEConfig.schedule = 's1'",
    "MoEConfig.aux_loss_weight = 0.0",  # the balance losses are of each microbatch, and these differ
    "MoEConfig.z_loss_weight = 0.0",
)


def gradients_of(session, params):
    """Return the gradient of step 0, as NumPy."""
    train, length = session.config.train, session.config.data.sequence_length
    gradients = jax.jit(make_gradients(session.model, train, length))
    params = to_devices(params, session.state_shardings.state["params"])
    batch = to_devices(session.feed.read(0), session.state_shardings.batch)
    return jax.device_get(gradients(params, batch, session.tables, jax.random.key(0))[0])


@pytest.mark.parametrize(("zero", "microbatches"), [(1, 4), (1, 1), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_device(zero, microbatches, tmp_path):
    with jax.enable_x64(True):
        sizes = (*SIZES, "ModelConfig.dtype = 'float64'")
        one = session_of(tmp_path, 1, *sizes)
        params = jax.device_get(one.fresh_state()["params"])
        mesh = ("MeshConfig.data = 2", "MeshConfig.model = 2", f"train.zero_stage = {zero}")
        several = session_of(tmp_path, 4, *sizes, f"train.grad_accum_steps = {microbatches}", *mesh)
        want, got = gradients_of(one, params), gradients_of(several, params)
    for name, leaf in jax.tree.leaves_with_path(want):
        other = dict(jax.tree.leaves_with_path(got))[name]
        np.testing.assert_allclose(other, leaf, rtol=1e-10, atol=1e-12, err_msg=str(name))


def summed_elements(text: str) -> int:
    """Return how many floats the all-reduces of several devices in a lowered program sum, one turn of each loop."""
    elements, sizes = 0, dict(re.findall(r'"(\w+)"=(\d+)', text))
    for part in text.split("stablehlo.all_reduce")[1:]:
        if listed := re.match(r"[^<]*<\{[^}]*replica_groups = dense<.*?> : tensor<\d+x(\d+)xi64>", part):
            devices = int(listed.group(1))
        else:  # as jax 0.12 writes it: axes of a mesh
            axes = re.search(r"replica_group_mesh_axes<mesh = @\w+, axes = \[(.*?)\]>", part).group(1)
            devices = math.prod(int(sizes[name]) for name in re.findall(r'name = "(\w+)"', axes))
        operands = re.search(r"\}\) : \((.*?)\) ->", part).group(1)
        for shape in re.findall(r"tensor<((?:\d+x)*)f32>", operands):
            elements += (devices > 1) * math.prod(int(size) for size in shape.split("x") if size)
    return elements


def test_no_microbatch_sums_gradients_over_devices(tmp_path):
    """In one microbatch the model sums the gradients of all layers; of two, statistics alone.

    The embedding's is scattered while it is summed: ZeRO-1 needs a part on each device.
    """
    found = []
    for microbatches in (1, 2):
        session = session_of(tmp_path, 4, *SIZES, f"train.grad_accum_steps = {microbatches}")
        text = session.trace_step().lower().as_text()
        table = session.model.vocab_size, session.config.model.model_dim
        found.append(summed_elements(text))
        parts = text.split("stablehlo.reduce_scatter")[1:]
        scattered = [re.search(r"\}\) : \(tensor<(\S+)xf32>\) ->", part).group(1) for part in parts]
        assert "x".join(map(str, table)) in scattered
    layers = sum(leaf.size for leaf in jax.tree.leaves(session.model.shapes()["dense"]["units"]))
    assert layers <= found[0] < layers + math.prod(table) / 100 and found[1] < math.prod(table) / 100, found
