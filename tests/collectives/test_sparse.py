"""Sparse collectives on 8 devices against loops over (chunk, device) pairs, in float64 to 1e-12, and their bytes.

P0 has every chunk once (its home), P1 adds replicas. Chunks are rows of two arrays, so that a chunk travels whole.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.placements import random_placement

from moe_jax.collectives.sparse_all_gather import sparse_all_gather, sparse_reduce_scatter
from moe_jax.collectives.transfer_plan import TransferPlan
from moe_jax.mesh import MeshConfig, build_mesh
from moe_jax.placement import Placement, bank_rows, build_skeleton, fill_tables
from moe_jax.placement.transfer import operand_bytes, transfer_bytes
from moe_jax.replan.device_tables import device_tables, layer_plan

DEVICES, LAYERS, EXPERTS, SLOTS = 8, 2, 16, 3
SHAPES = {"w_in": (3, 2), "w_out": (2, 5)}  # 16 elements of a chunk
METHODS = ("permute", "shift", "gather", "broadcast")


def oracle_gather(bank, placement, tables, skeleton):
    """{name: [D, L, Gs, ...]}: the chunk in each replica slot."""
    rows, out = bank_rows(placement), {}
    for name, leaf in bank.items():
        out[name] = np.zeros((DEVICES, LAYERS, skeleton.replica_slots, *leaf.shape[1:]))
        for layer, device, slot in np.ndindex(LAYERS, DEVICES, skeleton.replica_slots):
            expert = tables.slot_to_expert[layer, device, skeleton.home_slots + slot]
            if expert >= 0:
                row = placement.home[layer, expert] * skeleton.bank_rows + rows[layer, expert]
                out[name][device, layer, slot] = leaf[row]
    return out


def oracle_reduce(replicas, placement, tables, skeleton):
    """{name: [D Rb, ...]}: at each chunk's home row the sum over its replicas."""
    rows, out = bank_rows(placement), {}
    for name, leaf in replicas.items():
        out[name] = np.zeros((DEVICES * skeleton.bank_rows, *leaf.shape[3:]))
        for layer, device, slot in np.ndindex(LAYERS, DEVICES, skeleton.replica_slots):
            expert = tables.slot_to_expert[layer, device, skeleton.home_slots + slot]
            if expert >= 0:
                row = placement.home[layer, expert] * skeleton.bank_rows + rows[layer, expert]
                out[name][row] += leaf[device, layer, slot]
    return out


@functools.cache
def make_functions(skeleton):
    """Return jitted (gather, gradient through gather, reduce) over global arrays, layer after layer."""
    roles = build_mesh(MeshConfig(expert=DEVICES), jax.devices())
    plan = layer_plan(skeleton, roles.expert).transfer
    spec = P(roles.expert)

    def of_layers(one):
        def body(*trees):
            trees = jax.tree.map(lambda a: a[0], trees)
            return jax.tree.map(lambda *a: jnp.stack(a)[None], *[
                one(*jax.tree.map(lambda a, i=i: a[i], trees[1:]), trees[0]) for i in range(LAYERS)
            ])  # fmt: skip

        return jax.shard_map(body, mesh=roles.mesh, in_specs=spec, out_specs=spec)

    gather = of_layers(lambda t, grad_sink, bank: sparse_all_gather(bank, t.home_row, grad_sink, t.transfer, plan))
    reduce = of_layers(lambda t, replicas, _: sparse_reduce_scatter(replicas, t.transfer, plan))

    def gradient(bank, tables, grad_sink, cotangent):
        return jax.vjp(lambda bank, grad_sink: gather(bank, tables, grad_sink), bank, grad_sink)[1](cotangent)

    return jax.jit(gather), jax.jit(gradient), jax.jit(reduce)


def case_of(seed, method):
    placement = random_placement(seed, layers=LAYERS, experts=EXPERTS, devices=DEVICES, replica_slots=SLOTS)
    skeleton = build_skeleton(placement, method=method, home_slots=EXPERTS // 2, replica_slots=SLOTS)
    rng = np.random.default_rng(seed + 100)
    bank = {n: rng.normal(size=(DEVICES * skeleton.bank_rows, *shape)) for n, shape in SHAPES.items()}
    cotangent = {n: rng.normal(size=(DEVICES, LAYERS, SLOTS, *shape)) for n, shape in SHAPES.items()}
    grad_sink = {n: np.zeros((DEVICES, LAYERS, skeleton.home_slots, *shape)) for n, shape in SHAPES.items()}
    return placement, skeleton, bank, grad_sink, cotangent


def by_bank_row(sums, tables, skeleton):
    """[D, L, Hs, ...] -> [D Rb, ...]: each home slot's sum at its bank row."""
    out = np.zeros((DEVICES * skeleton.bank_rows, *sums.shape[3:]))
    for layer, device, slot in np.ndindex(LAYERS, DEVICES, skeleton.home_slots):
        row = tables.home_row[layer, device, slot]
        if row >= 0:
            out[device * skeleton.bank_rows + row] += sums[device, layer, slot]
        else:
            assert not sums[device, layer, slot].any()
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_equal_the_oracle(method, seed):
    placement, skeleton, bank, grad_sink, cotangent = case_of(seed, method)
    tables = fill_tables(skeleton, placement)
    arrays = device_tables(skeleton, placement)
    with jax.enable_x64(True):
        gather, gradient, reduce = make_functions(skeleton)
        stacked = {n: a.reshape(DEVICES, skeleton.bank_rows, *a.shape[1:]) for n, a in bank.items()}
        replicas = gather(stacked, arrays, grad_sink)
        d_bank, d_grad_sink = gradient(stacked, arrays, grad_sink, cotangent)
        sums = reduce(stacked, arrays, cotangent)
    want = oracle_gather(bank, placement, tables, skeleton)
    want_sums = oracle_reduce(cotangent, placement, tables, skeleton)
    for name in SHAPES:
        np.testing.assert_allclose(replicas[name], want[name], rtol=0, atol=0)  # replicas, not sums
        for got in (d_grad_sink, sums):
            got = by_bank_row(np.asarray(got[name]), tables, skeleton)
            np.testing.assert_allclose(got, want_sums[name], rtol=1e-12, atol=1e-12)
        assert not np.any(d_bank[name])


@pytest.mark.parametrize("method", METHODS)
def test_bytes_of_the_program_equal_the_formula(method):
    placement, skeleton, bank, grad_sink, cotangent = case_of(0, method)
    arrays = device_tables(skeleton, placement)
    with jax.enable_x64(True):
        gather, _, reduce = make_functions(skeleton)
        stacked = {n: a.reshape(DEVICES, skeleton.bank_rows, *a.shape[1:]) for n, a in bank.items()}
        texts = gather.lower(stacked, arrays, grad_sink).as_text(), reduce.lower(stacked, arrays, cotangent).as_text()
    chunk = 8 * sum(np.prod(shape) for shape in SHAPES.values())
    for text, is_reduce in zip(texts, (False, True), strict=True):
        # `permute` has a branch for each layer's rounds, all of them in the text of each layer's call
        times = LAYERS if method == "permute" else 1
        want: dict[str, float] = {}
        for layer in range(LAYERS):
            for name, size in operand_bytes(skeleton, chunk, layer, is_reduce).items():
                want[name] = want.get(name, 0) + times * size
        assert collective_bytes(text) == want


def collective_bytes(text):
    found: dict[str, float] = {}
    pattern = r'"?stablehlo\.(collective_permute|all_gather|reduce_scatter|all_reduce)"?.*?: \(tensor<([0-9x]+)xf64>\)'
    for name, dims in re.findall(pattern, text, re.DOTALL):
        found[name] = found.get(name, 0) + 8 * np.prod([int(d) for d in dims.split("x")])
    return found


def test_wire_bytes_by_hand():
    """One chunk from device 0 to the 7 others: 7 rounds; or offered to all; or summed over all."""
    placement = Placement(np.zeros((1, 8), int), [(0, 5, d) for d in range(1, 8)], devices=8)
    wire = {m: transfer_bytes(build_skeleton(placement, method=m), 1000) for m in METHODS}
    assert wire == {"permute": 7000, "shift": 7000, "gather": 7000, "broadcast": 1750}


def test_a_round_that_names_a_device_twice_is_refused():
    with pytest.raises(ValueError, match="names a device twice"):
        TransferPlan(method="shift", home_slots=1, replica_slots=1, axes=("expert",), rounds=((((0, 1), (0, 2)),),))
