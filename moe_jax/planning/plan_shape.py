"""What a compiled step depends on of a plan (`PlanShape`), and the arrays that it reads (`Tables`).

Equal shapes share an executable, and a plan that fits the shape of a running step changes only its tables. A shape
follows the plans of a run: larger where they need more (`grow`), so that few changes follow.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from moe_jax.errors import UserError
from moe_jax.parallel.static_sizes import BucketRows, TransferShape, TransferTables
from moe_jax.planning.placement import SIZES, Placement, TransferSizes, bank_rows, fit_replicas, numbered
from moe_jax.planning.routing import candidate_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanShape:
    """Hold all that decides the shape of a compiled step.

    Slots of a device in one layer are in the order: homes, replicas planned ahead, replicas that come late.
    """

    layers: int  # L
    experts: int  # E
    devices: int  # D
    devices_per_node: int  # Dn
    home_slots: int  # Hs
    bank_rows: int  # Rb
    candidates: int  # Q
    ahead: TransferShape | None = None  # the transfer of replicas that are planned ahead; None without any
    spare: TransferShape | None = dataclasses.field(default=None, compare=False)  # `ahead` of later plans with replicas
    late: TransferShape | None = None  # the largest transfer after the gate, into slots of its own; None without any
    after_gate: typing.Any = None  # what decides after the gate (`Planner.late_rule`); None: nothing is decided there
    bucket_rows: BucketRows | None = None  # as the plan predicts them; None: as without a plan (`moe/schedule.py`)
    # how much of Trans and of Agg runs next to attention, in eighths, where a block-wise schedule splits them
    trans_share: float = 0.5
    agg_share: float = 0.5
    program: str = ""  # as of the placements that it is for

    @property
    def schedule(self) -> str:
        """The schedule of the layers, '' for that of the config."""
        return self.program.partition("/")[0]

    @property
    def late_slots(self) -> int:
        """Replica slots that are filled after the gate."""
        return 0 if self.late is None else self.late.slots

    @property
    def replica_slots(self) -> int:
        """Gs, ahead and late; `PlannerConfig.replica_slots` counts those ahead."""
        return self.late_slots + (0 if self.ahead is None else self.ahead.slots)

    @property
    def slots(self) -> int:
        """G: slots of one device in one layer."""
        return self.home_slots + self.replica_slots


Shapes = dict[str, PlanShape]  # {segment: shape} of the segments with experts; an executable is for all of them


def build_shape(placement: Placement, *, by_node: bool = False) -> PlanShape:
    """Return the smallest shape that this placement fits; without replicas it has no transfer."""
    layers, devices, per_node = placement.layers, placement.devices, placement.devices_per_node
    return PlanShape(
        layers=layers,
        experts=placement.experts,
        devices=devices,
        devices_per_node=per_node,
        home_slots=int(np.bincount((np.arange(layers)[:, None] * devices + placement.home).ravel()).max()),
        bank_rows=int(np.bincount(placement.home.ravel()).max()),
        candidates=placement.candidates.most,
        ahead=placement.sizes.shape(devices, per_node, by_node) if len(placement.replicas) else None,
        program=placement.program,
    )


def misfits(shape: PlanShape, placement: Placement) -> list[str]:
    """Return what a placement needs more of than the shape has: 'NAME: needed > there' each.

    Without any `fill_tables` succeeds, and the plan needs no new executable.
    """
    found = [
        f"{name}: {getattr(placement, name)} is not {getattr(shape, name)}"
        for name in ("layers", "experts", "devices", "devices_per_node", "program")
        if getattr(placement, name) != getattr(shape, name)
    ]
    if found:
        return found
    need = build_shape(placement, by_node=shape.ahead is not None and shape.ahead.by_node)
    pairs = [(name, getattr(need, name), getattr(shape, name)) for name in ("home_slots", "bank_rows", "candidates")]
    if need.ahead is not None:
        pairs += [(name, getattr(need.ahead, name), getattr(shape.ahead, name, 0)) for name in SIZES]
    return [f"{name}: {needed} > {there}" for name, needed, there in pairs if needed > there]


def for_program(shape: PlanShape, placement: Placement) -> PlanShape:
    """Return the shape, reduced to its homes where the placement names another program."""
    if shape.program == placement.program:
        return shape
    return dataclasses.replace(shape, program=placement.program, ahead=None, spare=None, bucket_rows=None)


def grow(
    shape: PlanShape,
    placement: Placement,
    *,
    by_node: bool = False,
    replica_slots: int = 0,
    most: TransferSizes | None = None,
) -> PlanShape:
    """Return a shape that this placement fits and every plan that fitted the old one too.

    A transfer that has to change gets room for one more offer and one more crossing than this placement needs, so that
    few changes follow; a device never offers more than its homes, and no plan needs more than its planner's `most`.

    Args:
      by_node: form of the first transfer; a later one keeps it.
      replica_slots: mu, the slots that a transfer has at least.
      most: the sizes beyond which there is no need for room (`Planner.ahead_most`), None where none is known.
    """
    shape = for_program(shape, placement)
    old = shape.ahead
    plan = build_shape(placement, by_node=by_node if old is None else old.by_node)
    largest = {name: max(getattr(plan, name), getattr(shape, name)) for name in ("home_slots", "bank_rows")}
    if plan.candidates > shape.candidates:
        largest["candidates"] = min(shape.devices, 2 * plan.candidates)
    shape = dataclasses.replace(shape, **largest)
    need, there = plan.ahead, {name: getattr(old, name, -1) for name in SIZES}  # less than any need where there is none
    if need is None or all(getattr(need, name) <= size for name, size in there.items()):
        return shape
    offers, crossing = need.offers, need.crossing
    if offers > there["offers"]:
        offers = min(shape.home_slots, offers + 1)
    if need.by_node and crossing > there["crossing"]:
        crossing = min(need.devices_per_node * offers, crossing + 1)
    if most is not None:
        offers = max(need.offers, min(offers, int(most.offers)))
        crossing = max(need.crossing, min(crossing, int(most.crossing)))
    sizes = {"offers": offers, "slots": max(need.slots, replica_slots), "crossing": crossing}
    sizes = {name: max(size, there[name]) for name, size in sizes.items()}
    return dataclasses.replace(shape, ahead=dataclasses.replace(need, **sizes))


@dataclasses.dataclass(frozen=True)
class Tables:
    """Where experts compute. Stacked over layers they are a scan's input; without the L they serve one layer.

    Every array has a leading D, split over the expert axis; inside `shard_map` that is this device's 1.
    The i-th of n choices of an expert goes to the first candidate q with dest_num * n // dest_den > i.
    """

    dest_slot: typing.Any  # int32 [D, L, E, Q], candidates of source d's tokens for each expert, as device * G + group
    dest_num: typing.Any  # uint32 [D, L, E, Q], <= dest_den
    dest_den: typing.Any  # uint32 [D, L, E], <= 2^16
    home_row: typing.Any  # int32 [D, L, Hs], the bank row behind each home slot; one outside the bank: an empty slot
    slot_expert: typing.Any = None  # int32 [D, L, G], -1 for none; None in a layer that has no planner
    transfer: TransferTables | None = None  # of every layer, arrays [D, L, ...]; None where nothing is fetched ahead


def fill_tables(shape: PlanShape, placement: Placement) -> Tables:
    """Write a placement into arrays of the shape's sizes; a UserError where it does not fit (`misfits`)."""
    wrong = misfits(shape, placement)
    if wrong:
        raise UserError(f"the placement does not fit the shape of the step ({'; '.join(wrong)}); build a new shape")
    layers, devices, experts, q = shape.layers, shape.devices, shape.experts, shape.candidates
    grid, home, replicas = np.indices(placement.home.shape), placement.home, placement.replicas
    home_slot = numbered((grid[0] * devices + home).ravel()).reshape(home.shape)
    replica_slot = numbered(replicas[:, 0] * devices + replicas[:, 2])
    slot_expert = np.full((layers, devices, shape.slots), -1, np.int32)
    home_row = np.full((layers, devices, shape.home_slots), shape.bank_rows, np.int32)
    slot_of = np.full((layers, experts, devices), -1, np.int32)
    slot_expert[grid[0], home, home_slot] = grid[1]
    home_row[grid[0], home, home_slot] = bank_rows(placement)
    slot_of[grid[0], grid[1], home] = home_slot
    slot_expert[replicas[:, 0], replicas[:, 2], shape.home_slots + replica_slot] = replicas[:, 1]
    slot_of[tuple(replicas.T)] = shape.home_slots + replica_slot
    # Destinations, from the same candidates that count tokens on the host. Places beyond the last candidate, whose num
    # equals den, are never reached.
    at = [part.ravel() for part in np.indices((layers, devices, experts))]
    row, nth, device, num, den = candidate_rows(placement, *at)
    first = nth == 0
    dest_num = np.repeat(den[first][:, None].astype(np.uint32), q, axis=1)
    dest = np.repeat(device[first][:, None], q, axis=1)
    dest_num[row, nth], dest[row, nth] = num, device
    dest_slot = dest * shape.slots + slot_of[at[0][:, None], at[2][:, None], dest]
    sizes = (layers, devices, experts, q)
    return Tables(
        dest_slot=_by_device(dest_slot.reshape(sizes)),
        dest_num=_by_device(dest_num.reshape(sizes)),
        dest_den=_by_device(den[first].astype(np.uint32).reshape(sizes[:3])),
        home_row=_by_device(home_row),
        slot_expert=_by_device(slot_expert),
        transfer=None if shape.ahead is None else _transfer(shape, shape.ahead, placement, home_slot, replica_slot),
    )


def table_shapes(shape: PlanShape) -> Tables:
    """Return arrays with the shapes and dtypes of every plan of a shape: even homes and no replicas."""
    sizes = (shape.layers, shape.experts, shape.devices, shape.devices_per_node)
    return fill_tables(shape, Placement.even(*sizes, rule="home", program=shape.program))


def _transfer(
    shape: PlanShape, sizes: TransferShape, placement: Placement, home_slot: np.ndarray, replica_slot: np.ndarray
) -> TransferTables:
    """Say who offers which expert, which of a node's offers cross to which node, and where each slot's lies.

    `home_slot` int [L, E] is of each expert, `replica_slot` int [n] of each replica.
    """
    layers, devices, group, home = shape.layers, shape.devices, sizes.inside, placement.home
    layer, expert, device = placement.replicas.T
    away, order = placement.holds & ~placement.homes, np.broadcast_to(np.arange(shape.experts), home.shape)
    _, (nth, turn, _), _ = fit_replicas(np, away, order, home, sizes)
    offer = np.full((layers, devices, sizes.offers), shape.home_slots, np.int32)
    travels = np.nonzero(placement.replicated)
    offer[travels[0], home[travels], nth[travels]] = home_slot[travels]
    source, place = home // group, home % group * sizes.offers + nth  # the place is among its level's offers
    pick, lies = None, place[layer, expert]
    if sizes.by_node:
        pick = np.full((layers, sizes.nodes, sizes.nodes, sizes.crossing), group * sizes.offers, np.int32)
        target, at = device // group, (layer, expert)
        far = source[at] != target
        pick[layer[far], source[at][far], target[far], turn[layer, expert, target][far]] = lies[far]
        lies = np.where(far, group * sizes.offers + source[at] * sizes.crossing + turn[layer, expert, target], lies)
        pick = _by_device(np.repeat(pick, group, axis=1))
    want = np.full((layers, devices, sizes.slots), sizes.places, np.int32)
    want[layer, device, replica_slot] = lies
    want = want.reshape(layers, sizes.nodes, group, sizes.slots)
    return TransferTables(offer=_by_device(offer), pick=pick, want=_by_device(np.repeat(want, group, axis=1)))


def _by_device(array: np.ndarray) -> np.ndarray:
    """Return [D, L, ...] from [L, D, ...]: uint32 as it is, all else int32."""
    array = np.ascontiguousarray(np.swapaxes(array, 0, 1))
    return array if array.dtype == np.uint32 else array.astype(np.int32)
