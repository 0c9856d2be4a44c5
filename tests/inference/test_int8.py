"""int8 experts: each weight off by at most half a scale, and a layer that equals the layer on the rounded weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.generation_cases import PROMPTS, build, configs

from moe_jax.inference import Generator
from moe_jax.inference.few_tokens import SCALE, own_experts, quantize


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
    for name, leaf in plain.params["bank"]["segment_0"].items():
        held, scale = jax.jit(quantize)(leaf)
        rounded[name] = jax.device_put(held * scale[:, None], leaf.sharding)
    before, given = plain.loss(PROMPTS[2:]), plain.params
    plain.params = {**given, "bank": {"segment_0": rounded}}
    exact = plain.loss(PROMPTS[2:])
    int8 = Generator(plain.model, given, quantize="int8")
    assert int8.params["bank"]["segment_0"]["w_in"].dtype == jnp.int8
    got = int8.loss(PROMPTS[2:])
    np.testing.assert_allclose(got, exact, rtol=1e-6)
    np.testing.assert_allclose(got, before, rtol=5e-3)


def test_every_way_of_few_tokens_equals_a_loop_over_choices():
    """Choices of other devices and of padding count nothing; each way multiplies int8 weights as it does float ones."""
    rng = np.random.default_rng(0)
    rows, home_row = jnp.asarray(rng.normal(size=(3, 6)), jnp.float32), jnp.arange(4, 8, dtype=jnp.int32)
    place, weights = np.array([[0, 3], [3, -1], [2, 0]]), rng.uniform(0.5, 1, (3, 2)).astype(np.float32)
    weights[place < 0] = 0
    sizes = {"w_in": (8, 6, 5), "w_gate": (8, 6, 5), "w_out": (8, 5, 6)}
    plain = {name: jnp.asarray(rng.normal(size=size), jnp.float32) for name, size in sizes.items()}
    plain["w_in"] = plain["w_in"].at[5].set(3e38)  # that no token chose overflows, which is nobody's matter
    small = {}
    for name, leaf in plain.items():
        small[name], small[name + SCALE] = quantize(leaf)
    rounded = {name: np.asarray(small[name] * small[name + SCALE][:, None]) for name in sizes}
    for bank, exact in ((plain, jax.tree.map(np.asarray, plain)), (small, rounded)):
        want = np.zeros((3, 6))
        for token, choice in np.argwhere(place >= 0):
            w_in, w_gate, w_out = (exact[name][4 + place[token, choice]] for name in sizes)
            gate = rows[token] @ w_gate
            want[token] += weights[token, choice] * ((gate / (1 + np.exp(-gate)) * (rows[token] @ w_in)) @ w_out)
        for way in ("in turn", "by choice", "by slot"):
            compute = jax.jit(functools.partial(own_experts, "swiglu", way))
            got = compute(rows, jnp.asarray(place), jnp.asarray(weights), bank, home_row)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
