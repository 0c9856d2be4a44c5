"""The record of schedules: what each refuses, how many rows its buckets have, and what its entry names."""

import jax
import numpy as np
import pytest
from support.layer_cases import moe_config

from moe_jax.cluster.layer_seconds import FORMULAS, LayerShape
from moe_jax.errors import UserError
from moe_jax.moe.build import make_moe
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.schedule import CHOOSERS, LayerSizes, build_schedule, find_schedule, register, schedule_on, schedules
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.static_sizes import BucketRows

EXPERTS, DEVICES = 8, 4


def roles_of(**sizes):
    return build_mesh(MeshConfig(**sizes), jax.devices()[:DEVICES])


def sizes_of(roles):
    groups = EXPERTS // roles.size(roles.expert)
    return LayerSizes(config=moe_config("s1", top_k=2), tokens=16, groups=groups)


@pytest.mark.parametrize(
    "tokens, top_k, groups, capacity, slack, destinations, rows, worst",
    [
        (64, 2, 2, None, 1.5, 8, 24, 128),  # 1.5 * 2 * 64 / 8
        (64, 2, 2, None, 1.0, 3, 48, 128),  # ceil(42.67) = 43, rounded up to 8
        (64, 2, 1, None, 1.5, 2, 64, 64),  # 96, but one expert meets each token once
        (64, 2, 8, None, 1.5, 1, 128, 128),  # one destination gets everything
        (64, 2, 2, 10, 1.5, 8, 20, 128),  # two experts with ten slots each
        (8, 1, 4, 10, 1.5, 8, 8, 8),  # never more than there are
    ],
)
def test_bucket_rows(tokens, top_k, groups, capacity, slack, destinations, rows, worst):
    config = MoEConfig(num_experts=groups * destinations, top_k=top_k, bucket_slack=slack)
    sizes = LayerSizes(config=config, tokens=tokens, groups=groups, capacity=capacity)
    assert (sizes.bucket_rows(destinations), sizes.worst_rows()) == (BucketRows.even(rows), worst)


def test_dp_errors():
    for sizes, message in (
        ({"expert": 4}, r"\('dp'\) needs MeshConfig.expert = 1, not 4: .* set MeshConfig.expert = 1 and .*data = 4"),
        ({"data": 2, "expert": 1, "expert_shard": 2}, r"needs MeshConfig.expert_shard = 1, not 2"),
        ({"data": 4, "expert": 1, "model": 2}, r"needs MeshConfig.model = 1, not 2"),
    ):
        roles = roles_of(**sizes)
        with pytest.raises(UserError, match=message):
            build_schedule("dp", roles, sizes_of(roles))


def test_coordinated_is_refused_where_it_means_nothing():
    with pytest.raises(UserError, match="schedules s1 and s2"):
        make_moe(
            moe_config("deepspeed", transport="coordinated"),
            roles_of(expert_shard=2, model=2),
            np.zeros((16, 4)),
            "gelu",
        )
    with pytest.raises(UserError, match="MoEConfig.gather"):
        moe_config("s2", transport="coordinated", gather="saa")


def test_registry():
    assert {"deepspeed", "dp"} <= set(schedules())
    roles = roles_of()
    known = "auto, deduplicated, deepspeed, dp"
    with pytest.raises(
        UserError, match=rf"MoEConfig.schedule \('magic'\) is unknown; choose one of {known}.* --plugin that"
    ):
        build_schedule("magic", roles, sizes_of(roles))
    with pytest.raises(AssertionError, match="'dp' is registered twice"):
        register("dp")(lambda roles, sizes: None)


def test_every_record_names_what_exists():
    assert set(FORMULAS) <= set(schedules())
    with pytest.raises(UserError, match="'magic' has no price, .* choose one of deepspeed, s1"):
        LayerShape(schedule="magic", tokens=8, model_dim=4, rows=8, ep_size=2)
    for name in schedules():
        assert schedule_on(name, 1, 1).name in ("s1", name) and schedule_on(name, 2, 2) is find_schedule(name)
        assert name not in CHOOSERS or set(CHOOSERS[name].among) <= set(FORMULAS)
