"""The share of a transfer that runs beside attention follows the calibrated times of the run's cluster file."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_jax.config.run_config import RunConfig
from moe_jax.config.train_config import TrainConfig
from moe_jax.data import DataConfig
from moe_jax.mesh import MeshConfig, build_mesh
from moe_jax.models import ModelConfig
from moe_jax.moe import MoEConfig
from moe_jax.placement import Placement, build_skeleton
from moe_jax.planner import PlannerConfig
from moe_jax.replan.transfer_shares import split_shares

# 2 x 4 devices, one link of 1e9 B/s, 1e9 FLOP/s: 64 tokens a device, M = 8 and Sq = 16 make
# 64 (8 * 64 + 4 * 16 * 8) = 65,536 FLOPs of attention, 65.5 us
CLUSTER = "Cluster.name = 'test'\nCluster.intra_bandwidth = 1e9\nCluster.inter_bandwidth = 2e9\nCluster.flops = 1e9\n"


@pytest.fixture
def config(tmp_path):
    (tmp_path / "c.gin").write_text(CLUSTER, encoding="utf-8")
    return RunConfig(
        train=TrainConfig(batch_size=32),
        data=DataConfig(sequence_length=16),
        model=ModelConfig(layers=2, model_dim=8, heads=2, hidden_dim=512, prefetch="pro_prophet"),
        moe=MoEConfig(num_experts=8),
        mesh=MeshConfig(devices_per_node=4),
        planner=PlannerConfig(cluster=str(tmp_path / "c.gin")),
    )


def skeleton(replica_slots):
    """Every device has replicas of its next neighbours' experts: as many rounds as replicas."""
    even = Placement.even(2, 8, 8, 4)
    replicas = [(layer, (d + s) % 8, d) for layer in range(2) for d in range(8) for s in range(1, replica_slots + 1)]
    return build_skeleton(even.replace(replicas=np.array(sorted(replicas), np.int32)), method="shift")


def shares(config, replica_slots=4):
    return split_shares(config, build_mesh(config.mesh, jax.devices()), skeleton(replica_slots))


def with_model(config, **changes):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def test_attention_is_filled_first(config):
    """Four rounds of 2 x 8 x 512 x 4 bytes take 131 us, twice attention's time; on the way back it takes that."""
    assert shares(config) == {"trans_share": 0.5, "agg_share": 1.0}
    assert shares(with_model(config, refetch_replicas=True)) == {"trans_share": 0.5, "agg_share": 0.5}
    assert shares(config, replica_slots=1) == {"trans_share": 1.0, "agg_share": 1.0}
    halved = shares(with_model(config, dtype="bfloat16"))
    assert halved["trans_share"] == 1.0  # half the bytes


def test_only_a_split_has_shares(config):
    assert shares(with_model(config, prefetch_case="expert")) == {}
    assert shares(with_model(config, prefetch="hecate")) == {}


def test_without_calibration_half_runs_beside_attention(config):
    bare = dataclasses.replace(config, planner=PlannerConfig())
    assert shares(bare) == {"trans_share": 0.5, "agg_share": 0.5}
