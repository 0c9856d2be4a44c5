"""int8 experts: each weight off by at most half a scale, and a layer that equals the layer on the rounded weights."""

import jax
import jax.numpy as jnp
import numpy as np
from support.generation_cases import PROMPTS, build, configs

from moe_jax.inference import Generator
from moe_jax.inference.int8 import quantize


def test_quantize_rounds_each_channel_by_its_largest_weight():
    weight = jax.random.normal(jax.random.key(0), (3, 5, 4)) * jnp.asarray([1.0, 10.0, 0.1, 0.0])[None, None]
    held, scale = quantize(weight)
    assert held.dtype == jnp.int8 and scale.shape == (3, 4)
    assert (np.abs(held).max(axis=1)[:, :3] == 127).all() and (np.asarray(scale)[:, 3] == 1).all()
    off = np.abs(np.asarray(held) * np.asarray(scale)[:, None] - np.asarray(weight))
    assert (off <= np.asarray(scale)[:, None] * 0.5001).all()


def test_loss_on_int8_equals_that_on_rounded_weights():
    """On a mesh that splits the experts and their hidden dim; and it moves little."""
    config, moe = configs(dtype="float32", activation="swiglu")
    mesh = {"expert": 2, "expert_shard": 2}
    plain, _ = build(config, moe, mesh)
    rounded = {}
    for name, leaf in plain.params["bank"].items():
        held, scale = jax.jit(quantize)(leaf)
        rounded[name] = jax.device_put(held * scale[:, None], leaf.sharding)
    before, given = plain.loss(PROMPTS[2:]), plain.params
    plain.params = {**given, "bank": rounded}
    exact = plain.loss(PROMPTS[2:])
    int8 = Generator(plain.model, given, quantize="int8")
    assert int8.params["bank"]["w_in"].dtype == jnp.int8
    got = int8.loss(PROMPTS[2:])
    np.testing.assert_allclose(got, exact, rtol=1e-6)
    np.testing.assert_allclose(got, before, rtol=5e-3)
