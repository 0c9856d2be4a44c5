"""ModelConfig.overlap = 'auto': two halves where exchanges cross nodes and are long, and what rules them out."""

import dataclasses

import pytest

from moe_jax.cluster.targets import parse_target
from moe_jax.config.run_config import RunConfig
from moe_jax.config.train_config import DistillationConfig
from moe_jax.models import ModelConfig
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.training.replanner import layer_seconds, settle_overlap, why_not_halves


def settled(target="h200:4x8", batch=256, **changes):
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
    return settle_overlap(run, roles, described).model.overlap, why_not_halves(run, roles), run, roles, described


def test_halves_are_taken_where_exchanges_cross_nodes():
    """One layer by hand: four exchanges of 31/32 of 32,768 rows of 768 bfloat16, 24/31 of them between nodes."""
    overlap, _, run, roles, target = settled()
    in_one_piece, in_halves = layer_seconds(run, roles, target, "segment_0")
    assert overlap == "halves" and in_halves < in_one_piece
    rows = 256 * 2048 / 32 * 2
    exchange = rows * 24 / 32 * 768 * 2 / 50e9
    experts = rows * 2 * 2 * 768 * 1536 / 989e12
    assert in_one_piece == pytest.approx(4 * exchange + 3 * experts, rel=0.2)  # and attention, and latencies


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target": "h200:1x8"}, "no exchange leaves a node"),
        ({"batch": 96}, "3 sequence"),
        ({"moe": MoEConfig(num_experts=64, capacity_factor=1.0)}, "tokens compete"),
        ({"moe": MoEConfig(num_experts=64, schedule="pairwise")}, "pairwise"),
        ({"distillation": DistillationConfig(teacher="runs/teacher", alpha=0.5)}, "teacher"),
    ],
    ids=["one_node", "odd", "capacity", "pairwise", "teacher"],
)
def test_what_rules_halves_out(changes, why):
    overlap, reason, *_ = settled(**changes)
    assert overlap == "none" and why in reason


def test_a_choice_of_the_user_stays():
    _, _, run, roles, target = settled()
    bound = dataclasses.replace(run, model=dataclasses.replace(run.model, overlap="none"))
    assert settle_overlap(bound, roles, target).model.overlap == "none"
    assert settle_overlap(run, roles, None).model.overlap == "none"  # rates that are not known, or a CPU
