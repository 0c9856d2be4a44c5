"""Tables read back by a slow interpreter: slots, token rule, transfers and bank permutations."""

import numpy as np
import pytest
from support.placements import random_placement

from moe_jax.errors import UserError
from moe_jax.placement import (
    Placement,
    bank_rows,
    bucket_rows,
    build_skeleton,
    fill_tables,
    fits,
    reshard_permutation,
    rounds,
    routing,
    split,
    widen,
)

SIZES = {"layers": 3, "experts": 8, "devices": 8, "replica_slots": 3, "per_node": 4}


def run_tables(skeleton, tables, bank):
    """Move rows as an executor would: bank [D, Rb] of expert names -> slots [L, D, Hs + Gs] of names."""
    layers, devices = skeleton.layers, skeleton.devices
    slots = np.full((layers, devices, skeleton.slots), -1)
    for layer, device in np.ndindex(layers, devices):
        for slot, row in enumerate(tables.home_row[layer, device]):
            slots[layer, device, slot] = bank[device, row] if row >= 0 else -1
    for layer in range(layers):
        shared = skeleton.rounds[0 if skeleton.method == "shift" else layer] if skeleton.rounds else ()
        for turn, pairs in enumerate(shared):
            assert len({a for a, _ in pairs}) == len(pairs) == len({b for _, b in pairs})
            for a, b in pairs:
                slot = tables.recv_slot[layer, turn, b]
                if slot < skeleton.replica_slots:
                    slots[layer, b, skeleton.home_slots + slot] = bank[a, tables.send_row[layer, turn, a]]
        for device, replica in np.ndindex(devices, skeleton.replica_slots):
            at = tables.replica_from[layer, device, replica]
            if at >= 0 and skeleton.method == "gather":
                owner, offer = divmod(at, skeleton.gather_slots)
                slots[layer, device, skeleton.home_slots + replica] = bank[
                    owner, tables.gather_row[layer, owner, offer]
                ]
            elif at >= 0:
                slots[layer, device, skeleton.home_slots + replica] = bank.ravel()[tables.broadcast_row[layer, at]]
    return slots


def name_bank(placement, rows):
    bank = np.full((placement.devices, rows), -1)
    layer, expert = np.indices(placement.home.shape)
    bank[placement.home, bank_rows(placement)] = layer * placement.experts + expert
    return bank


@pytest.mark.parametrize("method", ["shift", "permute", "gather", "broadcast"])
@pytest.mark.parametrize("seed", range(3))
def test_tables_bring_every_expert_to_its_slots(method, seed):
    placement = random_placement(seed, **SIZES)
    skeleton, tables = split(placement, method=method)
    slots = run_tables(skeleton, tables, name_bank(placement, skeleton.bank_rows))
    layer = np.arange(placement.layers)[:, None, None]
    named = np.where(tables.slot_to_expert >= 0, tables.slot_to_expert + layer * placement.experts, -1)
    np.testing.assert_array_equal(slots, named)
    held = np.zeros_like(placement.holds)
    at = np.nonzero(tables.slot_to_expert >= 0)
    held[at[0], tables.slot_to_expert[at], at[1]] = True
    np.testing.assert_array_equal(held, placement.holds)


@pytest.mark.parametrize("seed", range(4))
def test_destination_tables_repeat_the_host_rule(seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(seed, **SIZES)
    if seed % 2:
        expert, device = 5, int(placement.home[1, 5])
        other = (device + 1) % 8
        rest = [row for row in placement.replicas.tolist() if row != [1, expert, other]]
        shares = [(1, expert, device, 20000, 1), (1, expert, other, 45536, 1)]
        placement = placement.replace(
            replicas=[*rest, (1, expert, other)], shares=shares, rule=("nearest", "shares", "home")
        )
    skeleton, tables = split(placement)
    loads = rng.integers(0, 40, (3, 8, 8))
    counts = np.zeros((*loads.shape, 8), int)
    for layer, source, expert in np.ndindex(loads.shape):
        n = loads[layer, source, expert].astype(np.uint32)
        for i in range(n):
            limit = tables.dest_num[layer, source, expert] * n // tables.dest_den[layer, source, expert]
            slot = tables.dest_slot[layer, source, expert, int(np.argmax(limit > i))]
            device, slot = divmod(int(slot), skeleton.slots)
            assert tables.slot_to_expert[layer, device, slot] == expert
            counts[layer, source, expert, device] += 1
    np.testing.assert_array_equal(counts, routing.destinations(placement, loads))


def test_same_sizes_keep_the_skeleton_and_others_do_not_fit():
    first, second = random_placement(0, **SIZES), random_placement(1, **SIZES)
    skeleton = build_skeleton(first, method="gather", replica_slots=3, home_slots=8, candidates=4)
    larger = build_skeleton(second, method="gather", replica_slots=3, home_slots=8, candidates=4)
    assert fits(skeleton, first) and isinstance(hash(skeleton), int)
    assert skeleton == larger or not fits(skeleton, second) or skeleton.gather_slots >= larger.gather_slots
    plain = build_skeleton(Placement.even(3, 8, 8, 4), method="none")
    assert not fits(plain, first)
    with pytest.raises(UserError, match=r"the placement needs home slots .* build a new skeleton"):
        fill_tables(plain, first)


def test_sizes_below_the_need_are_refused():
    with pytest.raises(UserError, match=r"replica_slots \(1\) is less than the 3"):
        build_skeleton(random_placement(0, **SIZES), replica_slots=1)
    with pytest.raises(UserError, match="transfer method 'ring'"):
        build_skeleton(random_placement(0, **SIZES), method="ring")


@pytest.mark.parametrize("seed", range(20))
def test_colours_are_as_few_as_the_largest_degree(seed):
    rng = np.random.default_rng(seed)
    n, devices = int(rng.integers(1, 80)), 9
    src, dst = rng.integers(0, devices, n), rng.integers(0, devices, n)
    colour = rounds.colour_edges(src, dst, devices)
    degree = max(np.bincount(src).max(), np.bincount(dst).max())
    assert colour.max() + 1 == degree
    for c in range(degree):
        assert len(set(src[colour == c])) == (colour == c).sum() == len(set(dst[colour == c]))


def test_reshard_permutation_moves_every_expert_to_its_new_row():
    old, new = random_placement(0, **SIZES), random_placement(5, **SIZES)
    source = reshard_permutation(old, new, rows=4)
    np.testing.assert_array_equal(np.sort(source), np.arange(8 * 4))
    moved = name_bank(old, 4).ravel()[source]
    np.testing.assert_array_equal(moved, name_bank(new, 4).ravel())


def test_bucket_rows_round_up():
    # 100 x 1.1 = 110 -> 112 (a multiple of 8); with N_MP = 3 the step is 24 -> 120.
    assert bucket_rows(100, 0.1) == 112 and bucket_rows(100, 0.1, 3) == 120 and bucket_rows(0) == 8


@pytest.mark.parametrize("method", ["shift", "gather", "broadcast"])
def test_widened_skeleton_fits_old_and_new_plans(method):
    first, second = random_placement(0, **SIZES), random_placement(1, **SIZES)
    skeleton = widen(build_skeleton(first, method=method), second)
    assert fits(skeleton, first) and fits(skeleton, second)
    assert widen(skeleton, first) == skeleton
    named = run_tables(skeleton, fill_tables(skeleton, second), name_bank(second, skeleton.bank_rows))
    assert (named >= 0).sum() == second.holds.sum()
