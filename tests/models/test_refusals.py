"""What a model cannot be is refused in one line when its config is made, or when its loss is built on a mesh."""

import re

import jax
import pytest
from support.equality_cases import BATCH, LENGTH, build, model_config, moe_config
from support.prefetch_cases import placements_of

from moe_jax.errors import UserError
from moe_jax.models import ModelConfig, make_loss
from moe_jax.moe import MoEConfig

LATENT = {"positions": "rotary", "kv_lora_rank": 8, "qk_rope_head_dim": 8}  # and four heads of 32
CONFIGS = [
    ({"heads": 4, "kv_heads": 3}, "ModelConfig.heads (4) must be divisible by ModelConfig.kv_heads (3)"),
    ({"kv_heads": 0}, "ModelConfig.kv_heads (0) must be at least 1, or None"),
    ({"head_dim": 5, "positions": "rotary"}, "even head size, and ModelConfig.head_dim, or model_dim / heads, is 5"),
    ({"q_lora_rank": 8}, "ModelConfig.q_lora_rank (8) is of latent attention; set ModelConfig.kv_lora_rank, or leave"),
    ({"rotary_yarn": (64, 32, 1, 1, 1)}, "ModelConfig.rotary_yarn ((64, 32, 1, 1, 1)) is of latent attention"),
    ({"kv_lora_rank": 8}, "ModelConfig.positions ('learned') must be 'rotary' with ModelConfig.kv_lora_rank (8)"),
    ({**LATENT, "kv_heads": 2}, "ModelConfig.kv_heads (2) must be 4 with ModelConfig.kv_lora_rank (8)"),
    ({**LATENT, "qk_rope_head_dim": None}, "qk_rope_head_dim (None) must be even and below ModelConfig.head_dim"),
    ({**LATENT, "qk_rope_head_dim": 32}, "qk_rope_head_dim (32) must be even and below ModelConfig.head_dim, or mo"),
    ({**LATENT, "rotary_yarn": (64, 1, 32, 1, 1)}, "rotary_yarn (64, 1, 32, 1, 1) must be (length, fast, slow, ms"),
    ({"norm": "batch"}, "ModelConfig.norm ('batch') must be one of layer, rms"),
    ({"qk_norm": "layer"}, "ModelConfig.qk_norm ('layer') must be one of none, head, width"),
    ({"norm_epsilon": 0.0}, "ModelConfig.norm_epsilon (0.0) must be positive"),
    ({"rotary_base": -1.0}, "ModelConfig.rotary_base (-1.0) must be positive"),
    ({"refetch_replicas": True}, "ModelConfig.refetch_replicas (True) needs ModelConfig.prefetch"),
    ({"prefetch": "fast"}, "ModelConfig.prefetch ('fast') must be one of"),
]
LAYERS = [
    ({"shared_experts": -1}, "MoEConfig.shared_experts (-1) must be at least 0"),
    ({"shared_hidden_dim": 8}, "MoEConfig.shared_hidden_dim (8) needs MoEConfig.shared_experts of at least 1"),
    ({"shared_experts": 1, "residual": "half"}, "MoEConfig.residual ('half') must be one of 'sum', 'learned'"),
    ({"residual": "learned"}, "MoEConfig.shared_experts is 0; set it to 1"),
]


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [*((ModelConfig, *case) for case in CONFIGS), *((MoEConfig, *case) for case in LAYERS)],
)
def test_a_config_refuses_what_cannot_be(config, wrong, message):
    with pytest.raises(UserError, match=re.escape(message)):
        config(**wrong)


MP4 = {"expert": 4, "model": 4}
# mesh, layer, model, message
LOSSES = {
    "key heads": (MP4, {}, {"kv_heads": 2}, "ModelConfig.kv_heads (2) must be divisible by MeshConfig.model (4)"),
    "shared": (
        MP4, {"shared_experts": 1, "shared_hidden_dim": 6}, {},
        "the hidden dim of all shared experts (6) must be divisible by MeshConfig.model (4)",
    ),
    "cudnn": (
        {}, {}, {"attention": "cudnn", "dtype": "bfloat16"},
        "cuDNN runs on NVIDIA GPUs, and the devices are of platform 'cpu'; set",
    ),
    "uneven auction": (
        {"expert": 3}, {"router": "base", "top_k": 1, "gate_noise": 0.0}, {},
        "takes no padding, and 3 data-parallel devices cannot share 8 sequences evenly; change train.batch_size",
    ),
    "halves in pieces": (
        {"expert": 2}, {"schedule": "pairwise"}, {"overlap": "halves"},
        "ModelConfig.overlap needs a MoEConfig.schedule whose experts run in one piece, not 'pairwise'; set MoEConfig",
    ),
    "prefetch in pieces": (
        {"expert": 8}, {"schedule": "ring"}, {"prefetch": "hecate"},
        "ModelConfig.prefetch needs a MoEConfig.schedule whose experts run in one piece, not 'ring'; set MoEConfig",
    ),
    "nothing moves": (
        {"expert": 1, "data": 8}, {"schedule": "dp"}, {"prefetch": "pro_prophet"},
        "ModelConfig.prefetch needs a MoEConfig.schedule whose experts run in one piece, not 'dp'; set MoEConfig",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_refuses_what_cannot_run(case):
    mesh, layer, model, message = LOSSES[case]
    with jax.enable_x64(True), pytest.raises(UserError, match=re.escape(message)) as caught:
        built = build(model_config(**model), moe_config(**layer), mesh)
        make_loss(built, built.layout(), BATCH, LENGTH)
    assert "\n" not in str(caught.value)


def test_a_split_length_must_divide_even_where_the_batch_makes_up_for_it():
    message = (
        r"^ModelConfig.sequence_parallel splits the tokens over MeshConfig.model \(4\) devices, which must divide "
        r"DataConfig.sequence_length \(6\); make it a multiple of 4, or set ModelConfig.sequence_parallel = False$"
    )
    whole, split = (build(model_config("float32", sequence_parallel=one), moe_config(), MP4) for one in (False, True))
    assert make_loss(whole, whole.layout(), BATCH, 6)
    with pytest.raises(UserError, match=message):
        make_loss(split, split.layout(), BATCH, 6)


def test_replicas_are_of_whole_experts():
    config = model_config("float32", overlap="halves")
    _, shape = placements_of(False, config.moe_layers, 2, number=1)
    split = build(config, moe_config(), {"data": 2, "expert": 2}, expert_zero_stage=3)
    with pytest.raises(UserError, match=r"zero_stage \(3\) splits experts over MeshConfig.data \(2\), and replicas"):
        make_loss(split, split.layout(), BATCH, LENGTH, plan={"segment_0": shape})
