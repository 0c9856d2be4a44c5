"""Loss and every gradient under any placement equal the one-device reference, and new plans compile nothing.

A hundred random placements (moved homes, replicas, shares, each under three routings: general, experts without tokens,
all first choices on one expert) run through six executables, one per skeleton. float64, 1e-10 of the largest reference
entry of each leaf.
"""

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

from moe_jax.dispatch import Choice, local
from moe_jax.mesh import MeshConfig, build_mesh
from moe_jax.moe.layer import layer_sizes
from moe_jax.placement import build_skeleton, fits, widen
from moe_jax.replan.device_tables import device_tables, layer_plan
from moe_jax.schedules import build_schedule

SKELETONS = {
    "shift": ("shift", {"expert": 8}, "deepspeed", 0),
    "gather_s1_mp2_esp2": ("gather", {"expert": 4, "expert_shard": 2, "model": 2}, "s1", 0),
    "broadcast": ("broadcast", {"expert": 8}, "deepspeed", 0),
    "shift_overflow": ("shift", {"expert": 8}, "deepspeed", 8),
    "gather_data2": ("gather", {"expert": 4, "data": 2}, "deepspeed", 0),
    "permute": ("permute", {"expert": 8}, "deepspeed", 0),
}


def cases_of(method, devices):
    """Return 17 placements and one skeleton for all; exact rounds serve one send graph, so there only shares vary."""
    placements = [draw_placement(seed, devices) for seed in range(17)]
    if method == "permute":
        first = placements[0].replace(rule="nearest", shares=None)
        placements = [
            first,
            first.replace(rule="home"),
            *(first.replace(replicas=first.replicas[i:]) for i in range(1, 16)),
        ]
    skeleton = build_skeleton(placements[0], method=method)
    for placement in placements[1:]:
        if not fits(skeleton, placement):
            skeleton = widen(skeleton, placement)
    return placements, skeleton


@pytest.mark.parametrize("name", SKELETONS)
def test_random_placements_equal_reference_without_compiling(name):
    method, mesh, schedule, rows = SKELETONS[name]
    placements, skeleton = cases_of(method, mesh["expert"])
    if rows:
        skeleton = type(skeleton)(**{**vars(skeleton), "bucket_rows": rows})
    assert all(fits(skeleton, placement) for placement in placements)
    with jax.enable_x64(True):
        wants = {routing: reference(routing) for routing in ROUTINGS}
        run = runner(skeleton, mesh, schedule)
        run(placements[0], "general")
        most_passes = 0
        with counted_compilations() as compilations:
            for at, placement in enumerate(placements):
                routing = ROUTINGS[at % 3]
                got = run(placement, routing)
                assert_equals_reference(f"{name} {at} {routing}", got, wants[routing], placement, skeleton.bank_rows)
                most_passes = max(most_passes, int(np.asarray(got[2].passes).max()))
        assert not compilations
    if rows:
        assert most_passes > 1, "this skeleton is here to overflow"


def test_identity_experts_are_exact_on_a_grid():
    """Dispatch -> identity -> combine: tokens on the 2^-10 grid come back exactly, whoever holds the expert."""
    roles = build_mesh(MeshConfig(expert=8), jax.devices())
    tokens, dim, config = 32, 3, moe_config()
    rng = np.random.default_rng(0)
    x = rng.integers(-1024, 1025, (8 * tokens, dim)).astype(np.float32) / 1024
    ids = np.argsort(rng.random((8 * tokens, EXPERTS)), axis=1)[:, :2].astype(np.int32)
    ids[: 3 * tokens, 0], ids[: 3 * tokens, 1] = 5, 6  # three sources send everything to two experts
    weights = rng.integers(0, 65, ids.shape).astype(np.float32) / 64
    placements, skeleton = cases_of("shift", 8)
    plan = layer_plan(skeleton, roles.expert)
    schedule = build_schedule("deepspeed", roles, layer_sizes(config, roles, tokens, plan))
    rows, by_expert = P(roles.dense), P(roles.expert)

    def body(x, ids, weights, tables):
        layer = jax.tree.map(lambda a: a[0], local(tables))
        choice = Choice(ids, weights, jnp.ones(ids.shape, bool))
        identity = lambda rows, sizes: rows  # noqa: E731
        y, _, _ = schedule(x, jnp.arange(tokens), lambda *_: (choice, ()), lambda _: (identity, layer))
        return y

    specs = (rows, rows, rows, by_expert)
    step = jax.jit(jax.shard_map(body, mesh=roles.mesh, in_specs=specs, out_specs=rows))
    want = (weights[:, 0] + weights[:, 1])[:, None] * x
    for placement in placements:
        np.testing.assert_array_equal(step(x, ids, weights, device_tables(skeleton, placement)), want)
