"""The even assignment of `base`: exact sizes, equal to the loop-written auction, near the optimum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from routers.oracles import even_assignment
from scipy.optimize import linear_sum_assignment

from moe_jax.errors import UserError
from moe_jax.moe import MoEConfig
from moe_jax.moe.routers import RouterInputs, build_router
from moe_jax.moe.routers.base_layers import assign_evenly

TOKENS, EXPERTS, EPS = 24, 4, 0.01


def matrices():
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(TOKENS, EXPERTS))
    hot = drawn + np.array([0, 5.0, 0, 0])
    return {
        "drawn": drawn,
        "ties": np.zeros((TOKENS, EXPERTS)),
        "all_want_one": np.tile([0.0, 1.0, 0.0, 0.5], (TOKENS, 1)),
        "hot": hot,
        "alike": np.tile(rng.normal(size=EXPERTS), (TOKENS, 1)) + 1e-3 * drawn,
    }


def optimum(scores):
    each = len(scores) // scores.shape[1]
    rows, columns = linear_sum_assignment(np.repeat(scores, each, axis=1), maximize=True)
    return np.repeat(scores, each, axis=1)[rows, columns].sum()


@pytest.mark.parametrize("rounds", [2000, 3])
def test_assign_evenly(rounds):
    """Each expert gets exactly T / E; where the auction ends by itself the sum is within T eps of the optimum."""
    ended = []
    with jax.enable_x64(True):
        assign = jax.jit(functools.partial(assign_evenly, eps=EPS, rounds=rounds))
        for what, scores in matrices().items():
            owner, left = map(np.asarray, assign(jnp.asarray(scores)))
            np.testing.assert_array_equal(np.bincount(owner, minlength=EXPERTS), TOKENS // EXPERTS, what)
            want, want_left = even_assignment(scores, EPS, rounds)
            np.testing.assert_array_equal(owner, want, what)
            assert left == want_left, what
            if left == 0:
                got = scores[np.arange(TOKENS), owner].sum()
                assert got >= optimum(scores) - TOKENS * EPS - 1e-9, what
            ended.append(left == 0)
    assert all(ended) if rounds == 2000 else not all(ended)


def test_base_needs_an_even_number_of_tokens():
    router = build_router(MoEConfig(num_experts=4, top_k=1, router="base"))
    with pytest.raises(UserError, match=r"the 10 tokens that a device gates must be divisible by MoEConfig.num_expe"):
        router.choose(jnp.ones((10, 4)), {"w_gate": jnp.eye(4)}, RouterInputs(noise_key=jax.random.key(0)))
