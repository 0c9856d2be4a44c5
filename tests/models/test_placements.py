"""Loss and every gradient under any placement equal the one-device reference, and new plans compile nothing.

A hundred random placements (moved homes, replicas, shares, each under three routings: general, experts without tokens,
all first choices on one expert) run through four executables, one per shape. float64, 1e-10 of the largest reference
entry of each leaf.
"""

import jax
import numpy as np
import pytest
from support.placement_cases import (
    ROUTINGS,
    assert_equals_reference,
    counted_compilations,
    draw_placement,
    reference,
    runner,
)

from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.planning.plan_shape import build_shape, fits, grow

SHAPES = {
    "flat": (False, {"expert": 8}, "deepspeed", None),
    "by_node_s1_mp2_esp2": (True, {"expert": 4, "expert_shard": 2, "model": 2}, "s1", None),
    "by_node_overflow": (True, {"expert": 8}, "deepspeed", BucketRows(own=16, node=8, far=8)),
    "flat_data2": (False, {"expert": 4, "data": 2}, "deepspeed", None),
}


def cases_of(by_node, devices):
    """Return 17 placements and one shape for all."""
    placements = [draw_placement(seed, devices) for seed in range(17)]
    shape = build_shape(placements[0], by_node=by_node)
    for placement in placements[1:]:
        shape = grow(shape, placement)
    return placements, shape


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "flat_data2" else name for name in SHAPES]
)
def test_random_placements_equal_reference_without_compiling(name):
    by_node, mesh, schedule, rows = SHAPES[name]
    placements, shape = cases_of(by_node, mesh["expert"])
    if rows:
        shape = type(shape)(**{**vars(shape), "bucket_rows": rows})
    assert all(fits(shape, placement) for placement in placements)
    with jax.enable_x64(True):
        wants = {routing: reference(routing) for routing in ROUTINGS}
        run = runner(shape, mesh, schedule)
        run(placements[0], "general")
        most_passes = 0
        with counted_compilations() as compilations:
            for at, placement in enumerate(placements):
                routing = ROUTINGS[at % 3]
                got = run(placement, routing)
                assert_equals_reference(f"{name} {at} {routing}", got, wants[routing], placement, shape.bank_rows)
                most_passes = max(most_passes, int(np.asarray(got[2].passes).max()))
        assert not compilations
    if rows:
        assert most_passes > 1, "this shape is here to overflow"
