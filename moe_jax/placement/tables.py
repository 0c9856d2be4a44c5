"""A placement as the arrays that a step reads: where tokens of an expert go, and which replicas are fetched.

Inputs: a Placement and the `PlanShape` that a step is compiled for. Outputs: `Tables`, NumPy arrays in the devices'
order, written once. Nothing here runs a transfer; README.md draws the shapes.

Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from moe_jax.collectives.transfer_shape import TransferShape, TransferTables
from moe_jax.errors import UserError
from moe_jax.placement.bank import bank_rows, numbered, within_group
from moe_jax.placement.placement import Placement
from moe_jax.placement.plan_shape import PlanShape, misfits
from moe_jax.placement.routing import SHARE_BITS, choose_slices


@dataclasses.dataclass(frozen=True)
class Tables:
    """Where experts compute. Stacked over layers they are a scan's input; without the L they serve one layer.

    Every array has a leading D, split over the expert axis; inside `shard_map` that is this device's 1, and
    `dispatch.local` takes it off.

    Attributes:
      dest_slot: int32 [D, L, E, Q], candidates of source d's tokens for each expert, as device * G + group.
      dest_num: uint32 [D, L, E, Q], dest_den: uint32 [D, L, E]: the i-th of n choices of an expert goes to the first
        candidate q with dest_num * n // dest_den > i; dest_num <= dest_den <= 2^16.
      home_row: int32 [D, L, Hs], the bank row behind each home slot; a row outside the bank where the slot is empty.
      slot_expert: int32 [D, L, G], the expert in each slot, -1 for none; None where nothing is decided after the gate.
      transfer: `TransferTables` of every layer, arrays [D, L, ...]; None where nothing is fetched ahead.
    """

    dest_slot: typing.Any
    dest_num: typing.Any
    dest_den: typing.Any
    home_row: typing.Any
    slot_expert: typing.Any = None
    transfer: TransferTables | None = None


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Where each expert and each replica lies: home slot [L, E], bank row [L, E], replica slot of each replica [n]."""

    home_slot: np.ndarray
    bank_row: np.ndarray
    replica_slot: np.ndarray


def fill_tables(shape: PlanShape, placement: Placement) -> Tables:
    """Write a placement into arrays of the shape's sizes.

    Raises:
      UserError: the placement does not fit (`fits` says so beforehand).
    """
    wrong = misfits(shape, placement)
    if wrong:
        raise UserError(f"the placement does not fit the shape of the step ({'; '.join(wrong)}); build a new shape")
    slots = _lay_out(placement)
    layers, devices = shape.layers, shape.devices
    layer, expert, device = placement.replicas.T
    slot_expert = np.full((layers, devices, shape.slots), -1, np.int32)
    home_row = np.full((layers, devices, shape.home_slots), shape.bank_rows, np.int32)
    grid = np.indices(placement.home.shape)
    slot_expert[grid[0], placement.home, slots.home_slot] = grid[1]
    home_row[grid[0], placement.home, slots.home_slot] = slots.bank_row
    slot_expert[layer, device, shape.home_slots + slots.replica_slot] = expert
    return Tables(
        home_row=_by_device(home_row),
        slot_expert=_by_device(slot_expert),
        transfer=None if shape.ahead is None else _transfer(shape, shape.ahead, placement, slots),
        **_destinations(shape, placement, slots),
    )


def table_shapes(shape: PlanShape) -> Tables:
    """Return arrays with the shapes and dtypes of every plan of a shape: even homes and no replicas."""
    sizes = (shape.layers, shape.experts, shape.devices, shape.devices_per_node)
    return fill_tables(shape, Placement.even(*sizes, rule="home"))


def _lay_out(placement: Placement) -> _Slots:
    layers, devices = placement.layers, placement.devices
    key = np.arange(layers)[:, None] * devices + placement.home
    home_slot = numbered(key.ravel()).reshape(placement.home.shape)
    replicas = placement.replicas
    return _Slots(home_slot, bank_rows(placement), numbered(replicas[:, 0] * devices + replicas[:, 2]))


def _destinations(shape: PlanShape, placement: Placement, slots: _Slots) -> dict[str, np.ndarray]:
    """Fill dest_slot, dest_num, dest_den from the same slices that count tokens on the host."""
    layers, devices, experts, q = shape.layers, shape.devices, shape.experts, shape.candidates
    slot_of = np.full((layers, experts, devices), -1, np.int32)
    grid = np.indices(placement.home.shape)
    slot_of[grid[0], grid[1], placement.home] = slots.home_slot
    slot_of[tuple(placement.replicas.T)] = shape.home_slots + slots.replica_slot
    layer, source, expert = (part.ravel() for part in np.indices((layers, devices, experts)))
    kind, start, count, device = choose_slices(placement, layer, source, expert)
    lists = placement.candidates
    dest = np.repeat(device[:, None].astype(np.int64), q, axis=1)
    den = np.where(kind == 2, 1 << SHARE_BITS, np.where(kind == 1, count, 1)).astype(np.uint32)
    num = np.repeat(den[:, None], q, axis=1)
    many = np.flatnonzero(kind > 0)
    row = np.repeat(many, count[many])
    j = within_group(row)
    even = kind[row] == 1
    at = np.where(
        even, start[row] + (j + source[row] % np.maximum(count[row], 1)) % np.maximum(count[row], 1), start[row] + j
    )
    dest[row[even], j[even]] = lists.holder[at[even]]
    num[row[even], j[even]] = j[even] + 1
    dest[row[~even], j[~even]] = lists.share_device[at[~even]]
    num[row[~even], j[~even]] = lists.share_num[at[~even]]
    slot = slot_of[layer[:, None], expert[:, None], dest]
    sizes = (layers, devices, experts, q)
    return {
        "dest_slot": _by_device((dest * shape.slots + slot).reshape(sizes)),
        "dest_num": _by_device(num.reshape(sizes)),
        "dest_den": _by_device(den.reshape(sizes[:3])),
    }


def _transfer(shape: PlanShape, sizes: TransferShape, placement: Placement, slots: _Slots) -> TransferTables:
    """Say who offers which expert, which of a node's offers cross to which node, and where each slot's lies."""
    layers, devices, group = shape.layers, shape.devices, sizes.inside
    layer, expert, device = placement.replicas.T.astype(np.int64)
    travels = np.zeros(placement.home.shape, bool)
    travels[layer, expert] = True
    at_layer, at_expert = np.nonzero(travels)
    owner = placement.home[at_layer, at_expert]
    nth = numbered(at_layer * devices + owner)  # of the owner's offers
    offer = np.full((layers, devices, sizes.offers), shape.home_slots, np.int32)
    offer[at_layer, owner, nth] = slots.home_slot[at_layer, at_expert]
    place = np.full(placement.home.shape, -1, np.int64)  # among its level's offers
    place[at_layer, at_expert] = owner % group * sizes.offers + nth
    source, target = placement.home[layer, expert] // group, device // group
    lies = place[layer, expert]
    pick = None
    if sizes.by_node:
        pick = np.full((layers, sizes.nodes, sizes.nodes, sizes.crossing), group * sizes.offers, np.int32)
        far = source != target
        key = (layer * placement.experts + expert) * sizes.nodes + target
        crossings, of = np.unique(key[far], return_inverse=True)  # an expert crosses once to each node
        pair, to = np.divmod(crossings, sizes.nodes)
        la, ex = np.divmod(pair, placement.experts)
        come = placement.home[la, ex] // group
        turn = numbered((la * sizes.nodes + come) * sizes.nodes + to)
        pick[la, come, to, turn] = place[la, ex]
        lies = lies.copy()
        lies[far] = group * sizes.offers + source[far] * sizes.crossing + turn[of]
        pick = _by_device(np.repeat(pick, group, axis=1))
    want = np.full((layers, devices, sizes.slots), sizes.places, np.int32)
    want[layer, device, slots.replica_slot] = lies
    want = want.reshape(layers, sizes.nodes, group, sizes.slots)
    return TransferTables(offer=_by_device(offer), pick=pick, want=_by_device(np.repeat(want, group, axis=1)))


def _by_device(array: np.ndarray) -> np.ndarray:
    """Return [D, L, ...] from [L, D, ...]: uint32 as it is, all else int32."""
    array = np.ascontiguousarray(np.swapaxes(array, 0, 1))
    return array if array.dtype == np.uint32 else array.astype(np.int32)
