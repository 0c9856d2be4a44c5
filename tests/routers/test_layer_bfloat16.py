"""Every router's layer in bfloat16 next to the same numbers in float32, on four devices: output and every gradient.

The gate computes in float32 either way, from the same tokens and weights, so that the choices are the same and nothing
but rounding differs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.moe import MoEConfig, MoELayer
from moe_jax.moe.routers import routers
from moe_jax.parallel.mesh import MeshConfig, build_mesh

EXPERTS, MODEL_DIM, HIDDEN_DIM, TOKENS = 8, 16, 24, 64
LAYERS = {
    "topk": {}, "switch": {"top_k": 1, "capacity_factor": 1.0}, "noisy_topk": {}, "gshard": {"capacity_factor": 1.0},
    "base": {"top_k": 1}, "sigmoid_bias": {"expert_groups": 4, "kept_groups": 2},
    "group_limited": {"expert_groups": 2}, "forced_balance": {},
    "topology": {"remote_fraction": 0.2},
}  # fmt: skip


def test_every_router_has_a_layer():
    assert set(LAYERS) == set(routers())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "sigmoid_bias" else pytest.mark.slow) for n in LAYERS]
)
def test_layer_in_bfloat16(name):
    roles = build_mesh(MeshConfig(devices_per_node=2), jax.devices()[:4])
    config = MoEConfig(num_experts=EXPERTS, router=name, **LAYERS[name])
    layer = MoELayer(
        config, model_dim=MODEL_DIM, hidden_dim=HIDDEN_DIM, roles=roles, rngs=nnx.Rngs(0), dtype=jnp.bfloat16
    )
    graph, state = nnx.split(layer)
    x, weight = np.random.default_rng(1).normal(size=(2, TOKENS, MODEL_DIM))

    @jax.jit
    def run(state, x):
        def total(state, x):
            y, loss, loads = nnx.merge(graph, state)(x, noise_key=jax.random.key(3))
            return jnp.sum(y.astype(jnp.float32) * weight) + loss, (y, loads)

        (_, (y, loads)), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(state, x)
        return y, loads, grads

    x = jnp.asarray(x, jnp.bfloat16)
    y, loads, grads = run(state, x)
    exact_y, exact_loads, exact_grads = run(*jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (state, x)))
    np.testing.assert_array_equal(loads, exact_loads)
    assert y.dtype == jnp.bfloat16 and all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(grads))
    for ours, theirs in zip(jax.tree.leaves((y, grads)), jax.tree.leaves((exact_y, exact_grads)), strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs)
        assert np.linalg.norm(ours - theirs) <= 0.02 * np.linalg.norm(theirs), name
