"""Loss and every gradient under any placement equal the one-device reference, and new plans compile nothing.

A hundred random placements (moved homes, replicas, shares, each under three routings: general, experts without tokens,
all first choices on one expert) run through four executables, one per shape. float64, 1e-10 of the largest reference
entry of each leaf.
"""

import dataclasses

import jax
import numpy as np
import pytest
from support.marks import slow_but
from support.prefetch_cases import (
    ROUTINGS,
    assert_equals_reference,
    counted_compilations,
    model_config,
    placements_of,
    reference,
    runner,
)

from moe_jax.parallel.static_sizes import BucketRows
from moe_jax.planning.plan_shape import misfits

# name -> by node, mesh, schedule, rows of buckets; 'auto:NAME' is the schedule that plans of 'auto' name
SHAPES = {
    "flat": (False, {"expert": 8}, "auto:ring", None),
    "by_node_s2_mp2_esp2": (True, {"expert": 4, "expert_shard": 2, "model": 2}, "auto:s2", None),
    "by_node_overflow": (True, {"expert": 8}, "auto:pairwise", BucketRows(own=16, node=8, far=8)),
    "flat_data2": (False, {"expert": 4, "data": 2}, "deepspeed", None),
}
LATENT = {"positions": "rotary", "head_dim": 6, "kv_lora_rank": 4, "qk_rope_head_dim": 2}


@pytest.mark.parametrize("name", slow_but(SHAPES, "by_node_overflow"))
def test_random_placements_equal_reference_without_compiling(name):
    (by_node, mesh, schedule, rows) = SHAPES[name]
    config = model_config(layers=2, **(LATENT if "mp2" in name else {}))
    placements, shape = placements_of(by_node, 2, mesh["expert"], 17, rules="any", replica_slots=3)
    schedule, _, named = schedule.partition(":")
    program = f"{named}/3" if named else ""
    shape = dataclasses.replace(shape, bucket_rows=rows, program=program)
    assert shape.schedule == named
    placements = [placement.replace(program=program) for placement in placements]
    assert not any(misfits(shape, placement) for placement in placements)
    with jax.enable_x64(True):
        wants = {routing: reference(config, routing) for routing in ROUTINGS}
        run = runner(config, schedule, mesh, shape)
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
