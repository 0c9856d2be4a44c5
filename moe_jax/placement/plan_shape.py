"""What a compiled step depends on of a plan: one static record, for the host and for the devices.

Inputs: a placement. Outputs: a hashable `PlanShape`; equal shapes share an executable, and a plan that fits the shape
of a running step changes only its tables. `fits` says whether it does, `build_shape` gives the smallest shape that it
fits, and `grow` one that holds it beside all plans before it.

Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np

from moe_jax.collectives.bucket_rows import BucketRows
from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.placement.bank import most_homes
from moe_jax.placement.placement import Placement
from moe_jax.placement.transfer_sizes import TransferSizes, transfer_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanShape:
    """Hold all that decides the shape of a compiled step.

    Attributes:
      layers, experts, devices, devices_per_node: L, E, D, Dn.
      home_slots, bank_rows, candidates: Hs, Rb, Q.
      ahead: the transfer of replicas that are planned ahead; None without any.
      late: the largest transfer after the gate, into slots of its own; None without any.
      after_gate: the rule that decides from the counts of the step (`after_gate/contract.py`); None without one.
      bucket_rows: rows of the buckets as the plan predicts them; None takes them from `MoEConfig.bucket_slack`.
      trans_share, agg_share: how much of Trans and of Agg runs beside attention, in eighths, where a block-wise
        schedule splits them.

    Slots of a device in one layer are in the order: homes, replicas planned ahead, replicas that come late.
    """

    layers: int
    experts: int
    devices: int
    devices_per_node: int
    home_slots: int
    bank_rows: int
    candidates: int
    ahead: TransferShape | None = None
    late: TransferShape | None = None
    after_gate: Hashable = None
    bucket_rows: BucketRows | None = None
    trans_share: float = 0.5
    agg_share: float = 0.5

    @property
    def ahead_slots(self) -> int:
        """Replica slots that are filled ahead."""
        return 0 if self.ahead is None else self.ahead.slots

    @property
    def late_slots(self) -> int:
        """Replica slots that are filled after the gate."""
        return 0 if self.late is None else self.late.slots

    @property
    def replica_slots(self) -> int:
        """Gs."""
        return self.ahead_slots + self.late_slots

    @property
    def slots(self) -> int:
        """G: slots of one device in one layer."""
        return self.home_slots + self.replica_slots


def build_shape(placement: Placement, *, by_node: bool = False) -> PlanShape:
    """Return the smallest shape that this placement fits; without replicas it has no transfer."""
    return PlanShape(
        layers=placement.layers,
        experts=placement.experts,
        devices=placement.devices,
        devices_per_node=placement.devices_per_node,
        home_slots=_most_homes_in_layer(placement),
        bank_rows=most_homes(placement),
        candidates=_most_candidates(placement),
        ahead=needed_transfer(placement, by_node=by_node),
    )


def needed_transfer(placement: Placement, *, by_node: bool = False) -> TransferShape | None:
    """Return the smallest transfer that brings all replicas of a placement; None without replicas."""
    if not len(placement.replicas):
        return None
    sizes = transfer_sizes(placement.home, placement.holds, placement.devices_per_node)
    return sizes.shape(placement.devices, placement.devices_per_node, by_node)


def fits(shape: PlanShape, placement: Placement) -> bool:
    """Say whether `fill_tables` would succeed, so that a new plan needs no new executable."""
    return not misfits(shape, placement)


def misfits(shape: PlanShape, placement: Placement) -> list[str]:
    """Return what a placement needs more of than the shape has: 'NAME: needed > there' each."""
    need = build_shape(placement, by_node=shape.ahead is not None and shape.ahead.by_node)
    same = ("layers", "experts", "devices", "devices_per_node")
    found = [
        f"{name}: {getattr(need, name)} is not {getattr(shape, name)}"
        for name in same
        if getattr(need, name) != getattr(shape, name)
    ]
    pairs = [(name, getattr(need, name), getattr(shape, name)) for name in ("home_slots", "bank_rows", "candidates")]
    if need.ahead is not None:
        for name in ("offers", "slots", "crossing"):
            pairs.append((name, getattr(need.ahead, name), 0 if shape.ahead is None else getattr(shape.ahead, name)))
    return found + [f"{name}: {needed} > {there}" for name, needed, there in pairs if needed > there]


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
      most: the sizes beyond which there is no need for room (`PlannerBase.ahead_most`), None where none is known.
    """
    by_node = shape.ahead.by_node if shape.ahead is not None else by_node
    need = build_shape(placement, by_node=by_node)
    names = ("home_slots", "bank_rows", "candidates")
    largest = {name: max(getattr(need, name), getattr(shape, name)) for name in names}
    if largest["candidates"] > shape.candidates:
        largest["candidates"] = min(shape.devices, 2 * largest["candidates"])
    ahead = _larger(shape.ahead, need.ahead, largest["home_slots"], replica_slots, most)
    return dataclasses.replace(shape, ahead=ahead, **largest)


def _larger(
    old: TransferShape | None,
    need: TransferShape | None,
    home_slots: int,
    replica_slots: int,
    most: TransferSizes | None,
) -> TransferShape | None:
    names = ("offers", "slots", "crossing")
    if need is None or (old is not None and all(getattr(need, name) <= getattr(old, name) for name in names)):
        return old
    offers = need.offers if old is not None and need.offers <= old.offers else min(home_slots, need.offers + 1)
    crossing = need.crossing
    if need.by_node and (old is None or need.crossing > old.crossing):
        crossing = min(need.devices_per_node * offers, need.crossing + 1)
    if most is not None:
        offers = max(need.offers, min(offers, int(most.offers)))
        crossing = max(need.crossing, min(crossing, int(most.crossing)))
    sizes = {"offers": offers, "slots": max(need.slots, replica_slots), "crossing": crossing}
    return dataclasses.replace(
        need, **{name: max(size, 0 if old is None else getattr(old, name)) for name, size in sizes.items()}
    )


def _most_homes_in_layer(placement: Placement) -> int:
    return int(np.bincount((np.arange(placement.layers)[:, None] * placement.devices + placement.home).ravel()).max())


def _most_candidates(placement: Placement) -> int:
    """Return Q: the length of the longest list of candidates of any source."""
    lists = placement.candidates
    nearest = np.array([name != "home" for name in placement.rule])[:, None]
    lacks_node = (lists.node_count == 0).any(axis=2)
    inside = np.where(lists.node_count == placement.devices_per_node, 1, lists.node_count).max(axis=2)
    even = np.where(nearest, np.maximum(inside, np.where(lacks_node, lists.count, 1)), 1)
    return int(max(even.max(), lists.share_count.max(initial=0)))
