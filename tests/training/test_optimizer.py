"""Which leaves decay, that gradients are clipped by their global norm, and the learning rate, derived by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config.train_config import OPTIMIZERS, TrainConfig
from moe_jax.errors import UserError
from moe_jax.models import LanguageModel, ModelConfig
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.training.optimizer import build_learning_rate, build_optimizer, decays

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


@pytest.mark.parametrize("clip_norm, scale", [(1.0, 1 / 5), (10.0, 1.0), (0.0, 1.0)])
def test_clip_is_by_the_global_norm(clip_norm, scale):
    """Of gradients of norm 5: sixteen entries of 3 / 4 have the norm 3, sixteen of 1 the norm 4. mu = (1 - b1) g."""
    grads = {"bank": {"w_in": jnp.full((8, 2), 0.75)}, "dense": {"table": jnp.full((2, 8), 1.0)}}
    optimizer = build_optimizer(TrainConfig(beta1=0.5, clip_norm=clip_norm))
    params = jax.tree.map(jnp.zeros_like, grads)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    (moments,) = [part.mu for part in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(part, "mu")]
    jax.tree.map(lambda mu, grad: np.testing.assert_allclose(mu, 0.5 * scale * grad, rtol=1e-6), moments, grads)


# peak 2, final share 0.1: with W = 10 from 2 / 10 at update 0 in a line to 2 at update 10
RISE = {0: 0.2, 5: 1.1, 10: 2.0}
CASES = {
    # by a cosine to 2 x 0.1: step 55 is half way down
    "cosine": ({}, {**RISE, 55: 1.1, 100: 0.2, 150: 0.2}),
    "cosine_without_rise": ({"warmup_steps": 0}, {0: 2.0, 50: 1.1, 100: 0.2}),
    # no room for 20 steps: three are left
    "cosine_short": ({"steps": 4, "warmup_steps": 20}, {0: 2 / 3, 3: 2.0, 4: 0.2}),
    "cosine_of_one": ({"steps": 1, "warmup_steps": 20}, {0: 2.0}),
    "constant": ({"learning_rate_schedule": "constant"}, {**RISE, 11: 2.0, 100: 2.0, 150: 2.0}),
    # 90 updates for a fall of 1.8: 0.02 each
    "linear": ({"learning_rate_schedule": "linear"}, {**RISE, 11: 1.98, 55: 1.1, 100: 0.2, 150: 0.2}),
    # stable up to update 80, then 20 updates for 1.8: 0.09 each
    "wsd": (
        {"learning_rate_schedule": "wsd", "decay_steps": 20},
        {**RISE, 11: 2.0, 80: 2.0, 81: 1.91, 90: 1.1, 100: 0.2, 150: 0.2},
    ),
    # after 5 of 20 half of the fall is done, after 1 the share sqrt(1 / 20)
    "wsd_1_sqrt": (
        {"learning_rate_schedule": "wsd", "decay_steps": 20, "decay_shape": "1-sqrt"},
        {**RISE, 80: 2.0, 81: 2 - 1.8 * math.sqrt(0.05), 85: 1.1, 100: 0.2, 150: 0.2},
    ),
    # a tenth of 100 steps
    "wsd_tenth": ({"learning_rate_schedule": "wsd"}, {**RISE, 90: 2.0, 95: 1.1, 100: 0.2}),
}


@pytest.mark.parametrize("case", CASES)
def test_schedules(case):
    fields, values = CASES[case]
    fields = {"steps": 100, "warmup_steps": 10, "learning_rate": 2.0, "final_learning_rate": 0.1, **fields}
    schedule = build_learning_rate(TrainConfig(**fields))
    traced = jax.jit(schedule)
    for step, value in values.items():
        np.testing.assert_allclose([schedule(step), traced(np.int32(step))], value, rtol=1e-6, err_msg=str(step))


@pytest.mark.parametrize(
    "fields, text",
    [
        (
            {"learning_rate_schedule": "wsd", "steps": 30, "decay_steps": 11},
            "train.warmup_steps (20) and train.decay_steps (11) must fit into train.steps (30) under 'wsd'; lower "
            "one of the two",
        ),
        (
            {"decay_steps": 5},
            "train.decay_steps (5) needs train.learning_rate_schedule = 'wsd'; under 'cosine' leave it 0",
        ),
    ],
)
def test_mistakes_in_schedules_are_one_line(fields, text):
    with pytest.raises(UserError) as caught:
        TrainConfig(**fields)
    assert str(caught.value) == text
