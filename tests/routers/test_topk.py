"""The gate by hand: who is chosen, with what weight, who is dropped, and what the sums say.

Logits are fed in as tokens, with the identity as the gate's weight.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moe_jax.moe import MoEConfig, choose_experts
from moe_jax.moe.routers.scores import gate_noise

CHOOSE = jax.jit(choose_experts, static_argnames="config")  # one compile is quicker than one of each operation


def choose(logits, config, **kwargs):
    logits = jnp.asarray(logits)
    return CHOOSE(logits, jnp.eye(logits.shape[1], dtype=logits.dtype), config, **kwargs)


def test_choose_experts_stats():
    # token 0 is undecided among four experts: entropy log 4, logsumexp log 4. Token 1: logits 0, 0, 0, log 5:
    # probabilities 1/8, 1/8, 1/8, 5/8, logsumexp log 8, entropy log 8 - 5/8 log 5.
    _, stats = choose(np.float32([[0, 0, 0, 0], [0, 0, 0, np.log(5)]]), MoEConfig(num_experts=4, top_k=1))
    np.testing.assert_array_equal(stats.counts, [1, 0, 0, 1])
    np.testing.assert_allclose(stats.probability, [3 / 8, 3 / 8, 3 / 8, 7 / 8], rtol=1e-6)
    np.testing.assert_allclose(stats.squared_logsumexp, np.log(4) ** 2 + np.log(8) ** 2, rtol=1e-6)
    np.testing.assert_allclose(stats.entropy, np.log(4) + np.log(8) - 5 / 8 * np.log(5), rtol=1e-6)
    assert stats.dropped == 0 and stats.counts.dtype == stats.dropped.dtype == jnp.int32


def test_gate_noise_is_the_token_s_own():
    """The same token gets the same noise alone, in any order, and on any device; another token or key does not."""
    key, ids = jax.random.key(3), jnp.arange(16, dtype=jnp.int32)
    noise = gate_noise(key, ids, 4, jnp.float32)
    order = np.random.default_rng(0).permutation(16)
    np.testing.assert_array_equal(gate_noise(key, ids[order], 4, jnp.float32), noise[order])
    np.testing.assert_array_equal(gate_noise(key, ids[5:6], 4, jnp.float32), noise[5:6])
    mesh = jax.make_mesh((8,), ("device",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("device")))
    over_devices = jax.jit(lambda ids: gate_noise(key, ids, 4, jnp.float32))(spread)
    assert len(over_devices.sharding.device_set) == 8
    np.testing.assert_array_equal(over_devices, noise)
    assert len(np.unique(np.asarray(noise))) == noise.size
    assert not np.any(np.asarray(gate_noise(jax.random.key(4), ids, 4, jnp.float32)) == np.asarray(noise))
