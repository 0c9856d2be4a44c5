"""Loss and every gradient under any placement equal the one-device reference, and new plans compile nothing.

A hundred random placements (moved homes, replicas, shares, each under three routings: general, experts without tokens,
all first choices on one expert) run through four executables, one per shape. float64, 1e-10 of the largest reference
entry of each leaf.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.placement_cases import (
    EXPERTS,
    ROUTINGS,
    assert_equals_reference,
    counted_compilations,
    draw_placement,
    moe_config,
    reference,
    runner,
)

from moe_jax.moe.build import layer_sizes
from moe_jax.moe.routing import Choice
from moe_jax.moe.schedules import build_schedule
from moe_jax.moe.schedules.passes import add_later_passes
from moe_jax.moe.tables import local
from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.plan_shape import build_shape, fill_tables, fits, grow

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


def test_identity_experts_are_exact_on_a_grid():
    """Dispatch -> identity -> combine: tokens on the 2^-10 grid come back exactly, whoever holds the expert."""
    roles = build_mesh(MeshConfig(expert=8), jax.devices())
    tokens, dim, config = 32, 3, moe_config()
    rng = np.random.default_rng(0)
    x = rng.integers(-1024, 1025, (8 * tokens, dim)).astype(np.float32) / 1024
    ids = np.argsort(rng.random((8 * tokens, EXPERTS)), axis=1)[:, :2].astype(np.int32)
    ids[: 3 * tokens, 0], ids[: 3 * tokens, 1] = 5, 6  # three sources send everything to two experts
    weights = rng.integers(0, 65, ids.shape).astype(np.float32) / 64
    placements, shape = cases_of(False, 8)
    schedule = build_schedule("deepspeed", roles, layer_sizes(config, roles, tokens, shape))
    rows, by_expert = P(roles.dense), P(roles.expert)

    def body(x, ids, weights, tables):
        layer = jax.tree.map(lambda a: a[0], local(tables))
        choice = Choice(ids, weights, jnp.ones(ids.shape, bool))
        routed = schedule.route(schedule.enter(x, jnp.arange(tokens))[0], choice, layer)
        one_pass = functools.partial(schedule.run_pass, routed, experts=lambda rows, sizes: rows)
        return schedule.leave(add_later_passes(one_pass(0), one_pass, routed.passes, schedule.run_passes))

    specs = (rows, rows, rows, by_expert)
    step = jax.jit(jax.shard_map(body, mesh=roles.mesh, in_specs=specs, out_specs=rows))
    want = (weights[:, 0] + weights[:, 1])[:, None] * x
    for placement in placements:
        np.testing.assert_array_equal(step(x, ids, weights, fill_tables(shape, placement)), want)
