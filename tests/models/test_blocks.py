"""The parts of which published models are made: loss and every gradient equal the one-device reference's.

RMSNorm, no biases, grouped-query attention, heads of their own size, norms of queries and keys, rotary base and factor,
an output head of its own, SwiGLU. float64, 1e-10 of the largest reference entry of each leaf. Few models, that together
meet every part on every kind of mesh: model-parallel groups whole and split over tokens, ZeRO-3, a block-wise schedule,
dense blocks between.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.equality_cases import assert_equal, model_config, moe_config

from moe_jax.errors import UserError
from moe_jax.models import LanguageModel, ModelConfig
from moe_jax.models.attention import attend
from moe_jax.parallel.mesh import MeshConfig, build_mesh

PLAIN = {
    "norm": "rms", "norm_epsilon": 1e-6, "attention_bias": False, "ffn_bias": False, "activation": "swiglu",
    "positions": "rotary", "tied_head": False,
}  # fmt: skip
# schedule, mesh, ZeRO stage, what differs of the layer, of the model
CASES = {
    "mixtral_one_device": ("deepspeed", {}, 1, {}, {"kv_heads": 1, "rotary_base": 1e6, "layers": 1}),
    "qwen3_mp2_split_zero3_pairs": (
        "s1",
        {"expert": 4, "expert_shard": 2, "model": 2},
        3,
        {},
        {"kv_heads": 2, "head_dim": 6, "qk_norm": "head", "moe_every": 2, "sequence_parallel": True},
    ),
    "olmoe_mp4_hecate": (
        "s1",
        {"expert": 4, "expert_shard": 2, "model": 4},
        1,
        {"renormalize": False},
        {"qk_norm": "width", "prefetch": "hecate", "remat": "block"},
    ),
    "width_mp2_split_biases": (
        "s2",
        {"data": 2, "expert": 4, "model": 2},
        3,
        {"shared_experts": 1},
        {
            "kv_heads": 2, "qk_norm": "width", "attention_bias": True, "tied_head": True, "norm": "layer",
            "rotary_factor": 4.0, "sequence_parallel": True, "remat": "dots", "kind": "bert",
        },
    ),
}  # fmt: skip


SLOW = ("mixtral_one_device", "width_mp2_split_biases")  # the others meet most of their parts


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_equals_reference(name):
    schedule, mesh, zero, layer, model = CASES[name]
    with jax.enable_x64(True):
        config = model_config(**{**PLAIN, **model})
        assert_equal(name, config, moe_config(schedule=schedule, **layer), mesh, zero, 1, "general", True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_keys_in_jax_and_here_are_alike(dtype):
    """float64 has a branch of its own; query head i reads keys and values of head i // 3."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, heads, 4)), dtype) for heads in (6, 2, 2))
    got = np.asarray(attend(q, k, v, True, "xla"), np.float64)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(array, np.float64)) for array in (q, k, v))
        want = np.asarray(attend(q, k, v, True, "xla"))
        alone = [attend(q[:, :, i : i + 1], k[:, :, j : j + 1], v[:, :, j : j + 1], True, "xla") for i, j in PAIRS]
    np.testing.assert_allclose(want, np.concatenate(alone, axis=2), atol=1e-14)
    assert np.max(np.abs(got - want)) < (1e-6 if dtype == "float32" else 0.02)


PAIRS = [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "ModelConfig.heads (4) must be divisible by ModelConfig.kv_heads (3)"),
        ({"kv_heads": 0}, "ModelConfig.kv_heads (0) must be at least 1, or None"),
        ({"head_dim": 5, "positions": "rotary"}, "even head size, and ModelConfig.head_dim is 5"),
        ({"norm": "batch"}, "ModelConfig.norm ('batch') must be one of layer, rms"),
        ({"qk_norm": "layer"}, "ModelConfig.qk_norm ('layer') must be one of none, head, width"),
        ({"norm_epsilon": 0.0}, "ModelConfig.norm_epsilon (0.0) must be positive"),
        ({"rotary_base": -1.0}, "ModelConfig.rotary_base (-1.0) must be positive"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(UserError, match=re.escape(message)):
        ModelConfig(**wrong)


def test_key_heads_that_do_not_split_are_refused():
    roles = build_mesh(MeshConfig(expert=4, model=4), jax.devices()[:4])
    with pytest.raises(UserError, match=r"ModelConfig.kv_heads \(2\) must be divisible by MeshConfig.model \(4\)"):
        LanguageModel(config=model_config(kv_heads=2), moe=moe_config(), vocab_size=31, roles=roles)
