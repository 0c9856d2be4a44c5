"""Tables read back by a slow interpreter: slots, token rule, transfers and bank permutations; shapes and what fits."""

import dataclasses

import numpy as np
import pytest
from support.placements import random_placement

from moe_jax.errors import UserError
from moe_jax.planning import routing
from moe_jax.planning.placement import Placement, bank_rows, reshard_permutation
from moe_jax.planning.plan_shape import build_shape, fill_tables, fits, grow, misfits, table_shapes

SIZES = {"layers": 3, "experts": 8, "devices": 8, "replica_slots": 3, "per_node": 4}
FORMS = [False, True]


def offered(shape, tables, layer, place, level):
    """Return (device, home slot) of a place among a level's offers."""
    member, nth = divmod(place, shape.ahead.offers)
    device = level * shape.ahead.inside + member
    return device, tables.transfer.offer[device, layer, nth]


def arriving(shape, tables, layer, device, slot):
    """Return (device, home slot) of the chunk in a replica slot; None for none."""
    sizes, level = shape.ahead, device // shape.ahead.inside
    place = tables.transfer.want[device, layer, device % sizes.inside, slot]
    if place >= sizes.places:
        return None
    if place < sizes.inside * sizes.offers:
        return offered(shape, tables, layer, place, level)
    source, turn = divmod(place - sizes.inside * sizes.offers, sizes.crossing)
    return offered(shape, tables, layer, tables.transfer.pick[source * sizes.inside, layer, level, turn], source)


def run_tables(shape, tables, bank):
    """Move rows as an executor would: bank [D, Rb] of expert names -> slots [D, L, G] of names."""
    slots = np.full((shape.devices, shape.layers, shape.slots), -1)
    for device, layer in np.ndindex(slots.shape[:2]):
        for slot, row in enumerate(tables.home_row[device, layer]):
            slots[device, layer, slot] = bank[device, row] if row < shape.bank_rows else -1
    for device, layer in np.ndindex(slots.shape[:2]):
        for slot in range(shape.ahead_slots):
            if found := arriving(shape, tables, layer, device, slot):
                owner, home_slot = found
                slots[device, layer, shape.home_slots + slot] = slots[owner, layer, home_slot]
    return slots


def name_bank(placement, rows):
    bank = np.full((placement.devices, rows), -1)
    layer, expert = np.indices(placement.home.shape)
    bank[placement.home, bank_rows(placement)] = layer * placement.experts + expert
    return bank


def assert_brings_every_expert(shape, placement):
    tables = fill_tables(shape, placement)
    slots = run_tables(shape, tables, name_bank(placement, shape.bank_rows))
    layer = np.arange(placement.layers)[None, :, None]
    named = np.where(tables.slot_expert >= 0, tables.slot_expert + layer * placement.experts, -1)
    np.testing.assert_array_equal(slots, named)
    held = np.zeros_like(placement.holds)
    device, layer, slot = np.nonzero(tables.slot_expert >= 0)
    held[layer, tables.slot_expert[device, layer, slot], device] = True
    np.testing.assert_array_equal(held, placement.holds)
    for table in (tables.transfer.want, tables.transfer.pick):  # the devices of a level read the same
        if table is not None:
            by_level = table.reshape(-1, shape.ahead.inside, *table.shape[1:])
            np.testing.assert_array_equal(by_level, np.broadcast_to(by_level[:, :1], by_level.shape))


@pytest.mark.parametrize("by_node", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_tables_bring_every_expert_to_its_slots(by_node, seed):
    placement = random_placement(seed, **SIZES)
    assert_brings_every_expert(build_shape(placement, by_node=by_node), placement)


@pytest.mark.parametrize("by_node", FORMS)
def test_a_grown_shape_serves_old_and_new_plans(by_node):
    """Slots, offers and crossings beyond what a plan needs change where things lie, and nothing that arrives."""
    first, second = (random_placement(seed, **SIZES) for seed in (0, 1))
    shape = grow(build_shape(first, by_node=by_node), second, replica_slots=4)
    assert fits(shape, first) and fits(shape, second) and isinstance(hash(shape), int)
    assert grow(shape, first) == shape
    for placement in (first, second):
        assert_brings_every_expert(shape, placement)
    for old, new in zip(_leaves(fill_tables(shape, first)), _leaves(table_shapes(shape)), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)


def _leaves(tables):
    fields = [getattr(tables, field.name) for field in dataclasses.fields(tables) if field.name != "transfer"]
    return [*fields, tables.transfer.offer, tables.transfer.want]


def test_a_first_transfer_gets_room_and_never_more_offers_than_homes():
    """3 replicas of one expert, from an even shape of one home a device and layer: X = 1, and Cp = 1 + 1."""
    plain = Placement.even(1, 8, 8, 4)
    far = plain.replace(replicas=[(0, 0, 4), (0, 0, 5), (0, 0, 6)])
    need = build_shape(far, by_node=True).ahead
    assert (need.offers, need.slots, need.crossing) == (1, 1, 1)
    grown = grow(build_shape(plain), far, by_node=True, replica_slots=2).ahead
    assert (grown.offers, grown.slots, grown.crossing) == (1, 2, 2)
    assert build_shape(plain).ahead is None and grow(build_shape(plain), plain) == build_shape(plain)


def test_what_does_not_fit_is_named():
    first = random_placement(0, **SIZES)
    plain = build_shape(Placement.even(3, 8, 8, 4))
    assert any(text.startswith("offers: ") and text.endswith("> 0") for text in misfits(plain, first))
    with pytest.raises(UserError, match=r"does not fit the shape of the step \(home_slots: .* build a new shape"):
        fill_tables(plain, first)
    shape = build_shape(first, by_node=True)
    for name in ("offers", "slots", "crossing"):
        small = dataclasses.replace(shape.ahead, **{name: getattr(shape.ahead, name) - 1})
        size = getattr(shape.ahead, name)
        assert misfits(dataclasses.replace(shape, ahead=small), first) == [f"{name}: {size} > {size - 1}"]
    assert misfits(shape, Placement.even(2, 8, 8, 4)) == ["layers: 2 is not 3"]


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
    shape = build_shape(placement)
    tables = fill_tables(shape, placement)
    loads = rng.integers(0, 40, (3, 8, 8))
    counts = np.zeros((*loads.shape, 8), int)
    for layer, source, expert in np.ndindex(loads.shape):
        n = loads[layer, source, expert].astype(np.uint32)
        for i in range(n):
            limit = tables.dest_num[source, layer, expert] * n // tables.dest_den[source, layer, expert]
            slot = tables.dest_slot[source, layer, expert, int(np.argmax(limit > i))]
            device, slot = divmod(int(slot), shape.slots)
            assert tables.slot_expert[device, layer, slot] == expert
            counts[layer, source, expert, device] += 1
    np.testing.assert_array_equal(counts, routing.destinations(placement, loads))


def test_reshard_permutation_moves_every_expert_to_its_new_row():
    old, new = random_placement(0, **SIZES), random_placement(5, **SIZES)
    source = reshard_permutation(old, new, rows=4)
    np.testing.assert_array_equal(np.sort(source), np.arange(8 * 4))
    moved = name_bank(old, 4).ravel()[source]
    np.testing.assert_array_equal(moved, name_bank(new, 4).ravel())
