"""Every router in a two-layer model on a mesh: loss and every gradient equal a dense reference to 1e-10.

A covering set: each router on 8 devices once at least, every schedule, MP and ESP, capacity and dropless.
"""

import jax
import numpy as np
import pytest
from routers.dense_router import Groups, dense_route
from support.equality_cases import BATCH, EXPERTS, LENGTH, assert_equal, model_config, moe_config
from support.marks import slow_but

TOKENS = BATCH * LENGTH
CAP = {"capacity_factor": 1.0, "min_capacity": 1}

# router, mesh, what else of the layer, of the model
CASES = {
    "switch_ep8_capacity": ("switch", {"expert": 8}, {"top_k": 1, **CAP}, {}),
    "noisy_topk_ep4_data2": ("noisy_topk", {"data": 2, "expert": 4}, {"bucket_slack": 0.5}, {}),
    "gshard_ep4_data2_s1_mp2_capacity": ("gshard", {"data": 2, "expert": 4, "model": 2}, {"schedule": "s1", **CAP}, {}),
    "gshard_ep8_dropless_noise": ("gshard", {"expert": 8}, {"gate_noise": 0.1}, {}),
    "sigmoid_bias_groups_ep8_pairwise": ("sigmoid_bias", {"expert": 8}, {"schedule": "pairwise", "pairwise_groups": 4, "top_k": 3, "balance_over": "sequence", "expert_groups": 4, "kept_groups": 2, "routed_scale": 2.0}, {}),  # noqa: E501
    "sigmoid_bias_deepspeed_mp2_esp2": ("sigmoid_bias", {"expert": 4, "expert_shard": 2, "model": 2}, {"schedule": "deepspeed"}, {}),  # noqa: E501
    "group_limited_ep8_s2_mp4": ("group_limited", {"expert": 8, "model": 4}, {"schedule": "s2", "expert_groups": 2, "gate_noise": 0.1}, {}),  # noqa: E501
    "forced_balance_ep8_ring": ("forced_balance", {"expert": 8}, {"schedule": "ring"}, {}),
    "topology_ep8_two_nodes": ("topology", {"expert": 8, "devices_per_node": 4}, {"remote_fraction": 0.3}, {}),
    "topology_ep4_nodes_of_2_capacity": ("topology", {"data": 2, "expert": 4, "devices_per_node": 2}, {"remote_fraction": 0.2, "schedule": "s1", **CAP}, {"remat": "block"}),  # noqa: E501
    "noisy_topk_hecate": ("noisy_topk", {"expert": 8}, {"schedule": "s1"}, {"prefetch": "hecate"}),
    "base_ep8": ("base", {"expert": 8}, {"top_k": 1}, {}),
    "base_ep2_data2": ("base", {"data": 2, "expert": 2}, {"top_k": 1, "schedule": "pairwise"}, {"remat": "block"}),
}  # fmt: skip
ALWAYS = (
    "gshard_ep4_data2_s1_mp2_capacity", "sigmoid_bias_groups_ep8_pairwise", "topology_ep8_two_nodes", "base_ep8",
)  # fmt: skip


def local_of(mesh, drop_groups):
    """Return bool [drop_groups, E], the experts on each device's node where homes are even."""
    expert, shard = mesh.get("expert", 1), mesh.get("expert_shard", 1)
    members = max(1, mesh.get("devices_per_node", 1000) // shard)
    node_of_expert = np.arange(EXPERTS) // (EXPERTS // expert) // members
    devices = np.arange(drop_groups) // shard % expert
    return node_of_expert[None] == (devices // members)[:, None]


@pytest.mark.parametrize("case", slow_but(CASES, *ALWAYS))
def test_router_equals_reference_float64(case):
    router, mesh, layer, model = CASES[case]
    moe = moe_config(router=router, **{"gate_noise": 0.0, **layer})
    sizes = [mesh.get(name, 1) for name in ("data", "expert", "expert_shard")]
    devices = int(np.prod(sizes))
    with jax.enable_x64(True):
        route = dense_route(moe, jax.random.key(11), TOKENS, Groups(devices, local_of(mesh, devices)))
        stats = assert_equal(case, model_config(**model), moe, mesh, 1, 1, "uniform", True, route)
    if moe.capacity_factor is not None:
        assert int(np.sum(stats.dropped)) > 0, "this case is here to drop"
    if router == "base":
        np.testing.assert_array_equal(np.sum(stats.loads, axis=1), TOKENS // EXPERTS)
        assert int(np.sum(stats.completed)) == 0
