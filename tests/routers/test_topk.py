"""The gate by hand: who is chosen, with what weight, who is dropped, and what the sums say.

Logits are fed in as tokens, with the identity as the gate's weight.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moe_jax.errors import UserError
from moe_jax.moe import MoEConfig, balance_loss, choose_experts
from moe_jax.moe.reference import reference_weights
from moe_jax.moe.routers.scores import gate_noise
from moe_jax.moe.routing import route

CHOOSE = jax.jit(choose_experts, static_argnames="config")  # one compile is quicker than one of each operation


def choose(logits, config, **kwargs):
    logits = jnp.asarray(logits)
    return CHOOSE(logits, jnp.eye(logits.shape[1], dtype=logits.dtype), config, **kwargs)


# The example of DeepSpeed's top-k gate. Choices, best first:
#   token 0: 3, 1    token 1: 1, 0    token 2: 2, 3    token 3: 3, 2
# Four tokens, two choices, four experts, factor 1: two slots each. Only expert 3 is asked thrice, by tokens 0, 2 and 3
# with softmax probabilities .282, .290 and .344. By position it keeps 0 and 2, by probability 2 and 3.
DEEPSPEED = np.float32([[0.11, 0.2, 0.1, 0.3], [0.3, 0.4, 0.11, 0.1], [0.11, 0.1, 0.6, 0.5], [0.1, 0.11, 0.7, 0.8]])
DEEPSPEED_CONFIG = MoEConfig(num_experts=4, top_k=2, capacity_factor=1.0, min_capacity=1)
DEEPSPEED_KEPT = {  # (token, expert, slot of that expert)
    "probability": {"010", "100", "111", "220", "230", "321", "331"},
    "position": {"010", "030", "100", "111", "220", "231", "321"},
}


@pytest.mark.parametrize("drop", DEEPSPEED_KEPT)
def test_choose_experts_deepspeed_example(drop):
    config = dataclasses.replace(DEEPSPEED_CONFIG, drop=drop)
    choice, stats = choose(DEEPSPEED, config)
    np.testing.assert_array_equal(choice.expert_ids, [[3, 1], [1, 0], [2, 3], [3, 2]])
    # every expert as a destination of its own: its rows in order are its slots
    routing = route(choice, choice.expert_ids, jnp.zeros_like(choice.expert_ids), 4, 1)
    slots = (routing.place_of - jnp.append(routing.start[:-1], 0)[routing.destination]).reshape(4, 2)
    got = {
        f"{token}{choice.expert_ids[token, k]}{slots[token, k]}"
        for token in range(4)
        for k in range(2)
        if choice.keep_mask[token, k]
    }
    assert got == DEEPSPEED_KEPT[drop]
    np.testing.assert_array_equal(stats.counts, [1, 2, 2, 3])  # before the drop
    assert stats.dropped == 1


@pytest.mark.parametrize("drop", DEEPSPEED_KEPT)
def test_reference_weights_deepspeed_example(drop):
    config = dataclasses.replace(DEEPSPEED_CONFIG, drop=drop)
    weights, chosen = jax.jit(lambda probs: reference_weights(probs, config, 1))(jax.nn.softmax(DEEPSPEED, axis=1))
    got = {f"{token}{expert}" for token, expert in zip(*np.nonzero(np.asarray(weights)), strict=True)}
    assert got == {name[:2] for name in DEEPSPEED_KEPT[drop]}
    np.testing.assert_array_equal(np.sum(np.asarray(chosen), axis=0), [1, 2, 2, 3])


def test_choose_experts_stats():
    # token 0 is undecided among four experts: entropy log 4, logsumexp log 4. Token 1: logits 0, 0, 0, log 5:
    # probabilities 1/8, 1/8, 1/8, 5/8, logsumexp log 8, entropy log 8 - 5/8 log 5.
    _, stats = choose(np.float32([[0, 0, 0, 0], [0, 0, 0, np.log(5)]]), MoEConfig(num_experts=4, top_k=1))
    np.testing.assert_array_equal(stats.counts, [1, 0, 0, 1])
    np.testing.assert_allclose(stats.probability, [3 / 8, 3 / 8, 3 / 8, 7 / 8], rtol=1e-6)
    np.testing.assert_allclose(stats.squared_logsumexp, np.log(4) ** 2 + np.log(8) ** 2, rtol=1e-6)
    np.testing.assert_allclose(stats.entropy, np.log(4) + np.log(8) - 5 / 8 * np.log(5), rtol=1e-6)
    assert stats.dropped == 0 and stats.counts.dtype == stats.dropped.dtype == jnp.int32


NOISY = MoEConfig(num_experts=4, top_k=2, gate_noise=0.7)


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


def test_choose_experts_noise():
    """With logits of zero the softmax is that of gate_noise x normal noise; the z-loss does not see the noise."""
    key, ids = jax.random.key(3), jnp.arange(8, dtype=jnp.int32)
    zeros = jnp.zeros((8, 4))
    choice, stats = choose(zeros, NOISY, noise_key=key, token_ids=ids)
    probs = jax.nn.softmax(0.7 * gate_noise(key, ids, 4, jnp.float32), axis=1)
    np.testing.assert_array_equal(choice.expert_ids, np.argsort(-np.asarray(probs), axis=1)[:, :2])
    np.testing.assert_allclose(stats.probability, np.sum(np.asarray(probs), axis=0), rtol=1e-6)
    np.testing.assert_allclose(stats.squared_logsumexp, 8 * np.log(4) ** 2, rtol=1e-6)
    # split among two devices: ids 0-3 and 4-7
    halves = [choose(zeros[:4], NOISY, noise_key=key, token_ids=part)[0] for part in (ids[:4], ids[4:])]
    np.testing.assert_array_equal(np.concatenate([half.expert_ids for half in halves]), choice.expert_ids)


@pytest.mark.parametrize("given, acc_dtype", [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_choose_experts_dtype(given, acc_dtype):
    with jax.enable_x64(True):
        ids = jnp.arange(4, dtype=jnp.int32)
        choice, stats = choose(jnp.asarray(DEEPSPEED, given), NOISY, noise_key=jax.random.key(0), token_ids=ids)
        floats = (choice.weights, stats.probability, stats.squared_logsumexp, stats.entropy)
        assert [leaf.dtype.name for leaf in floats] == [acc_dtype] * 4
        integers = (choice.expert_ids, stats.counts, stats.dropped)
        assert [leaf.dtype.name for leaf in integers] == ["int32"] * 3


def test_choose_experts_float64_is_not_rounded():
    """Experts 1 and 2 differ by 1e-12, which float32 cannot see: it would break the tie towards 1."""
    with jax.enable_x64(True):
        choice, _ = choose(np.float64([[0, 1, 1 + 1e-12]]), MoEConfig(num_experts=3, top_k=1))
        assert choice.expert_ids[0, 0] == 2


# capacity = max(min_capacity, ceil(K f t / E)), never more than the t tokens that there are
@pytest.mark.parametrize(
    "tokens, experts, top_k, factor, least, expected",
    [
        (4, 4, 2, 1.0, 1, 2),  # 2 * 4 / 4
        (4, 4, 2, 1.0, 3, 3),  # min_capacity wins
        (64, 8, 2, 1.25, 4, 20),  # 2 * 1.25 * 64 / 8
        (10, 8, 1, 1.0, 1, 2),  # ceil(1.25)
        (16, 64, 2, 0.5, 4, 4),  # ceil(0.25) = 1, min_capacity 4
        (8, 2, 2, 4.0, 1, 8),  # 32, but an expert cannot meet a token twice
        (3, 8, 2, None, 4, 3),  # dropless: all
    ],
)
def test_capacity(tokens, experts, top_k, factor, least, expected):
    config = MoEConfig(num_experts=experts, top_k=top_k, capacity_factor=factor, min_capacity=least)
    assert config.capacity(tokens) == expected


def test_balance_loss():
    """1 when choices and probabilities are even, E when all goes to one expert, and per layer when stacked."""
    even = balance_loss(jnp.int32([4, 4, 4, 4]), jnp.full(4, 2.0), 8, 2)
    one = balance_loss(jnp.int32([8, 0, 0, 0]), jnp.float32([8, 0, 0, 0]), 8, 1)
    np.testing.assert_allclose([even, one], [1, 4], rtol=1e-6)
    # 3/4 of the choices and 1/2 of the probability on expert 0: 2 (3/4 1/2 + 1/4 1/2) = 1
    stacked = balance_loss(jnp.int32([[6, 2], [2, 6]]), jnp.float32([[4, 4], [1, 7]]), 8, 1)
    np.testing.assert_allclose(stacked, [1.0, 2 * (1 / 4 * 1 / 8 + 3 / 4 * 7 / 8)], rtol=1e-6)


def test_balance_loss_gradient_skips_the_counts():
    """d/dp_e = E counts_e / (K N) / N: the counts are constants."""
    grads = jax.grad(lambda p: balance_loss(jnp.int32([6, 2]), p, 8, 1))(jnp.float32([4, 4]))
    np.testing.assert_allclose(grads, [2 * 6 / 8 / 8, 2 * 2 / 8 / 8], rtol=1e-6)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_experts": 0}, r"MoEConfig.num_experts \(0\) must be at least 1"),
        ({"num_experts": 4, "top_k": 5}, r"top_k \(5\) must lie between 1 and MoEConfig.num_experts \(4\)"),
        ({"top_k": 0}, r"top_k \(0\) must lie between 1 and MoEConfig.num_experts \(8\)"),
        ({"capacity_factor": 0.0}, r"capacity_factor \(0.0\) must be positive, or None to drop no token"),
        ({"drop": "random"}, r"drop \('random'\) must be one of position, probability"),
        ({"min_capacity": 0}, r"min_capacity \(0\) must be at least 1"),
        ({"bucket_slack": 0.0}, r"bucket_slack \(0.0\) must be positive; 1.5 suits most runs"),
    ],
)
def test_moe_config_errors(fields, message):
    with pytest.raises(UserError, match=message):
        MoEConfig(**fields)
