"""Buckets of three lengths: the reference's numbers whichever kind overflows, in the passes that are due.

Loads send the first choices of device d to the expert of one device: itself, a neighbour on its node, one of another
node, the same one for all; or leave half of the experts without tokens. float64, 1e-10 of each array's largest entry.
"""

import jax
import numpy as np
import pytest
from support.layer_cases import EXPERTS, assert_near, draw, make_loss, make_reference, moe_config, plan_of
from support.marks import slow_but
from support.program_order import overtaking

from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.static_sizes import BucketRows, bucket_layout

TOKENS = 512  # of all devices: 128 choices of one device, 16 of them for a device on the mean
ROWS = BucketRows(own=32, node=16, far=8)
TARGETS = {"own": lambda d: d, "node": lambda d: d ^ 1, "far": lambda d: (d + 4) % 8, "one": lambda d: 5}
CASES = {
    "s1": ("s1", {"expert": 8, "devices_per_node": 4}, {"top_k": 1}),
    "s1-two_level-esp2": ("s1", {"expert_shard": 2, "devices_per_node": 4}, {"transport": "two_level"}),
    "s1-two_level-data2": ("s1", {"data": 2, "expert": 4, "devices_per_node": 2}, {"transport": "two_level"}),
    "s1-esp_is_a_node": ("s1", {"expert_shard": 4, "devices_per_node": 4}, {}),
    "deduplicated": ("deduplicated", {"expert": 4, "data": 2, "devices_per_node": 2}, {"top_k": 5}),
    "deduplicated-esp2": ("deduplicated", {"expert_shard": 2, "devices_per_node": 4}, {"top_k": 3}),
    "deepspeed-esp2-mp2": ("deepspeed", {"expert_shard": 2, "model": 2, "devices_per_node": 4}, {}),
    "deepspeed-two_level": ("deepspeed", {"model": 2, "devices_per_node": 2}, {"transport": "two_level"}),
    "s2-esp2-mp2": ("s2", {"expert_shard": 2, "model": 2, "devices_per_node": 4}, {"gather": "saa"}),
    "s2-aas-mp2_of_two_members": ("s2", {"model": 2, "devices_per_node": 4}, {"gather": "aas"}),
    "s2-mp4_of_two_nodes": ("s2", {"model": 4, "devices_per_node": 2}, {"gather": "saa"}),
    "pairwise": ("pairwise", {"expert": 8, "devices_per_node": 4}, {}),
    "pairwise-esp2": ("pairwise", {"expert_shard": 2, "devices_per_node": 4}, {}),
    "pairwise-groups": ("pairwise", {"expert": 8, "devices_per_node": 4}, {"pairwise_groups": 8}),
}


def arguments(load):
    """Return what `draw` does, the first choices by `load`."""
    x, w_gate, experts, cotangent = draw(False, tokens=TOKENS)
    w_gate /= np.linalg.norm(w_gate, axis=0)
    device = np.arange(TOKENS) * 8 // TOKENS
    if load in TARGETS:
        x = 0.01 * x + 4 * w_gate.T[np.vectorize(TARGETS[load])(device)]
    elif load == "idle":
        x[:, 0] = np.abs(x[:, 0]) + 1
        w_gate[0] -= np.where(np.arange(EXPERTS) % 2, 30.0, 0.0)
    return x, w_gate, experts, cotangent


@pytest.mark.parametrize("name", slow_but(CASES, "s1", "s1-two_level-esp2", "deduplicated", "s2-mp4_of_two_nodes"))
def test_schedule_equals_reference(name):
    schedule, mesh, options = CASES[name]
    roles = build_mesh(MeshConfig(**mesh), jax.devices())
    config = moe_config(schedule, **options)
    plan = plan_of(roles, ROWS)
    passes = {}
    with jax.enable_x64(True):
        loss = jax.jit(jax.value_and_grad(make_loss(config, roles, TOKENS, plan), (0, 1, 2), has_aux=True))
        step = loss.lower(*arguments("general")).compile()
        assert not overtaking(step.as_text()), "a collective may run next to a branch that holds others"
        reference = make_reference(moe_config("s1", config.top_k), 1)
        for load in ("general", *TARGETS, "idle"):
            (got, (y, _, passes[load])), grads = step(*arguments(load))
            (want, (want_y, _)), want_grads = reference(*arguments(load))
            assert_near((got, y, grads), (want, want_y, want_grads), 1e-10)
    assert min(int(passes[load]) for load in ("own", "far", "one")) > 1, passes
    if name == "s1":  # the 64 choices of a device go into one bucket
        assert (passes["own"], passes["node"], passes["far"]) == (2, 4, 8)


def test_layout_by_hand():
    """4 members, two a node: [4, 2] rows of every bucket, one more for each of the node, two more for the own."""
    layout = bucket_layout(BucketRows(own=5, node=3, far=2), 4, 2)
    assert [(piece.kind, piece.count, piece.begin, piece.end, piece.offset) for piece in layout.pieces] == [
        ("far", 4, 0, 2, 0),
        ("node", 2, 2, 3, 8),
        ("own", 1, 3, 5, 10),
    ]
    assert layout.total == 12


@pytest.mark.parametrize(
    "rows, members, near, want",
    [
        ((5, 3, 2), 8, 4, (5, 9, 8)),
        ((1, 1, 2), 8, 4, (2, 6, 8)),  # no bucket is shorter than a farther one
        ((5, 3, 2), 4, 1, (5, 0, 6)),  # a node is one member
        ((5, 3, 1), 4, 4, (5, 9, 0)),  # all are on one node
        ((5, 3, 2), 1, 1, (5, 0, 0)),
    ],
)
def test_rows_used(rows, members, near, want):
    """Rows that one device hands on in an exchange: own, inside its node, across nodes."""
    own, node, far = rows
    got = BucketRows(own=own, node=node, far=far).used(members, near)
    assert (got.own, (near - 1) * got.node, (members - near) * got.far) == want
