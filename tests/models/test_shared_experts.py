"""Shared and residual experts: loss and every gradient equal the one-device reference's, whatever moves the others.

float64, 1e-10 of the largest reference entry of each leaf. Few cases, that together meet 1, 2 and 8 devices, every way
to send rows, both mixes, both activations, split tokens, ZeRO-3 and a block-wise schedule.
"""

import re

import jax
import pytest
from support.equality_cases import assert_equal, model_config, moe_config

from moe_jax.errors import UserError
from moe_jax.models import LanguageModel
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh

MP_ESP = {"expert": 4, "expert_shard": 2, "model": 2}
RESIDUAL = {"shared_experts": 1, "top_k": 1, "renormalize": False, "residual": "learned"}
# schedule, mesh, ZeRO stage, what differs of the layer, of the model
CASES = {
    "s1_one_device": ("s1", {}, 1, {"shared_experts": 2, "shared_hidden_dim": 10}, {"activation": "swiglu"}),
    "deepspeed_two_devices": ("deepspeed", {"expert": 2}, 1, RESIDUAL, {}),
    "hecate_s1_mp2_esp2": ("s1", MP_ESP, 3, RESIDUAL, {"prefetch": "hecate", "remat": "block"}),
    "s2_split": ("s2", MP_ESP, 1, {"shared_experts": 1}, {"sequence_parallel": True}),
    "pairwise": ("pairwise", {"expert": 8}, 1, RESIDUAL, {}),
    "ring_mp2": ("ring", {"expert": 8, "model": 2}, 1, {"shared_experts": 1}, {"stack": "unrolled", "layers": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name):
    schedule, mesh, zero, layer, model = CASES[name]
    with jax.enable_x64(True):
        assert_equal(name, model_config(**model), moe_config(schedule=schedule, **layer), mesh, zero, 1, "general")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shared_experts": -1}, "MoEConfig.shared_experts (-1) must be 0 or positive"),
        ({"shared_hidden_dim": 8}, "MoEConfig.shared_hidden_dim (8) needs MoEConfig.shared_experts of at least 1"),
        ({"shared_experts": 1, "residual": "half"}, "MoEConfig.residual ('half') must be one of sum, learned"),
        ({"residual": "learned"}, "MoEConfig.shared_experts is 0; set it to 1"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(UserError, match=re.escape(message)):
        MoEConfig(**wrong)


def test_a_hidden_dim_that_does_not_split_is_refused():
    roles = build_mesh(MeshConfig(expert=4, model=4), jax.devices()[:4])
    moe = moe_config(shared_experts=1, shared_hidden_dim=6)
    with pytest.raises(UserError, match=r"of all shared experts \(6\) must be divisible by MeshConfig.model \(4\)"):
        LanguageModel(config=model_config(), moe=moe, vocab_size=31, roles=roles)
