"""Sparse collectives on 8 devices against loops over (chunk, device) pairs, in float64 to 1e-12, and their bytes.

P0 has every chunk once (its home), P1 adds replicas. Chunks are rows of two arrays, so that a chunk travels whole; 23
elements of a chunk divide by no number of devices.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.placements import random_placement

from moe_jax.moe.routing import local
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.sparse_all_gather import PARTS, empty_replicas, fetch, open_replicas, return_part
from moe_jax.planning.placement import bank_rows
from moe_jax.planning.plan_shape import build_shape, fill_tables

DEVICES, LAYERS, EXPERTS, SLOTS = 8, 2, 16, 3
SHAPES = {"w_in": (3, 2), "w_out": (17,)}
FORMS = [(8, False), (2, True), (4, True)]  # devices of a node, by node
CUTS = ((0, 3), (3, 4), (4, PARTS))


def oracle(placement, shape, bank, cotangent):
    """Return ({name: [D, L, m, ...]} chunks in the slots, {name: [D Rb, ...]} sums at home rows), loop by loop."""
    rows, slots, sums = bank_rows(placement), {}, {}
    for name in bank:
        slots[name], sums[name] = np.zeros_like(cotangent[name]), np.zeros_like(bank[name])
        free = np.zeros((LAYERS, DEVICES), int)
        for layer, expert, device in placement.replicas.tolist():
            row = placement.home[layer, expert] * shape.bank_rows + rows[layer, expert]
            slot = free[layer, device]
            free[layer, device] += 1
            slots[name][device, layer, slot] = bank[name][row]
            sums[name][row] += cotangent[name][device, layer, slot]
    return slots, sums


@functools.cache
def make_functions(shape):
    """Return jitted (gather, gradient through gather, both in parts) over global arrays, layer after layer."""
    roles = build_mesh(MeshConfig(expert=DEVICES), jax.devices())
    where = shape.ahead, roles.expert
    spec = P(roles.expert)

    def of_layers(one):
        def body(*trees):
            trees = tuple(map(local, trees))
            return jax.tree.map(lambda *a: jnp.stack(a)[None], *[
                one(*jax.tree.map(lambda a, i=i: a[i], trees[1:]), trees[0]) for i in range(LAYERS)
            ])  # fmt: skip

        return jax.shard_map(body, mesh=roles.mesh, in_specs=spec, out_specs=spec)

    def in_parts(tables, cotangent, bank):
        slots = empty_replicas(bank, shape.ahead)
        sums = {name: jnp.zeros((shape.home_slots, *leaf.shape[1:])) for name, leaf in bank.items()}
        sums = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, roles.expert, to="varying"), sums)
        for part in CUTS:
            slots = fetch(bank, tables.home_row, tables.transfer, *where, part).at_once(slots)
            sums = return_part(cotangent, tables.transfer, *where, part).at_once(sums)
        return slots, sums

    opened = of_layers(lambda t, grad_sink, bank: open_replicas(bank, t.home_row, grad_sink, t.transfer, *where))

    def gather(bank, tables, grad_sink):
        return opened(bank, tables, grad_sink)[0]

    def gradient(bank, tables, grad_sink, cotangent):
        (replicas, _), pull = jax.vjp(lambda bank, grad_sink: opened(bank, tables, grad_sink), bank, grad_sink)
        return pull((jax.tree.map(jnp.zeros_like, replicas), cotangent))

    return jax.jit(gather), jax.jit(gradient), jax.jit(of_layers(in_parts))


def case_of(placement, by_node, **room):
    shape = build_shape(placement, by_node=by_node)
    shape = dataclasses.replace(shape, ahead=dataclasses.replace(shape.ahead, **room))
    rng = np.random.default_rng(7)
    bank = {n: rng.normal(size=(DEVICES * shape.bank_rows, *part)) for n, part in SHAPES.items()}
    cotangent = {n: rng.normal(size=(DEVICES, LAYERS, shape.ahead.slots, *part)) for n, part in SHAPES.items()}
    grad_sink = {n: np.zeros((DEVICES, LAYERS, shape.home_slots, *part)) for n, part in SHAPES.items()}
    return shape, bank, grad_sink, cotangent


def by_bank_row(sums, home_row, rows):
    """[D, L, Hs, ...] -> [D Rb, ...]: each home slot's sum at its bank row."""
    out = np.zeros((DEVICES * rows, *sums.shape[3:]))
    for device, layer, slot in np.ndindex(home_row.shape):
        row = home_row[device, layer, slot]
        if row < rows:
            out[device * rows + row] += sums[device, layer, slot]
        else:
            assert not sums[device, layer, slot].any()
    return out


@pytest.mark.parametrize(
    "per_node,by_node,kind",
    [(8, False, "exact"), (8, False, "room"), (2, True, "room"), (4, True, "exact"), (4, True, "no crossing")],
)
def test_random_plans_equal_the_oracle(per_node, by_node, kind):
    """In the shape of the plan or with more offers than it needs; and all replicas on the nodes of their homes."""
    placement = random_placement(
        len(kind), layers=LAYERS, experts=EXPERTS, devices=DEVICES, replica_slots=SLOTS, per_node=per_node, fewest=1
    )
    if kind == "no crossing":
        layer, expert, device = placement.replicas.T
        placement = placement.replace(replicas=placement.replicas[placement.home[layer, expert] // 4 == device // 4])
    shape, bank, grad_sink, cotangent = case_of(placement, by_node, **({"offers": 5} if kind == "room" else {}))
    assert kind != "no crossing" or shape.ahead.crossing == 0
    tables = fill_tables(shape, placement)
    with jax.enable_x64(True):
        gather, gradient, in_parts = make_functions(shape)
        stacked = {n: a.reshape(DEVICES, shape.bank_rows, *a.shape[1:]) for n, a in bank.items()}
        replicas = gather(stacked, tables, grad_sink)
        d_bank, d_grad_sink = gradient(stacked, tables, grad_sink, cotangent)
        slots_in_parts, sums_in_parts = in_parts(stacked, tables, cotangent)
    want, want_sums = oracle(placement, shape, bank, cotangent)
    for name in SHAPES:
        for got in (replicas, slots_in_parts):
            np.testing.assert_array_equal(got[name], want[name])  # chunks, not sums
        for got in (d_grad_sink, sums_in_parts):
            got = by_bank_row(np.asarray(got[name]), tables.home_row, shape.bank_rows)
            np.testing.assert_allclose(got, want_sums[name], rtol=1e-12, atol=1e-12)
        assert not np.any(d_bank[name])


@pytest.mark.parametrize("per_node,by_node", FORMS)
def test_bytes_of_the_program_equal_the_formula(per_node, by_node):
    placement = random_placement(
        0, layers=LAYERS, experts=EXPERTS, devices=DEVICES, replica_slots=SLOTS, per_node=per_node
    )
    shape, bank, grad_sink, cotangent = case_of(placement, by_node)
    tables = fill_tables(shape, placement)
    with jax.enable_x64(True):
        gather, gradient, _ = make_functions(shape)
        stacked = {n: a.reshape(DEVICES, shape.bank_rows, *a.shape[1:]) for n, a in bank.items()}
        there = gather.lower(stacked, tables, grad_sink).as_text()
        back = gradient.lower(stacked, tables, grad_sink, cotangent).as_text()
    padded = 24  # elements of a chunk, 23 padded to whole slices
    sizes = shape.ahead  # chunks in the operand of each exchange, own blocks included
    chunks = sizes.offers + sizes.slots + (sizes.nodes * sizes.crossing / sizes.inside if sizes.crosses else 0)
    one_way = LAYERS * 8 * padded * chunks
    assert collective_bytes(there) == collective_bytes(back) == one_way


def collective_bytes(text):
    """Return the operands' bytes of all collectives, which must all be all-to-alls."""
    assert not re.search(r"stablehlo\.(collective_permute|all_gather|reduce_scatter|all_reduce)", text)
    sizes = re.findall(r'"?stablehlo\.all_to_all"?.*?: \(tensor<([0-9x]+)xf64>\)', text, re.DOTALL)
    return 8 * sum(int(np.prod([int(d) for d in dims.split("x")])) for dims in sizes)
