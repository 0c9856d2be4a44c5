"""Loss and every gradient equal the reference's where the step decides replicas or shares from its own counts.

float64, 1e-10 of the largest reference entry of each leaf, as for placements planned ahead (test_placements.py). What
the step decided shows in nothing but its speed, so the rules are chosen such that each decision occurs.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import placement_cases as cases

from moe_jax.after_gate import CalibrateRule, ShadowRule, ShareRule
from moe_jax.placement import build_skeleton

MESHES = {
    "deepspeed": {"expert": 8},
    "s1": {"expert": 4, "expert_shard": 2, "model": 2},
    "pairwise": {"expert": 8},
    "ring": {"expert": 4, "data": 2},
    "s2": {"expert": 8, "model": 2},
}


def shadow_rule(price, home_slots, replica_slots):
    """Seconds in tokens: an exchange costs nothing, a shadow as much as computing `price` tokens."""
    return ShadowRule(
        home_slots=home_slots, replica_slots=replica_slots, compute=1.0, exchange=0.5, shadow=price, residual=False
    )


def shadows(counts, home, price, replica_slots):
    """Return how many experts a loop over FasterMoE's condition shadows: counts [S, E]."""
    totals = counts.sum(0)
    load = np.bincount(home, totals, counts.shape[0]).astype(float)
    best, number = 1.5 * load.max(), 0
    for expert in np.argsort(-totals, kind="stable")[:replica_slots]:
        load = load + counts[:, expert]
        load[home[expert]] -= totals[expert]
        if load.max() + (number + 1) * price >= best:
            break
        best, number = load.max() + (number + 1) * price, number + 1
    return number


@pytest.mark.slow
@pytest.mark.parametrize("schedule", MESHES)
def test_shadowed_experts_equal_reference(schedule):
    mesh = MESHES[schedule]
    placement = cases.draw_placement(1, mesh["expert"], replica_slots=0).replace(shares=None, rule="home")
    replica_slots = 2
    skeleton = build_skeleton(placement, method="broadcast", replica_slots=replica_slots)
    skeleton = dataclasses.replace(skeleton, broadcast_slots=replica_slots)
    price = 20.0 if mesh["expert"] == 4 else 8.0  # at which some layers shadow and others do not
    rule = shadow_rule(price, skeleton.home_slots, replica_slots)
    numbers = set()
    with jax.enable_x64(True):
        run = cases.runner(skeleton, mesh, schedule, rule)
        for routing in cases.ROUTINGS:
            got = run(placement, routing)
            cases.assert_equals_reference(routing, got, cases.reference(routing), placement, skeleton.bank_rows)
            loads = np.asarray(got[2].loads)
            numbers |= {shadows(loads[at], placement.home[at], price, replica_slots) for at in range(cases.LAYERS)}
    assert len(numbers) > 1, numbers


@pytest.mark.parametrize("schedule", ["deepspeed", pytest.param("s1", marks=pytest.mark.slow)])
def test_shares_solved_on_the_device_equal_reference(schedule):
    mesh = MESHES[schedule]
    devices = mesh["expert"]
    placements = [cases.draw_placement(seed, devices).replace(shares=None, rule="shares") for seed in range(2)]
    build = functools.partial(build_skeleton, method="gather", candidates=devices, replica_slots=cases.SLOTS)
    skeletons = [build(placement) for placement in placements]
    sizes = ("home_slots", "bank_rows", "gather_slots")
    most = {name: max(getattr(skeleton, name) for skeleton in skeletons) for name in sizes}
    skeleton = dataclasses.replace(skeletons[0], **most)
    rule = ShareRule(
        home_slots=skeleton.home_slots, replica_slots=skeleton.replica_slots, devices_per_node=devices // 2, sweeps=8
    )
    with jax.enable_x64(True):
        run = cases.runner(skeleton, mesh, schedule, rule)
        for placement in placements:
            for routing in cases.ROUTINGS:
                got = run(placement, routing)
                cases.assert_equals_reference(routing, got, cases.reference(routing), placement, skeleton.bank_rows)


@pytest.mark.parametrize("schedule", ["deepspeed", pytest.param("s1", marks=pytest.mark.slow)])
def test_replicas_added_by_calibration_equal_reference(schedule):
    mesh = MESHES[schedule]
    devices = mesh["expert"]
    placement = cases.draw_placement(1, devices, replica_slots=1).replace(shares=None, rule="nearest")
    skeleton = build_skeleton(placement, method="gather", candidates=devices, replica_slots=2)
    rule = CalibrateRule(
        home_slots=skeleton.home_slots, replica_slots=2, devices_per_node=devices // 2, most_replicas=2, 
        overlap_degree=3, compute=1.0, exchange=0.5, late_transfer=0.25,
    )  # fmt: skip
    with jax.enable_x64(True):
        run = cases.runner(skeleton, mesh, schedule, rule)
        for routing in cases.ROUTINGS:
            got = run(placement, routing)
            cases.assert_equals_reference(routing, got, cases.reference(routing), placement, skeleton.bank_rows)
