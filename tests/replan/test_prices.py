"""What a run decides by prices and memory: shares of transfers, replica slots; and prices of two halves."""

import bisect
import dataclasses

import jax
import pytest
from support.options import planner_config

from moe_jax.analysis import dry_run
from moe_jax.analysis.dry_run import compare_halves
from moe_jax.cluster.targets import parse_target
from moe_jax.config.run_config import RunConfig
from moe_jax.config.train_config import TrainConfig
from moe_jax.data.corpus import DataConfig
from moe_jax.errors import UserError
from moe_jax.models import ModelConfig
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.plan import split_of_transfer
from moe_jax.replan.segments import base_cost, most_shapes, settle_memory

# 2 x 4 devices, one link of 1e9 B/s, 1e9 FLOP/s: 64 tokens a device, M = 8 and Sq = 16 make
# 64 (8 * 64 + 4 * 16 * 8) = 65,536 FLOPs of attention, 65.5 us
CLUSTER = """Cluster.name = 'test'
Cluster.flat = True
Cluster.intra_bandwidth = 1e9
Cluster.inter_bandwidth = 2e9
Cluster.flops = 1e9
"""


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


def shares(config, number=2):
    """The shares of a transfer of so many offers and slots, all devices on one level."""
    roles = build_mesh(config.mesh, jax.devices())
    transfer = TransferShape(devices=8, devices_per_node=4, offers=number, slots=number)
    return split_of_transfer(base_cost(config, roles), transfer)


def with_model(config, **changes):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def test_attention_is_filled_first(config, tmp_path):
    """(2 + 2) 7/8 experts of 2 x 8 x 512 x 4 bytes take 115 us, attention 65.5 and twice that on the way back.

    0.571 of Trans fits, which is 5 of 8 parts; a Trans on the way back leaves Agg as much.
    """
    assert shares(config) == {"trans_share": 0.625, "agg_share": 1.0}
    assert shares(with_model(config, refetch_replicas=True)) == {"trans_share": 0.625, "agg_share": 0.625}
    assert shares(config, number=1) == {"trans_share": 1.0, "agg_share": 1.0}
    halved = shares(with_model(config, dtype="bfloat16"))
    assert halved["trans_share"] == 1.0  # half the bytes
    bare = dataclasses.replace(config, planner=PlannerConfig())  # without a file the prices are those of the devices
    assert shares(bare) == shares(config)
    assert shares(with_model(config, prefetch="hecate")) == {}  # which splits nothing
    (tmp_path / "c.gin").write_text("Cluster.flops = 1e9\nCluster.intra_bandwidth = 1e9\n", encoding="utf-8")
    with pytest.raises(UserError, match="PlannerConfig.cluster needs Cluster.inter_bandwidth, which cluster 'c'"):
        shares(config)


def test_a_plan_is_priced_by_the_layer_that_runs(config):
    """Bytes of the compute dtype, three matrices with SwiGLU, F over the shards, which share a node's links."""
    mesh = MeshConfig(devices_per_node=4, expert_shard=2)
    run = dataclasses.replace(with_model(config, activation="swiglu", dtype="bfloat16"), mesh=mesh)
    run = dataclasses.replace(run, train=TrainConfig(batch_size=32, grad_accum_steps=2))
    roles = build_mesh(mesh, jax.devices())
    cost = base_cost(run, roles)
    expert = 3 * 8 * 256
    assert (cost.prices.exchanged_bytes, cost.prices.expert_bytes, cost.prices.state_bytes) == (
        8 * 2,
        expert * 2,
        expert * (4 + 8),
    )
    assert (cost.prices.cluster.devices_per_node, cost.prices.cluster.inter_bandwidth) == (2, 1e9)
    assert cost.prices.tokens_per_second() == 1e9 / (6 * 8 * 256)
    assert (cost.prefetch.schedule, cost.microbatches) == ("pro_prophet", 2)


def with_memory(folder, memory, **planner):
    """Return a planner's config with a cluster whose devices have so many bytes."""
    (folder / "m.gin").write_text(f"{CLUSTER}Cluster.memory_bytes = {memory}\n", encoding="utf-8")
    return planner_config(cluster=str(folder / "m.gin"), **planner)


def test_replica_slots_from_free_memory(config, tmp_path):
    roles = build_mesh(config.mesh, jax.devices())

    def slots(memory, **planner):
        planner = with_memory(tmp_path, memory, replica_slots="memory", **planner)
        return settle_memory(dataclasses.replace(config, planner=planner), roles)[0].planner.replica_slots

    assert slots(1e6) == 0 and slots(1e12) == 7  # an eighth expert is at home
    # its parameters, its gradient twice, and twice for later passes, an estimate that is taken twice
    step = 32_768 * (config.model.replica_layers + 2 + 2 * 2)
    sizes = range(10**6, 10**9, 10**4)
    least = sizes[bisect.bisect_left(sizes, 1, key=slots)]
    assert [slots(least + more * step) for more in (1, 2, 3)] == [2, 3, 4]
    # two slots of hecate's second decision are in memory too; shadows that come after the gate are all there are
    assert [slots(least + 3 * step, name="hecate", late_slots=late) for late in (1, 2)] == [3, 2]
    assert slots(least + 3 * step, name="hecate", calibrate=False) == 4
    assert slots(least + 3 * step, name="fastermoe", when="after_gate") == 4
    # with a number, the second decision has what model and slots leave, not the whole memory of a device
    for ahead, late in ((2, 2), (3, 1), (4, 0), (5, 0)):
        planner = with_memory(tmp_path, least + 3 * step, name="hecate", replica_slots=ahead)
        run, costs = settle_memory(dataclasses.replace(config, planner=planner), roles)
        (shape,) = most_shapes(run, roles, costs).values()
        assert (shape.replica_slots, shape.late_slots) == (ahead + late, late)
    with pytest.raises(UserError, match="PlannerConfig.replica_slots = 'memory' needs Cluster.memory_bytes"):
        memory = dataclasses.replace(config.planner, replica_slots="memory")
        settle_memory(dataclasses.replace(config, planner=memory), roles)


# Two halves.


def wide_run(target="h200:4x8", batch=256, **changes):
    described = parse_target(target)
    run = RunConfig()
    run = dataclasses.replace(
        run,
        mesh=MeshConfig(expert=described.devices, devices_per_node=described.per_node),
        model=ModelConfig(layers=12, model_dim=768, hidden_dim=1536, heads=12, dtype="bfloat16"),
        moe=MoEConfig(num_experts=64, top_k=2),
        data=dataclasses.replace(run.data, sequence_length=2048),
        train=dataclasses.replace(run.train, batch_size=batch),
    )
    run = dataclasses.replace(run, **changes)
    roles = build_mesh(run.mesh, described.devices)
    return run, roles, described


def test_halves_are_cheaper_where_exchanges_cross_nodes(monkeypatch):
    """One layer by hand: four exchanges of 31/32 of 32,768 rows of 768 bfloat16, 24/31 of them between nodes."""
    run, roles, target = wide_run()
    in_one_piece, in_halves = compare_halves(run, roles, target)
    assert in_halves < in_one_piece
    rows = 256 * 2048 / 32 * 2
    exchange = rows * 24 / 32 * 768 * 2 / (0.86 * 50e9) + 45e-6 + 24e-6  # 24 messages leave the node
    experts = rows * 2 * 2 * 768 * 1536 / 466e12  # as grouped matmuls of an H100
    monkeypatch.setattr(dry_run, "MORE_KERNELS", 0)
    assert in_halves - compare_halves(run, roles, target)[1] == pytest.approx(75 * 2.4e-6)
    assert in_one_piece == pytest.approx(4 * exchange + 3 * experts, rel=0.2)  # and attention


def test_without_a_file_prices_are_those_of_the_devices():
    """By hand, 16,384 tokens a device: four matmuls of 19 GFLOP at about 600 TFLOP/s, causal attention of 8 x 6 heads
    of 128 over 2,048, six sixteenths of the 284 us of `cluster/measured`. TF32 runs at half of bfloat16's FLOP/s."""
    run, _, target = wide_run()
    for dtype, item in (("bfloat16", 2), ("float32", 4)):
        own = dataclasses.replace(run, model=dataclasses.replace(run.model, dtype=dtype))
        cost = base_cost(own, build_mesh(run.mesh, target.devices, kind=target.device_kind))
        assert cost.prices.cluster.name == "h200" and cost.prices.dtype_bytes == item
        hand = (4 * 2 * 16384 * 768**2 / 600e12 + 6 / 16 * 284e-6) * (1 if item == 2 else 989 / 495)
        assert cost.attention_seconds == pytest.approx(hand, rel=0.25)
        rate = 466e12 if item == 2 else 233e12  # of grouped matmuls of many rows
        assert cost.prices.tokens_per_second() == pytest.approx(rate / (2 * 2 * 768 * 1536), rel=0.01)
    assert base_cost(run, build_mesh(run.mesh, target.devices, kind="cpu")).prices.cluster.name == "host_devices"
