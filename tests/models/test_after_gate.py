"""Loss and every gradient equal the reference's where the step decides replicas or shares from its own counts.

float64, 1e-10 of the largest reference entry of each leaf, as for placements planned ahead (test_placements.py). What
the step decided shows in nothing but its speed, so the rules are chosen such that each decision occurs, and each size
of a late transfer runs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import prefetch_cases as cases
from support.marks import slow_but

from moe_jax.moe.after_gate import decide_by, late_size
from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning.balanced import Levelling
from moe_jax.planning.fastermoe import Shadowing
from moe_jax.planning.plan_shape import build_shape, fill_tables, grow

SLOTS, CONFIG = 2, cases.model_config(layers=2)
# mesh, and whether transfers go by node: of half the expert-parallel group each
MESHES = {
    "deepspeed": ({"expert": 8}, False),
    "pairwise": ({"expert": 8}, True),
    "s1": ({"expert": 4, "expert_shard": 2, "model": 2}, True),
    "ring": ({"expert": 4, "data": 2}, False),
    "s2": ({"expert": 8, "model": 2}, True),
}


def draw(seed, devices, rule, replica_slots=3):
    """Return a placement whose layers have this rule, without shares, and its shape."""
    (*_, placement), _ = cases.placements_of(False, 2, devices, seed + 1, rules="any", replica_slots=replica_slots)
    return placement.replace(shares=None, rule=rule)


def equals_reference(run, placement, shape, decide=True):
    """Compare each routing with the reference; returns the sizes in which late transfers ran."""
    found = set()
    for routing in cases.ROUTINGS:
        got = run(placement, routing)
        cases.assert_equals_reference(routing, got, cases.reference(CONFIG, routing), placement, shape.bank_rows)
        found |= decided_sizes(shape, placement, got[2].loads) if decide else set()
    return found


def with_late(shape, by_node, rule, **sizes):
    """The shape with a late transfer of these sizes and this rule."""
    devices = shape.devices
    sizes = {"offers": SLOTS, "slots": SLOTS, "crossing": SLOTS if by_node else 0, **sizes}
    late = TransferShape(devices=devices, devices_per_node=shape.devices_per_node, by_node=by_node, **sizes)
    return dataclasses.replace(shape, late=late, after_gate=rule)


def decided_sizes(shape, placement, loads):
    """Return the sizes in which each layer's late transfer runs: loads [L, D, E] -> set of numbers, 0 for none."""
    tables = fill_tables(shape, placement)
    decide = jax.jit(lambda *given: decide_by(shape.after_gate, *given, jnp.int32(0), shape)[2])
    found = set()
    for layer in range(shape.layers):
        mine = jax.tree.map(lambda leaf: jnp.asarray(leaf[0, layer]), tables)  # noqa: B023
        counts, holders = np.asarray(loads[layer], np.int32), tables.slot_expert[:, layer]
        found.add(int(late_size(decide(mine, counts, holders), shape.late)))
    return found


@pytest.mark.parametrize("schedule", slow_but(MESHES, "pairwise"))
def test_shadowed_experts_equal_reference(schedule):
    mesh, by_node = MESHES[schedule]
    placement = draw(1, mesh["expert"], "home", replica_slots=0)
    price = 20.0 if mesh["expert"] == 4 else 8.0  # at which some layers shadow and others do not
    rule = Shadowing(compute=1.0, exchange=0.5, shadow=price)
    shape = with_late(build_shape(placement), by_node, rule)
    with jax.enable_x64(True):
        found = equals_reference(cases.runner(CONFIG, schedule, mesh, shape), placement, shape)
    assert len(found) > 1, found


@pytest.mark.parametrize("schedule", slow_but(["deepspeed", "s1"], "deepspeed"))
def test_shares_solved_on_the_device_equal_reference(schedule):
    mesh, by_node = MESHES[schedule]
    placements = [draw(seed, mesh["expert"], "shares") for seed in range(2)]
    shape = grow(build_shape(placements[0], by_node=by_node), placements[1])
    shape = dataclasses.replace(shape, candidates=shape.devices, after_gate=Levelling(sweeps=8))
    with jax.enable_x64(True):
        run = cases.runner(CONFIG, schedule, mesh, shape)
        for placement in placements:
            equals_reference(run, placement, shape, decide=False)
