"""`MoEConfig.transport` 'auto' while generating: by messages for single tokens, by bytes for long prompts."""

import jax
import pytest

from moe_jax.cluster import Cluster, write_cluster
from moe_jax.errors import UserError
from moe_jax.inference.programs import settle_transport
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh


def test_auto_takes_the_shortest(tmp_path):
    def transport(tokens, mesh, **changes):
        roles = build_mesh(MeshConfig(devices_per_node=4, **mesh), jax.devices())
        given = {"transport": "auto", "cluster": "configs/cluster/h200.gin", "schedule": "s1", **changes}
        return settle_transport(MoEConfig(**given), roles, tokens, 4096).transport

    # a message to another node takes five times the start of a collective
    sizes = {"nodes": 2, "devices_per_node": 4, "intra_bandwidth": 450e9, "inter_bandwidth": 400e9}
    starts = {"intra_latency": 1e-6, "inter_latency": 1e-6, "intra_step": 1e-6, "inter_step": 5e-6}
    write_cluster(Cluster(**sizes, **starts), tmp_path / "slow_messages.json")
    slow, few, sliced = (
        {"cluster": str(tmp_path / "slow_messages.json")},
        {"expert": 8},
        {"expert_shard": 4, "model": 4},
    )
    # 8 devices on two nodes: 3 + 4 messages flat, 3 + 1 on two levels; with slicing 1 across and 3 to gather
    assert transport(1, few) == "all_to_all"  # on H200s a second start-up takes longer than 3 messages
    assert transport(1, few, **slow) == "two_level" and transport(1 << 20, few, **slow) == "all_to_all"
    assert transport(4, {"expert": 2, **sliced}, **slow) == "coordinated"
    assert transport(4, {"expert": 2, **sliced}, schedule="deepspeed", **slow) == "two_level"
    assert transport(1 << 20, few, transport="two_level") == "two_level"
    # L = 4 though experts are cut by 2: 1 message across, 1 + 1 in the group; with L = 2 it would be 2 across, and lose
    assert transport(4, {"expert": 4, "expert_shard": 2, "model": 4}, **slow) == "coordinated"
    with pytest.raises(UserError, match="set MoEConfig.cluster to its file"):
        transport(1, few, cluster="")
