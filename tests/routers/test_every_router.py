"""One property test for all routers: each equals its loop-written oracle, on logits of every kind.

Logits are fed in as tokens, with the identity as the gate's weight; float64, so that a tie is a tie.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from routers.oracles import ORACLES, Given
from support.options import layer_config

from moe_jax.errors import UserError
from moe_jax.moe import MoEConfig
from moe_jax.moe.routers import RouterInputs, build_router, check_read
from moe_jax.moe.routers.scores import gate_noise, token_draws
from moe_jax.registry import ROUTERS

TOKENS, EXPERTS = 24, 8

CASES = {
    "topk": {"top_k": 3, "gate_noise": 0.3},
    "topk_capacity": {"capacity_factor": 1.0, "min_capacity": 1, "renormalize": False},
    "topk_by_probability": {"capacity_factor": 0.7, "min_capacity": 1, "drop": "probability", "routed_scale": 2.5},
    "topk_groups": {"expert_groups": 4, "kept_groups": 2},
    "switch": {"top_k": 1, "capacity_factor": 1.25, "min_capacity": 1, "gate_noise": 0.2},
    "noisy_topk": {},
    "group_limited": {"expert_groups": 2, "renormalize": False, "routed_scale": 16.0},
    "forced_balance": {"top_k": 3},
    "gshard": {},
    "gshard_capacity": {"capacity_factor": 0.8, "min_capacity": 1},
    "sigmoid_bias": {"top_k": 3, "routed_scale": 2.0},
    "sigmoid_bias_groups": {"expert_groups": 4, "kept_groups": 2, "capacity_factor": 1.0, "drop": "probability"},
    "topology": {"remote_fraction": 0.2},
    "topology_probabilities": {"remote_fraction": 0.7, "renormalize": False},
    "base": {"top_k": 1},
}


def name_of(case):
    return next(name for name in sorted(ROUTERS, key=len, reverse=True) if case.startswith(name))


def config_of(case, **changes):
    return layer_config(num_experts=EXPERTS, router=name_of(case), **{**CASES[case], **changes})


def all_logits():
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(TOKENS, EXPERTS))
    one_hot, unused = drawn.copy(), drawn.copy()
    one_hot[:, 3] += 30
    unused[:, :4] -= 30
    return {
        "drawn": drawn,
        "ties": np.zeros((TOKENS, EXPERTS)),
        "few_values": rng.integers(0, 2, (TOKENS, EXPERTS)).astype(float),
        "one_hot": one_hot,
        "zero_tokens": unused,
    }


def test_every_router_has_an_oracle_and_a_case():
    assert set(ROUTERS) == set(ORACLES) == {name_of(case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_router_equals_its_oracle(case):
    config, name = config_of(case), name_of(case)
    rng = np.random.default_rng(1)
    local = np.arange(EXPERTS) < EXPERTS // 2
    ids = np.arange(40, 40 + TOKENS, dtype=np.int32)
    with jax.enable_x64(True):
        router, key = build_router(config), jax.random.key(5)
        leaves = {
            name: 0.3 * rng.normal(size=shape).astype(np.float64) for name, shape in router.leaves(EXPERTS).items()
        }
        if name == "topology":  # on a mesh of two nodes the tables say which experts are local
            router.local_experts = lambda tables: jnp.asarray(local)

        @jax.jit
        def run(x, key):
            params = {"w_gate": jnp.eye(EXPERTS, dtype=x.dtype), **leaves}
            inputs = RouterInputs(noise_key=key, token_ids=jnp.asarray(ids))

            def outputs(x):
                choice, stats = router.choose(x, params, inputs)
                return jnp.sum(choice.weights * choice.keep_mask), (choice, stats)

            (_, found), d_x = jax.value_and_grad(outputs, has_aux=True)(x)
            return *found, d_x

        for what, logits in all_logits().items():
            for training in (True, False) if name != "base" else (False,):
                given = Given(logits, bias=leaves.get("choice_bias"), local=local, token_ids=ids)
                if training:
                    given.noise = np.asarray(gate_noise(key, ids, EXPERTS, jnp.float64)) if router.draws else None
                    given.draws = np.asarray(token_draws(key, ids, jnp.float64))
                    given.scale_logits = logits @ leaves["w_noise"] if "w_noise" in leaves else None
                want = ORACLES[name](config, given)
                choice, stats, d_x = run(jnp.asarray(logits), key if training and router.draws else None)
                message = f"{what}, {'training' if training else 'evaluation'}"
                check(config, by_token(choice), stats, want, message)
                assert np.all(np.isfinite(d_x)), message


def by_token(choice):
    """Return for each token its list of (expert, weight, kept)."""
    ids, weights, keep = (np.asarray(leaf) for leaf in (choice.expert_ids, choice.weights, choice.keep_mask))
    assert ids.dtype == np.int32 and weights.shape == keep.shape == ids.shape
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), weights.tolist(), keep.tolist(), strict=True)]


def check(config, found, stats, want, message):
    assert len(found) == len(want) == TOKENS
    for row, wanted in zip(found, want, strict=True):
        assert [(e, stays) for e, _, stays in row] == [(e, stays) for e, _, stays in wanted], message
        assert len({e for e, _, _ in row}) == len(row), f"{message}: an expert twice"
        np.testing.assert_allclose([w for _, w, _ in row], [w for _, w, _ in wanted], rtol=1e-12, atol=1e-13)
    counts = [sum(e == expert for row in want for e, _, _ in row) for expert in range(EXPERTS)]
    np.testing.assert_array_equal(stats.counts, counts, message)
    assert stats.dropped == sum(not stays for row in want for _, _, stays in row), message
    if config.router == "topology":
        remote = sum(e >= EXPERTS // 2 for row in found for e, _, _ in row)
        assert remote <= math.floor(TOKENS * config.options[0].remote_fraction), (
            f"{message}: {remote} choices leave the node"
        )
    if not config.dropless:
        kept_by = [sum(stays for row in want for e, _, stays in row if e == expert) for expert in range(EXPERTS)]
        assert max(kept_by) <= config.capacity(TOKENS), message


def test_router_dtype():
    """Logits in bfloat16 are rounded; in float32 those of bfloat16 tokens are not."""
    x = jnp.asarray(np.random.default_rng(3).normal(size=(TOKENS, EXPERTS)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(4).normal(size=(EXPERTS, EXPERTS)), jnp.float32)
    weights = {}
    for dtype in ("auto", "float32", "bfloat16"):
        router = build_router(MoEConfig(num_experts=EXPERTS, router_dtype=dtype))
        weights[dtype] = router.choose(x, {"w_gate": w}, RouterInputs())[0].weights
        assert weights[dtype].dtype == jnp.float32
    np.testing.assert_array_equal(weights["auto"], weights["float32"])
    assert np.max(np.abs(weights["auto"] - weights["bfloat16"])) > 1e-4


def test_bias_moves_by_the_sign():
    """MaxText's example: 16 choices of 4 experts, loads 5, 4, 3, 4; and two layers at a time."""
    router = build_router(layer_config(num_experts=4, router="sigmoid_bias", bias_rate=0.01))
    indices = np.array([[[0, 1], [3, 0], [3, 1], [1, 0]], [[0, 3], [2, 0], [1, 2], [2, 3]]])
    counts = jnp.asarray(np.bincount(indices.ravel(), minlength=4), jnp.int32)
    state = {"choice_bias": jnp.zeros(4)}
    np.testing.assert_allclose(router.next_state(state, counts)["choice_bias"], [-0.01, 0, 0.01, 0], atol=1e-9)
    # a mean of 2.5, and one far beyond float32's integers, from which one expert differs by 1
    counts = jnp.asarray([[2, 3, 2, 3], [500_000_001, 500_000_000, 500_000_000, 500_000_003]], jnp.int32)
    moved = router.next_state({"choice_bias": jnp.zeros((2, 4))}, counts)["choice_bias"]
    np.testing.assert_allclose(moved, [[0.01, -0.01, 0.01, -0.01], [0.0, 0.01, 0.01, -0.01]], atol=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, r"MoEConfig.num_experts \(0\) must be at least 1"),
        ({"num_experts": 4, "top_k": 5}, r"top_k \(5\) must be at most MoEConfig.num_experts \(4\)"),
        ({"top_k": 0}, r"top_k \(0\) must be at least 1; 2 is the default"),
        ({"capacity_factor": 0.0}, r"capacity_factor \(0.0\) must be above 0; None is the default"),
        ({"drop": "random"}, r"drop \('random'\) must be one of 'position', 'probability'"),
        ({"min_capacity": 0}, r"min_capacity \(0\) must be at least 1"),
        ({"bucket_slack": 0.0}, r"bucket_slack \(0.0\) must be above 0; 1.5 is the default"),
        ({"overflow_chance": 1.0}, r"overflow_chance \(1.0\) must be below 1; 0.001 suits"),
        ({"router": "best"}, r"MoEConfig.router \('best'\) must be one of base, .* --plugin that"),
        ({"router": "switch"}, r"MoEConfig.top_k \(2\) must be 1 with MoEConfig.router = 'switch'"),
        ({"router": "gshard", "top_k": 1}, r"MoEConfig.top_k \(1\) must be 2 with MoEConfig.router = 'gshard'"),
        ({"router": "gshard", "drop": "probability"}, r"MoEConfig.drop \('probability'\) must be 'position' with"),
        ({"router": "base"}, r"MoEConfig.top_k \(2\) must be 1 with MoEConfig.router = 'base'"),
        ({"router": "base", "top_k": 1, "capacity_factor": 1.0}, r"capacity_factor \(1.0\) must be None with"),
        ({"router": "group_limited"}, r"needs MoEConfig.expert_groups, and 0 is none"),
        ({"router": "topk", "expert_groups": 3}, r"MoEConfig.expert_groups \(3\) must divide .*num_experts \(8\)"),
        ({"router": "topk", "expert_groups": 4, "kept_groups": 5}, r"kept_groups \(5\) must be at most .*\(4\)"),
        ({"router": "topk", "expert_groups": 8, "top_k": 2}, r"top_k \(2\) must be at most the 1 experts of .*\(1\)"),
        ({"router": "topology"}, r"MoEConfig.router \('topology'\) needs MoEConfig.cluster"),
        ({"router": "topology", "remote_fraction": 1.5}, r"remote_fraction \(1.5\) must lie between 0 and 1"),
        ({"router": "noisy_topk", "gate_noise": 0.1}, r"gate_noise \(0.1\) must be 0 with .*'noisy_topk'"),
        ({"router": "sigmoid_bias", "bias_rate": -1.0}, r"bias_rate \(-1.0\) must be at least 0"),
        ({"routed_scale": 0.0}, r"routed_scale \(0.0\) must be above 0"),
        ({"gate_noise": -1.0}, r"gate_noise \(-1.0\) must be at least 0"),
        ({"balance_over": "token"}, r"balance_over \('token'\) must be one of 'batch', 'sequence', 'step'"),
        ({"router": "gshard", "balance_over": "sequence"}, r"balance_over \('sequence'\) does not go with .*'gshard'"),
        ({"router": "base", "top_k": 1, "balance_over": "step"}, r"balance_over \('step'\) does not go with .*'base'"),
        ({"router_dtype": "int8"}, r"router_dtype \('int8'\) must be one of 'auto', 'bfloat16', 'float32', 'float64'"),
    ],
)
def test_router_config_errors(fields, message):
    with pytest.raises(UserError, match=message) as raised:
        layer_config(**fields)
    assert "\n" not in str(raised.value)


OTHER = {"routed_scale": 2.0, "renormalize": False, "drop": "probability", "expert_groups": 4, "kept_groups": 2}


def test_what_none_of_a_models_routers_reads_is_refused():
    """By one router alone; next to one that reads it, it is bound for that one."""
    assert {"switch", "gshard", "base"} == {n for n in ROUTERS if "renormalize" in ignored(n)}
    for name in sorted(ROUTERS):
        for field in ignored(name):
            config = MoEConfig(**{field: OTHER[field]})
            with pytest.raises(UserError, match=rf"MoEConfig.{field} \(.*\) is not read by .*{name!r}; leave it at"):
                check_read(config, {name})
            check_read(config, {name, "sigmoid_bias"})


def ignored(name):
    return ROUTERS[name].ignores
