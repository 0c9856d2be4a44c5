"""Which leaves decay, and that the clipped norm is the whole model's on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config.train_config import OPTIMIZERS, TrainConfig
from moe_jax.models import LanguageModel, ModelConfig
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.training.optimizer import build_optimizer, decays

SPARED = """
dense/norm/bias dense/norm/scale
dense/units/segment_0/attention/norm/bias dense/units/segment_0/attention/norm/scale
dense/units/segment_0/attention/out_bias dense/units/segment_0/attention/qkv_bias
dense/units/segment_0/dense/in_bias dense/units/segment_0/dense/out_bias
dense/units/segment_0/dense/norm/bias dense/units/segment_0/dense/norm/scale
dense/units/segment_0/dense_attention/norm/bias dense/units/segment_0/dense_attention/norm/scale
dense/units/segment_0/dense_attention/out_bias dense/units/segment_0/dense_attention/qkv_bias
dense/units/segment_0/gate/norm/bias dense/units/segment_0/gate/norm/scale
dense/units/segment_0/gate/w_gate
""".split()


def test_decays_by_name():
    """Norms, biases and the gate are spared; an expert's or an FFN's weight called w_gate is not the gate."""
    config = ModelConfig(layers=2, moe_every=2, activation="swiglu", model_dim=8, heads=2, hidden_dim=8)
    roles = build_mesh(MeshConfig(), jax.devices()[:1])
    shapes = LanguageModel(config=config, moe=MoEConfig(num_experts=2), vocab_size=16, roles=roles).shapes()
    found = {True: [], False: []}
    for path, leaf in jax.tree.leaves_with_path(shapes):
        found[decays(path, leaf)].append("/".join(entry.key for entry in path))
    assert {"bank/segment_0/w_gate", "dense/units/segment_0/dense/w_gate", "dense/embedding/tokens"} <= set(found[True])
    assert sorted(found[False]) == sorted(SPARED)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_decays_what_it_should(name):
    """With a gradient of zero the step is the decay alone: learning rate x weight decay x value, or nothing."""
    config = TrainConfig(optimizer=name, steps=10, warmup_steps=0, learning_rate=0.5, weight_decay=0.25)
    optimizer = build_optimizer(config)
    params = {"bank": {"segment_0": {"w_in": jnp.ones((2, 2, 2))}}, "dense": {"norm": {"scale": jnp.ones(2)}}}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["bank"]["segment_0"]["w_in"], -0.5 * 0.25 * np.ones((2, 2, 2)), rtol=1e-6)
    np.testing.assert_array_equal(updates["dense"]["norm"]["scale"], np.zeros(2))


def clipped_moments(config, devices):
    """Return the first moments after one step from gradients of norm 5, spread over `devices` devices."""
    roles = build_mesh(MeshConfig(), jax.devices()[:devices])
    specs = {"bank": {"w_in": (roles.expert,)}, "dense": {"table": (None, roles.dense)}}
    params = {"bank": {"w_in": jnp.zeros((8, 2))}, "dense": {"table": jnp.zeros((2, 8))}}
    # sixteen entries of 3 / 4 have the norm 3, sixteen of 1 the norm 4
    grads = {"bank": {"w_in": jnp.full((8, 2), 0.75)}, "dense": {"table": jnp.full((2, 8), 1.0)}}
    place = lambda tree: jax.tree.map(lambda leaf, spec: jax.device_put(leaf, roles.sharding(*spec)), tree, specs)  # noqa: E731
    optimizer = build_optimizer(config)
    params, grads = place(params), place(grads)
    _, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    return next(part.mu for part in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(part, "mu"))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("clip_norm, scale", [(1.0, 1 / 5), (10.0, 1.0), (0.0, 1.0)])
def test_clip_is_by_the_global_norm(devices, clip_norm, scale):
    """Gradients of norm 5, no device holding more than an eighth: clipped to 1 they are a fifth; mu = (1 - b1) g."""
    moments = clipped_moments(TrainConfig(beta1=0.5, clip_norm=clip_norm), devices)
    np.testing.assert_allclose(moments["bank"]["w_in"], np.full((8, 2), 0.5 * 0.75 * scale), rtol=1e-6)
    np.testing.assert_allclose(moments["dense"]["table"], np.full((2, 8), 0.5 * scale), rtol=1e-6)
