"""A change of homes moves every bank leaf to the rows of the new placement, and nothing else; compared to the bit."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.placement import Placement, bank_rows
from moe_jax.storage.bank_order import move_tables, reshard

LAYERS, EXPERTS = 3, 8


def homes(seed, devices):
    home = np.random.default_rng(seed).permutation(np.repeat(np.arange(devices), LAYERS * EXPERTS // devices))
    return Placement(home.reshape(LAYERS, EXPERTS), devices=devices)


def bank_of(placement, rows, width):
    """Row of expert (l, e) holds its number and what follows; rows without an expert hold zeros."""
    bank = np.zeros((placement.devices * rows, 2, width), np.float32)
    at = (placement.home * rows + bank_rows(placement)).ravel()
    bank[at] = 1 + np.arange(LAYERS * EXPERTS * 2 * width).reshape(-1, 2, width)
    return bank


@pytest.mark.parametrize("devices,data,spare", [(8, 1, 0), (4, 2, 2), (2, 1, 0)])
def test_homes_move_there_and_back(devices, data, spare):
    roles = build_mesh(MeshConfig(expert=devices, data=data), jax.devices()[: devices * data])
    rows = LAYERS * EXPERTS // devices + spare
    placements = [Placement.even(LAYERS, EXPERTS, devices), homes(1, devices), homes(2, devices)]
    specs = {"params": P(roles.expert), "mu": P(roles.expert, None, roles.data)}

    def state_of(placement):
        bank = bank_of(placement, rows, 4)
        put = {n: jax.device_put(bank, NamedSharding(roles.mesh, spec)) for n, spec in specs.items()}
        dense = jax.device_put(np.arange(3.0), NamedSharding(roles.mesh, P()))
        bank, mu = ({"segment_0": {"w_in": put[name]}} for name in ("params", "mu"))
        return {"params": {"dense": dense, "bank": bank}, "opt": {"bank": mu}}

    state = state_of(placements[0])
    for old, new in [(0, 1), (1, 2), (2, 2), (2, 0)]:
        state = reshard(state, placements[old], placements[new], rows, "segment_0")
        want = state_of(placements[new])
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, want))
        assert [a.sharding for a in jax.tree.leaves(state)] == [a.sharding for a in jax.tree.leaves(want)]


def test_rounds_are_the_fullest_pair():
    """Device 0 keeps row 0 and gives rows 1, 2 to device 1, which gives its rows 0, 2 back: two rounds."""
    tables = move_tables(np.array([0, 3, 5, 1, 4, 2]), devices=2)
    assert tables["rounds"] == 2
    np.testing.assert_array_equal(tables["stay"], [[0, 3, 3], [3, 1, 3]])
    np.testing.assert_array_equal(tables["send"][0, :2, 1], [1, 2])
    np.testing.assert_array_equal(tables["place"][0, :2, 1], [1, 2])
