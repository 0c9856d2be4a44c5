"""Shapes and what fits; tables read back one by one; sizes of transfers as a loop counts them."""

import dataclasses

import numpy as np
import pytest
from support.placements import random_placement

from moe_jax.errors import UserError
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape, fill_tables, fits, grow, misfits, table_shapes
from moe_jax.planning.sizes import RunningSizes, placement_sizes, sizes_everywhere, transfer_sizes

SIZES = {"layers": 3, "experts": 8, "devices": 8, "replica_slots": 3, "per_node": 4}


@pytest.mark.parametrize("by_node", [False, True])
def test_a_grown_shape_serves_old_and_new_plans(by_node):
    """Slots, offers and crossings beyond what a plan needs change where things lie, not who is where."""
    first, second = (random_placement(seed, **SIZES) for seed in (0, 1))
    shape = grow(build_shape(first, by_node=by_node), second, replica_slots=4)
    assert fits(shape, first) and fits(shape, second) and isinstance(hash(shape), int)
    assert grow(shape, first) == shape
    for placement in (first, second):
        tables, held = fill_tables(shape, placement), np.zeros_like(placement.holds)
        device, layer, slot = np.nonzero(tables.slot_expert >= 0)
        held[layer, tables.slot_expert[device, layer, slot], device] = True
        np.testing.assert_array_equal(held, placement.holds)
        for old, new in zip(_leaves(tables), _leaves(table_shapes(shape)), strict=True):
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


def counted(placement, layer):
    devices, per_node = placement.devices, placement.devices_per_node
    offers, pairs = [set() for _ in range(devices)], {}
    slots, holders = np.zeros(devices, int), 0
    for at, expert, device in placement.replicas:
        if at == layer:
            home = placement.home[layer, expert]
            offers[home].add(expert)
            slots[device] += 1
            if home // per_node != device // per_node:
                pairs.setdefault((home // per_node, device // per_node), set()).add(expert)
    holders = slots.sum() + sum(len(out) for out in offers)
    return max(map(len, offers)), slots.max(), max(map(len, pairs.values()), default=0), holders


@pytest.mark.parametrize("per_node", [1, 4, 8])
def test_sizes_equal_a_loops(per_node):
    placement = random_placement(3, layers=4, experts=16, devices=8, replica_slots=3, per_node=per_node)
    sizes = placement_sizes(placement)
    assert [tuple(int(size[at]) for size in sizes) for at in range(4)] == [counted(placement, at) for at in range(4)]
    # any leading dims: the layers twice, homes left out of the holders; and kept by a search
    away, running = placement.holds & ~placement.homes, RunningSizes(4, 8, per_node)
    for expert in range(16):
        running.add(placement.home[:, expert], away[:, expert])
    twice = transfer_sizes(placement.home, np.stack([away, away]), per_node)
    for one, two, three in zip(sizes, twice, running.sizes(), strict=True):
        assert (one == two).all() and (one == three).all()


def test_sizes_of_experts_that_go_everywhere():
    """Nodes of two: experts 0, 1 and 2, at home on devices 0, 0 and 1, on all four devices."""
    everywhere = np.zeros((1, 3, 4), bool)
    everywhere[:, :3] = True
    want = transfer_sizes(np.array([0, 0, 1]), everywhere, 2)
    assert [int(size[0]) for size in want] == [2, 3, 3, 12]
    assert want == sizes_everywhere(np.array([[2, 1, 0, 0]]), 2)
