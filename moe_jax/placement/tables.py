"""A placement split into what a compiled step is built for (skeleton) and what it reads as input (tables).

Inputs: a Placement. Outputs: a hashable `Skeleton` (sizes, transfer method, rounds) and `Tables` of arrays. A placement
that fits the skeleton of a running step changes only the tables. Nothing here runs a transfer; README.md draws the
shapes.

Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np

from moe_jax.errors import UserError
from moe_jax.placement import rounds as rounds_lib
from moe_jax.placement.bank import bank_rows, most_homes, numbered
from moe_jax.placement.placement import Placement
from moe_jax.placement.routing import SHARE_BITS, choose_slices

METHODS = ("none", "shift", "permute", "gather", "broadcast")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skeleton:
    """Hold all that decides the shape of a compiled step; equal skeletons share one executable.

    Attributes:
      method: how replicas get their parameters. `permute`: exact pairs, one list of rounds per layer. `shift`: rounds
        i -> i + s (mod D) shared by all layers. `gather`: each device offers X rows to all. `broadcast`: Y experts go
        to all.
      rounds: (src, dst) pairs by [layer or shared][round]; empty unless `permute` or `shift`.
      bucket_rows: rows of one (source, destination) bucket of tokens.
    """

    layers: int
    experts: int
    devices: int
    devices_per_node: int
    home_slots: int
    replica_slots: int
    bank_rows: int
    candidates: int
    method: str = "shift"
    rounds: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = ()
    gather_slots: int = 0
    broadcast_slots: int = 0
    bucket_rows: int = 0

    @property
    def slots(self) -> int:
        """Slots of one device in one layer: home slots first, then replica slots."""
        return self.home_slots + self.replica_slots

    @property
    def round_count(self) -> int:
        """T: the most rounds that a layer has."""
        return max((len(layer) for layer in self.rounds), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """Hold the arrays of one plan; shapes follow from the skeleton alone. -1 pads, and only there.

    Attributes:
      slot_to_expert: int32 [L, D, Hs + Gs], the expert in each slot.
      home_row: int32 [L, D, Hs], the bank row (of this device) behind each home slot.
      dest_slot: int32 [L, D, E, Q], candidate slots of source d's tokens for an expert, as device * (Hs + Gs) + slot.
      dest_num: uint32 [L, D, E, Q], dest_den: uint32 [L, D, E]: token i of n goes to the first q with
        dest_num * n // dest_den > i. Pads repeat dest_num = dest_den, so they are never the first.
      send_row: int32 [L, T, D], the bank row that device d sends in round t (-1: nothing of use).
      recv_slot: int32 [L, T, D], the replica slot that d fills in round t (Gs: drop it).
      gather_row: int32 [L, D, X], bank rows that a device offers to all.
      broadcast_row: int32 [L, Y], rows of the whole bank (device * Rb + row).
      replica_from: int32 [L, D, Gs], where a replica comes from: an index into [D * X] or [Y].
    """

    slot_to_expert: np.ndarray
    home_row: np.ndarray
    dest_slot: np.ndarray
    dest_num: np.ndarray
    dest_den: np.ndarray
    send_row: np.ndarray
    recv_slot: np.ndarray
    gather_row: np.ndarray
    broadcast_row: np.ndarray
    replica_from: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Where each expert and each replica lies: home slot [L, E], bank row [L, E], replica slot of each replica [n]."""

    home_slot: np.ndarray
    bank_row: np.ndarray
    replica_slot: np.ndarray


def bucket_rows(largest_pair: float, error: float = 0.0, multiple: int = 1) -> int:
    """Return rows of a bucket: the predicted largest pair times (1 + error), rounded up to 8 and to `multiple`."""
    step = int(np.lcm(8, multiple))
    return step * max(1, int(np.ceil(largest_pair * (1.0 + error) / step)))


def build_skeleton(
    placement: Placement,
    *,
    method: str = "shift",
    replica_slots: int | None = None,
    home_slots: int | None = None,
    candidates: int | None = None,
    rows: int | None = None,
    bucket: int = 0,
) -> Skeleton:
    """Return the smallest skeleton that this placement fits, or a larger one where a size is given."""
    if method not in METHODS:
        raise UserError(f"transfer method {method!r} is not one of {', '.join(METHODS)}")
    if len(placement.replicas) and method == "none":
        raise UserError(
            f"transfer method 'none' cannot bring the placement's {len(placement.replicas)} replicas; use 'shift'"
        )
    layer, expert, dst = placement.replicas.T
    src = placement.home[layer, expert]
    pairs: tuple = ()
    gather = broadcast = 0
    if method == "shift" and len(layer):
        pairs = (_shift_pairs(rounds_lib.shift_rounds(layer, src, dst, placement.devices)[0]),)
    elif method == "permute" and len(layer):
        pairs = _permute_pairs(layer, src, dst, placement)
    elif method in ("gather", "broadcast"):
        gather, broadcast = _offered(placement)
    return Skeleton(
        layers=placement.layers,
        experts=placement.experts,
        devices=placement.devices,
        devices_per_node=placement.devices_per_node,
        home_slots=_at_least("home_slots", home_slots, _most_homes_in_layer(placement)),
        replica_slots=_at_least("replica_slots", replica_slots, _most_replicas(placement)),
        bank_rows=_at_least("bank_rows", rows, most_homes(placement)),
        candidates=_at_least("candidates", candidates, _most_candidates(placement)),
        method=method,
        rounds=pairs,
        gather_slots=gather if method == "gather" else 0,
        broadcast_slots=broadcast if method == "broadcast" else 0,
        bucket_rows=bucket,
    )


def fits(skeleton: Skeleton, placement: Placement) -> bool:
    """Say whether `fill_tables` would succeed, so that a new plan needs no new executable."""
    sizes = (placement.layers, placement.experts, placement.devices, placement.devices_per_node)
    if sizes != (skeleton.layers, skeleton.experts, skeleton.devices, skeleton.devices_per_node):
        return False
    if (
        _most_homes_in_layer(placement) > skeleton.home_slots
        or _most_replicas(placement) > skeleton.replica_slots
        or most_homes(placement) > skeleton.bank_rows
        or _most_candidates(placement) > skeleton.candidates
    ):
        return False
    if not len(placement.replicas):
        return True
    if skeleton.method in ("gather", "broadcast"):
        gather, broadcast = _offered(placement)
        return gather <= skeleton.gather_slots if skeleton.method == "gather" else broadcast <= skeleton.broadcast_slots
    return _assign_rounds(skeleton, placement) is not None


def fill_tables(skeleton: Skeleton, placement: Placement) -> Tables:
    """Write a placement into arrays of the skeleton's shapes.

    Raises:
      UserError: the placement does not fit (`fits` says so beforehand).
    """
    if not fits(skeleton, placement):
        raise UserError(
            f"the placement needs home slots {_most_homes_in_layer(placement)}, replica slots "
            f"{_most_replicas(placement)}, bank rows {most_homes(placement)}, candidates {_most_candidates(placement)} "
            f"and its own rounds, but the {skeleton.method!r} skeleton has {skeleton.home_slots}, "
            f"{skeleton.replica_slots}, {skeleton.bank_rows}, {skeleton.candidates} and {skeleton.round_count} rounds; "
            "build a new skeleton"
        )
    slots = _lay_out(placement)
    layers, devices = skeleton.layers, skeleton.devices
    layer, expert, device = placement.replicas.T
    slot_to_expert = np.full((layers, devices, skeleton.slots), -1, np.int32)
    home_row = np.full((layers, devices, skeleton.home_slots), -1, np.int32)
    grid = np.indices(placement.home.shape)
    slot_to_expert[grid[0], placement.home, slots.home_slot] = grid[1]
    home_row[grid[0], placement.home, slots.home_slot] = slots.bank_row
    slot_to_expert[layer, device, skeleton.home_slots + slots.replica_slot] = expert
    return Tables(
        slot_to_expert=slot_to_expert,
        home_row=home_row,
        **_destinations(skeleton, placement, slots),
        **_transfers(skeleton, placement, slots),
    )


def widen(skeleton: Skeleton, placement: Placement) -> Skeleton:
    """Return a skeleton that this placement fits and, but for exact rounds, every plan that fitted the old one too."""
    need = build_skeleton(placement, method=skeleton.method)
    sizes = ("home_slots", "replica_slots", "bank_rows", "candidates", "gather_slots", "broadcast_slots")
    largest = {name: max(getattr(need, name), getattr(skeleton, name)) for name in sizes}
    rounds = need.rounds or skeleton.rounds
    if skeleton.method == "shift" and need.rounds and skeleton.rounds:
        both = [Counter(skeleton.rounds[0]), Counter(need.rounds[0])]
        rounds = (tuple(sorted((both[0] | both[1]).elements())),)
    return dataclasses.replace(skeleton, rounds=rounds, **largest)


def split(placement: Placement, skeleton: Skeleton | None = None, **sizes) -> tuple[Skeleton, Tables]:
    """Return (skeleton, tables); a given skeleton is kept when the placement fits it, else one is built."""
    if skeleton is None or not fits(skeleton, placement):
        skeleton = build_skeleton(placement, **sizes)
    return skeleton, fill_tables(skeleton, placement)


def _lay_out(placement: Placement) -> _Slots:
    layers, devices = placement.layers, placement.devices
    key = np.arange(layers)[:, None] * devices + placement.home
    home_slot = numbered(key.ravel()).reshape(placement.home.shape)
    replicas = placement.replicas
    return _Slots(home_slot, bank_rows(placement), numbered(replicas[:, 0] * devices + replicas[:, 2]))


def _destinations(skeleton: Skeleton, placement: Placement, slots: _Slots) -> dict[str, np.ndarray]:
    """Fill dest_slot, dest_num, dest_den from the same slices that count tokens on the host."""
    layers, devices, experts, q = skeleton.layers, skeleton.devices, skeleton.experts, skeleton.candidates
    slot_of = np.full((layers, experts, devices), -1, np.int32)
    grid = np.indices(placement.home.shape)
    slot_of[grid[0], grid[1], placement.home] = slots.home_slot
    slot_of[tuple(placement.replicas.T)] = skeleton.home_slots + slots.replica_slot
    layer, source, expert = (part.ravel() for part in np.indices((layers, devices, experts)))
    kind, start, count, device = choose_slices(placement, layer, source, expert)
    lists = placement.candidates
    dest = np.repeat(device[:, None].astype(np.int64), q, axis=1)
    den = np.where(kind == 2, 1 << SHARE_BITS, np.where(kind == 1, count, 1)).astype(np.uint32)
    num = np.repeat(den[:, None], q, axis=1)
    many = np.flatnonzero(kind > 0)
    row = np.repeat(many, count[many])
    j = rounds_lib.within_group(row)
    even = kind[row] == 1
    at = np.where(
        even, start[row] + (j + source[row] % np.maximum(count[row], 1)) % np.maximum(count[row], 1), start[row] + j
    )
    dest[row[even], j[even]] = lists.holder[at[even]]
    num[row[even], j[even]] = j[even] + 1
    dest[row[~even], j[~even]] = lists.share_device[at[~even]]
    num[row[~even], j[~even]] = lists.share_num[at[~even]]
    slot = slot_of[layer[:, None], expert[:, None], dest]
    shape = (layers, devices, experts, q)
    return {
        "dest_slot": (dest * skeleton.slots + slot).astype(np.int32).reshape(shape),
        "dest_num": num.reshape(shape),
        "dest_den": den.reshape(shape[:3]),
    }


def _transfers(skeleton: Skeleton, placement: Placement, slots: _Slots) -> dict[str, np.ndarray]:
    layers, devices, replicas = skeleton.layers, skeleton.devices, skeleton.replica_slots
    layer, expert, dst = placement.replicas.T
    src, row = placement.home[layer, expert], slots.bank_row[layer, expert]
    send_row = np.full((layers, skeleton.round_count, devices), -1, np.int32)
    recv_slot = np.full((layers, skeleton.round_count, devices), replicas, np.int32)
    gather_row = np.full((layers, devices, skeleton.gather_slots), -1, np.int32)
    broadcast_row = np.full((layers, skeleton.broadcast_slots), -1, np.int32)
    replica_from = np.full((layers, devices, replicas), -1, np.int32)
    if skeleton.method in ("shift", "permute") and len(layer):
        turn = _assign_rounds(skeleton, placement)
        send_row[layer, turn, src] = row
        recv_slot[layer, turn, dst] = slots.replica_slot
    elif skeleton.method in ("gather", "broadcast") and len(layer):
        replicated = np.unique(layer.astype(np.int64) * skeleton.experts + expert)
        at_layer, at_expert = np.divmod(replicated, skeleton.experts)
        owner = placement.home[at_layer, at_expert]
        rows = slots.bank_row[at_layer, at_expert]
        place = np.full((layers, skeleton.experts), -1, np.int32)
        if skeleton.method == "gather":
            offer = numbered(at_layer * devices + owner)
            gather_row[at_layer, owner, offer] = rows
            place[at_layer, at_expert] = owner * skeleton.gather_slots + offer
        else:
            offer = numbered(at_layer)
            broadcast_row[at_layer, offer] = owner * skeleton.bank_rows + rows
            place[at_layer, at_expert] = offer
        replica_from[layer, dst, slots.replica_slot] = place[layer, expert]
    return {
        "send_row": send_row,
        "recv_slot": recv_slot,
        "gather_row": gather_row,
        "broadcast_row": broadcast_row,
        "replica_from": replica_from,
    }


def _assign_rounds(skeleton: Skeleton, placement: Placement) -> np.ndarray | None:
    """Return the round of each replica [n], or None where the skeleton's rounds cannot carry them."""
    layer, expert, dst = placement.replicas.T
    src = placement.home[layer, expert]
    devices = skeleton.devices
    if skeleton.method == "shift":
        need, nth = rounds_lib.shift_rounds(layer, src, dst, devices)
        have = np.zeros(devices, np.int64)
        first = np.zeros(devices, np.int64)
        for turn, pairs in enumerate(skeleton.rounds[0] if skeleton.rounds else ()):
            shift = (pairs[0][1] - pairs[0][0]) % devices
            first[shift] = turn if not have[shift] else first[shift]
            have[shift] += 1
        return None if (need > have).any() else first[(dst - src) % devices] + nth
    if skeleton.method != "permute" or not skeleton.rounds:
        return None
    turn = np.full(len(layer), -1, np.int64)
    for at in range(skeleton.layers):
        free: dict[tuple[int, int], list[int]] = {}
        for index, pairs in enumerate(skeleton.rounds[at]):
            for pair in pairs:
                free.setdefault(pair, []).append(index)
        for i in np.flatnonzero(layer == at).tolist():
            turns = free.get((int(src[i]), int(dst[i])))
            if not turns:
                return None
            turn[i] = turns.pop(0)
    return turn


def _shift_pairs(need: np.ndarray) -> tuple[tuple[tuple[int, int], ...], ...]:
    devices = len(need)
    return tuple(
        tuple((i, (i + shift) % devices) for i in range(devices))
        for shift in np.flatnonzero(need).tolist()
        for _ in range(int(need[shift]))
    )


def _permute_pairs(layer: np.ndarray, src: np.ndarray, dst: np.ndarray, placement: Placement):
    by_layer = []
    for at in range(placement.layers):
        mine = layer == at
        colour = rounds_lib.colour_edges(src[mine], dst[mine], placement.devices)
        lists: list[list[tuple[int, int]]] = [[] for _ in range(int(colour.max(initial=-1)) + 1)]
        for c, a, b in zip(colour.tolist(), src[mine].tolist(), dst[mine].tolist(), strict=True):
            lists[c].append((a, b))
        by_layer.append(tuple(tuple(pairs) for pairs in lists))
    return tuple(by_layer)


def _offered(placement: Placement) -> tuple[int, int]:
    """Return (most replicated experts homed on one device in one layer, most replicated experts in one layer)."""
    replicated = np.zeros(placement.home.shape, bool)
    replicated[tuple(placement.replicas[:, :2].T)] = True
    key = (np.arange(placement.layers)[:, None] * placement.devices + placement.home)[replicated]
    return int(np.bincount(key, minlength=1).max()), int(replicated.sum(axis=1).max())


def _most_homes_in_layer(placement: Placement) -> int:
    return int(np.bincount((np.arange(placement.layers)[:, None] * placement.devices + placement.home).ravel()).max())


def _most_replicas(placement: Placement) -> int:
    replicas = placement.replicas
    return int(np.bincount(replicas[:, 0] * placement.devices + replicas[:, 2], minlength=1).max())


def _most_candidates(placement: Placement) -> int:
    """Return Q: the length of the longest list of candidates of any source."""
    lists = placement.candidates
    nearest = np.array([name != "home" for name in placement.rule])[:, None]
    lacks_node = (lists.node_count == 0).any(axis=2)
    inside = np.where(lists.node_count == placement.devices_per_node, 1, lists.node_count).max(axis=2)
    even = np.where(nearest, np.maximum(inside, np.where(lacks_node, lists.count, 1)), 1)
    return int(max(even.max(), lists.share_count.max(initial=0)))


def _at_least(name: str, given: int | None, needed: int) -> int:
    if given is not None and given < needed:
        raise UserError(
            f"{name} ({given}) is less than the {needed} that the placement needs; raise it or replicate less"
        )
    return needed if given is None else given
