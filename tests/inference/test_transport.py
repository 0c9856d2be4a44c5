"""`MoEConfig.transport` 'auto' while generating: by messages for single tokens, by bytes for long prompts."""

import jax
import pytest

from moe_jax.errors import UserError
from moe_jax.inference.transport import settle_transport
from moe_jax.mesh import MeshConfig, build_mesh
from moe_jax.moe import MoEConfig

H200 = "configs/cluster/h200.gin"


def transport(tokens, mesh, **changes):
    roles = build_mesh(MeshConfig(devices_per_node=4, **mesh), jax.devices())
    config = MoEConfig(**{"transport": "auto", "cluster": H200, "schedule": "s1", **changes})
    return settle_transport(config, roles, tokens, 4096).transport


def test_auto_takes_the_shortest():
    few, sliced = {"expert": 8}, {"expert": 2, "expert_shard": 4, "model": 4}
    # 8 devices on two nodes: 3 + 4 messages flat, 3 + 1 on two levels; with slicing 1 across and 3 to gather
    assert transport(1, few) == "two_level" and transport(1 << 20, few) == "all_to_all"
    assert transport(4, sliced) == "coordinated"
    assert transport(4, sliced, schedule="deepspeed") == "two_level"
    assert transport(1, few, transport="ppermute") == "ppermute"


def test_auto_without_a_cluster_is_one_line():
    with pytest.raises(UserError, match="set MoEConfig.cluster to its file"):
        transport(1, {"expert": 8}, cluster="")
