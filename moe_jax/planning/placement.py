"""Which device holds which expert, for all layers at once; its row in the bank; and sizes of transfers of replicas.

How many tokens go where is counted in `routing.py`. A transfer after the gate runs in one of several sizes
(`TransferShape.halves`): a step has one branch for each and one for nothing, and planners price their choices by the
same list.
Letters: docs/notation.md; n replica rows, m share rows, h holder rows; `...` stands for any leading dims, such as L.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

from moe_jax.errors import UserError
from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning.arrays import loop, put

RULES = ("nearest", "home", "shares")
SHARE_ONE = 1 << 16
SIZES = ("offers", "slots", "crossing")
_NOT_GIVEN: Any = None  # fields typed as what they are once checked


class TransferSizes(NamedTuple):
    """Sizes that single layers need, int [...] each."""

    offers: int | np.ndarray  # X, the most experts of one device that travel
    slots: int | np.ndarray  # m, the most replicas that one device gets
    crossing: int | np.ndarray  # Cp, the most experts that one node sends one other
    # devices that hold a travelling expert, home included, summed over those experts (s (D - n) in Pro-Prophet's
    # equation 4); only the papers' price reads it
    holders: int | np.ndarray = 0

    def largest(self) -> TransferSizes:
        """Return the sizes that serve all layers."""
        return TransferSizes(*(int(np.max(size, initial=0)) for size in self))

    def shape(self, devices: int, devices_per_node: int, by_node: bool) -> TransferShape:
        """Return the smallest shape that serves all layers."""
        most, group = self.largest(), {"devices": devices, "devices_per_node": devices_per_node}
        crossing = most.crossing if by_node else 0
        return TransferShape(**group, offers=most.offers, slots=most.slots, by_node=by_node, crossing=crossing)


class Candidates(NamedTuple):
    """Who the tokens of a node may go to, for each expert a slice of one row table: its shares, else its holders.

    Holders are those on the node, or all where it has none.
    """

    device: np.ndarray  # int32 [h + m], of holders by rising (layer, expert, device), then of share rows
    upto: np.ndarray  # int64 [h + m], running sums of shares within a slice; 0 for holders
    start: np.ndarray  # int32 [L, E, Nn], of the slice
    count: np.ndarray  # int32 [L, E, Nn]
    shared: np.ndarray  # bool [L, E, Nn], the slice is of share rows
    most: int  # Q, the longest list between which the tokens of one source choose


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Hold homes, replicas and the token rule of every layer.

    Raises:
      UserError: an id that does not exist, a replica listed twice or on its home, or wrong shares.
    """

    home: np.ndarray  # int [L, E], the device that owns parameters and optimizer state of an expert: exactly one
    replicas: np.ndarray = _NOT_GIVEN  # int [n, 3], rows (layer, expert, device): who else holds it during a step
    # int [m, 5], rows (layer, expert, device, share, source node). Shares are in units of 2^-16 and sum to 2^16 for
    # each (layer, expert, source node). A row with source node -1 counts for every node without rows of its own.
    shares: np.ndarray = _NOT_GIVEN
    rule: str | tuple[str, ...] = "nearest"  # of RULES, for all layers or one per layer
    devices: int = _NOT_GIVEN  # D; taken from the largest device id when not given
    devices_per_node: int = _NOT_GIVEN  # devices that share a node, by rising id; all of them when not given
    program: str = ""  # 'SCHEDULE/SLOTS' of the compiled step that the plan is for (`auto.py`), '' for any

    def __post_init__(self):
        home = np.array(self.home, np.int32)
        tables = []
        for table, width in ((self.replicas, 3), (self.shares, 5)):
            given = table is not None and len(table)
            tables.append(np.array(table, np.int32) if given else np.zeros((0, width), np.int32))
        replicas, shares = tables
        largest = max(home.max(initial=0), replicas[:, 2].max(initial=0))
        devices = int(largest) + 1 if self.devices is None else int(self.devices)
        fields = {
            "home": home,
            "replicas": replicas[np.lexsort(replicas.T[::-1])],
            "shares": shares[np.lexsort(shares[:, [2, 4, 1, 0]].T)],
            "rule": (self.rule,) * len(home) if isinstance(self.rule, str) else tuple(self.rule),
            "devices": devices,
            "devices_per_node": devices if self.devices_per_node is None else int(self.devices_per_node),
        }
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            object.__setattr__(self, name, value)
        self._check()

    @classmethod
    def even(cls, layers: int, experts: int, devices: int, devices_per_node: int | None = None, **fields) -> Placement:
        """Home expert e of every layer on device floor(e D / E): plain expert parallelism.

        A device has floor or ceil(E / D) of them, one after the other; a node with Dn devices floor or ceil(E Dn / D).
        """
        if min(layers, experts, devices) < 1:
            raise UserError(f"layers ({layers}), experts ({experts}) and devices ({devices}) must be at least 1 each")
        home = np.broadcast_to(np.arange(experts, dtype=np.int32) * devices // experts, (layers, experts))
        per_node = devices if devices_per_node is None else devices_per_node
        return cls(home.copy(), devices=devices, devices_per_node=per_node, **fields)

    @property
    def layers(self) -> int:
        """L."""
        return self.home.shape[0]

    @property
    def experts(self) -> int:
        """E, of one layer."""
        return self.home.shape[1]

    @property
    def nodes(self) -> int:
        """Groups of `devices_per_node` devices."""
        return self.devices // self.devices_per_node

    def replace(self, **fields) -> Placement:
        """Return this placement with some fields changed, checked again."""
        return dataclasses.replace(self, **fields)

    def moves(self, other: Placement) -> bool:
        """Say whether an expert's home is not its home in the other."""
        return bool((self.home != other.home).any())

    def bare(self) -> Placement:
        """Return the homes alone."""
        return self.replace(replicas=None, shares=None, rule="nearest")

    @functools.cached_property
    def share_keys(self) -> np.ndarray:
        """int64 [m], rising: the place of each share row among (layer, expert, source node, device)."""
        layer, expert, device, _, node = self.shares.T.astype(np.int64)
        return ((layer * self.experts + expert) * (self.nodes + 1) + node + 1) * self.devices + device

    @functools.cached_property
    def homes(self) -> np.ndarray:
        """bool [L, E, D]: the device is the expert's home."""
        homes = self.home[:, :, None] == np.arange(self.devices)
        homes.setflags(write=False)
        return homes

    @functools.cached_property
    def holds(self) -> np.ndarray:
        """bool [L, E, D]: the device has the expert's parameters during a step, as home or as replica."""
        holds = self.homes.copy()
        holds[tuple(self.replicas.T)] = True
        holds.setflags(write=False)
        return holds

    @functools.cached_property
    def replicated(self) -> np.ndarray:
        """bool [L, E]: the expert has replicas."""
        return self.holds.sum(axis=2) > 1

    @functools.cached_property
    def candidates(self) -> Candidates:
        """The holders between which a token may choose, as slices of sorted rows."""
        sizes = self.layers, self.experts, self.nodes
        holder = np.nonzero(self.holds.reshape(-1, self.devices))[1]
        on_node = self.holds.reshape(*sizes, -1).sum(axis=3, dtype=np.int32)
        everywhere = on_node.sum(axis=2, keepdims=True, dtype=np.int32)
        start = np.where(on_node > 0, _starts(on_node), _starts(everywhere))
        count = np.where(on_node > 0, on_node, everywhere)
        # Where the whole node holds an expert nobody on it has a choice.
        choices = np.where(on_node == self.devices_per_node, 1, count)[[name != "home" for name in self.rule]]
        most, shared, upto = choices.max(initial=1), np.zeros(sizes, bool), np.zeros(len(holder), np.int64)
        if len(self.shares):
            # (layer, expert, 0 for the rows of nodes without their own, else 1 + node)
            key, share = self.share_keys // self.devices, self.shares[:, 3].astype(np.int64)
            of_key = np.bincount(key, minlength=math.prod(sizes[:2]) * (self.nodes + 1)).astype(np.int32)
            of_key = of_key.reshape(*sizes[:2], -1)
            starts, own = _starts(of_key), of_key[:, :, 1:] > 0
            running = share.cumsum()
            running -= (running - share)[starts.ravel()[key]]
            share_start, share_count = (np.where(own, part[:, :, 1:], part[:, :, :1]) for part in (starts, of_key))
            shared, most = share_count > 0, max(most, share_count.max())
            start, count = np.where(shared, len(holder) + share_start, start), np.where(shared, share_count, count)
            holder, upto = np.concatenate([holder, self.shares[:, 2]]), np.concatenate([upto, running])
        return Candidates(holder.astype(np.int32), upto, start, count, shared, int(most))

    @functools.cached_property
    def sizes(self) -> TransferSizes:
        """Of the transfer that its replicas need, [L] each."""
        return transfer_sizes(self.homes, self.holds & ~self.homes, self.devices_per_node)

    def fingerprint(self) -> str:
        """Hash everything that decides numbers or bytes, so that processes can compare their plans."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.home, self.replicas, self.shares):
            digest.update(repr(array.shape).encode() + np.ascontiguousarray(array, np.int32).tobytes())
        digest.update((repr((self.rule, self.devices, self.devices_per_node)) + self.program).encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.fingerprint() == other.fingerprint()

    def _check(self) -> None:
        """Refuse what is wrong with the arrays; of several things the first."""
        home, devices, per_node, layers = self.home, self.devices, self.devices_per_node, self.layers
        if devices < 1 or per_node < 1 or devices % per_node:
            raise UserError(f"devices ({devices}) must be a positive multiple of devices_per_node ({per_node})")
        if len(self.rule) != layers or not set(self.rule) <= set(RULES):
            raise UserError(f"rule {self.rule} must be one of {', '.join(RULES)}, or {layers} of them, one per layer")

        def refuse(wrong, rows, rule: str) -> None:
            for layer, expert, device in rows[wrong][:1, :3]:
                raise UserError(f"layer {layer}, expert {expert}, device {device}: {rule}")

        homes = np.concatenate([np.indices(home.shape), home[None]]).reshape(3, -1).T
        tables = {"home": homes, "replica": self.replicas, "share": self.shares}
        for name, rows in tables.items():
            most = (layers, self.experts, devices)
            outside = ((rows[:, :3] < 0) | (rows[:, :3] >= most)).any(axis=1)
            refuse(outside, rows, f"{name} outside {most[0]} layers, {most[1]} experts, {most[2]} devices")
        replicas, shares = self.replicas, self.shares
        refuse(
            home[tuple(replicas[:, :2].T)] == replicas[:, 2], replicas, "a replica on its own home would home it twice"
        )
        repeated = (replicas[1:] == replicas[:-1]).all(axis=1)  # rows are sorted
        refuse(repeated, replicas[1:], "replica listed twice; a device holds an expert once")
        if not len(shares):
            return
        layer, expert, device, share, node = shares.T
        refuse(np.array(self.rule)[layer] != "shares", shares, "share rows in a layer whose rule is not 'shares'")
        outside = (node < -1) | (node >= self.nodes) | (share < 0) | (share > SHARE_ONE)
        refuse(outside, shares, f"share outside 0..{SHARE_ONE}, or source node outside 0..{self.nodes - 1} (-1: every)")
        refuse(~self.holds[layer, expert, device], shares, "share for a device that does not hold the expert")
        refuse(np.diff(self.share_keys) == 0, shares[1:], "share listed twice; add the two rows")
        start = np.flatnonzero(np.diff(self.share_keys // devices, prepend=-1))
        wrong = np.add.reduceat(share.astype(np.int64), start) != SHARE_ONE
        refuse(start[wrong], shares, f"shares of a source node must sum to {SHARE_ONE}, units of 2^-16")


def _starts(count: np.ndarray) -> np.ndarray:
    """Return where each run begins: the sum of all counts before, int32."""
    start = count.cumsum(dtype=np.int32).reshape(count.shape)
    start -= count
    return start


def bank_rows(placement: Placement) -> np.ndarray:
    """Number the experts homed on each device by (layer, expert): int32 [L, E], rows within the device's bank."""
    return numbered(placement.home.ravel()).reshape(placement.home.shape)


def numbered(key: np.ndarray) -> np.ndarray:
    """Number entries within their group in order of appearance: int [n] -> int32 [n]."""
    order = np.argsort(key, kind="stable")
    rank = np.empty(len(key), np.int32)
    rank[order] = within_group(key[order])
    return rank


def within_group(key: np.ndarray) -> np.ndarray:
    """Number the entries of each group: key int [n], sorted -> rank within the run of equal keys, int64 [n]."""
    if not len(key):
        return np.zeros(0, np.int64)
    index = np.arange(len(key))
    first = np.r_[True, key[1:] != key[:-1]]
    return index - np.maximum.accumulate(np.where(first, index, 0))


def sent_of(homes: np.ndarray, away: np.ndarray, inside: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what a transfer sends: (offers of each device [L, D], crossing of node pairs [L, Nn, Nn], slots [L, D]).

    An expert counts once for its home's device, and once for each other node with a replica.

    Args:
      homes, away: bool [L, E, D], where experts are at home, and their replicas.
      inside: devices of a node, or of the only level of a flat transfer.
    """
    offered = homes & away.any(axis=2)[:, :, None]
    source, to = (of.reshape(*of.shape[:2], -1, inside).any(axis=3) for of in (offered, away))
    crossing = source.swapaxes(1, 2).astype(np.float32) @ (to & ~source).astype(np.float32)
    return offered.sum(axis=1), crossing.astype(int), away.sum(axis=1)


def transfer_sizes(homes: np.ndarray, away: np.ndarray, inside: int) -> TransferSizes:
    """Return the sizes [L] of a transfer; arguments as of `sent_of`."""
    offers, crossing, slots = sent_of(homes, away, inside)
    holders = offers.sum(axis=1) + slots.sum(axis=1)
    return TransferSizes(offers.max(axis=1), slots.max(axis=1), crossing.max(axis=(1, 2)), holders)


def sent_with(xp, sent, home, targets, inside: int):
    """Return what a transfer sends with one more expert in each layer, which has no replicas yet.

    Args:
      xp: NumPy, where `sent` is spent, or jax.numpy.
      sent: so far, int, as `sent_of` returns it.
      home: int [L]; targets: bool [L, D], its replicas, the home not among them; none for no expert.
      inside: devices of a node, or of the only level of a flat transfer.
    """
    (offers, crossing, slots), rows, node = sent, xp.arange(len(home)), home // inside
    other = xp.arange(crossing.shape[1])[None] != node[:, None]
    to = targets.reshape(*crossing.shape[:2], inside).any(axis=2) & other
    offers = put(offers, (rows, home), offers[rows, home] + targets.any(axis=1))
    return offers, put(crossing, (rows, node), crossing[rows, node] + to), slots + targets


def fit_replicas(xp, wanted, order, home, shape: TransferShape):
    """Take experts in order while their replicas fit a transfer; each is taken whole or not at all.

    Args:
      xp: NumPy or jax.numpy.
      wanted: bool [L, E, D], replicas; order: int [L, Et], experts that may have some, each once.
      home: int [L, E]; shape: the sizes.

    Returns:
      (bool [L, E, D], the replicas that fit; where each expert stands among the offers of its home [L, E], among what
      its node sends every other [L, E, Nn], and in the slots of every device [L, E, D]; the sizes in use).
    """
    layers, experts, devices = wanted.shape
    nodes, rows = shape.nodes, xp.arange(layers)

    def take(turn, carry):
        (offers, crossing, slots), added, *places = carry
        expert = order[:, turn]
        mine, at = wanted[rows, expert], home[rows, expert]
        node = at // shape.inside
        to = mine.reshape(layers, nodes, -1).any(axis=2) & (xp.arange(nodes)[None] != node[:, None])
        before = offers[rows, at], crossing[rows, node], slots
        full = (mine & (slots >= shape.slots)).any(axis=1) | (to & (before[1] >= shape.crossing)).any(axis=1)
        fit = mine & ((before[0] < shape.offers) & ~full)[:, None]
        places = [put(place, (rows, expert), of) for place, of in zip(places, before, strict=True)]
        return sent_with(xp, (offers, crossing, slots), at, fit, shape.inside), put(added, (rows, expert), fit), *places

    zeros = lambda *dims: xp.zeros((layers, *dims), xp.int32)  # noqa: E731
    used = zeros(devices), zeros(nodes, nodes), zeros(devices)
    places = zeros(experts), zeros(experts, nodes), zeros(experts, devices)
    start = used, xp.zeros(wanted.shape, bool), *places
    (offers, crossing, slots), added, *places = loop(xp, take, start, order.shape[1])
    return added, tuple(places), TransferSizes(offers.max(axis=1), slots.max(axis=1), crossing.max(axis=(1, 2)))


def late_size(needed: TransferSizes, shape: TransferShape, xp=np):
    """Return the size that holds a need [...]: 0 for nothing, i for the i-th (from 1) of `TransferShape.halves`.

    What no size holds gets the last.
    """
    sizes = shape.halves()
    misses = sum(1 - late_room(needed, size) for size in sizes)
    return xp.where(needed.slots > 0, xp.minimum(misses, len(sizes) - 1) + 1, 0)


def late_room(needed: TransferSizes, shape: TransferShape):
    """Say whether a need [...] fits a size: -> bool [...]."""
    return (needed.offers <= shape.offers) & (needed.slots <= shape.slots) & (needed.crossing <= shape.crossing)


def late_price(needed: TransferSizes, shape: TransferShape | None, seconds: tuple[float, ...], each, xp=np):
    """Return the seconds [...] of a late transfer and its way back: of its size, or `each` [...] where none is priced.

    Args:
      seconds: of each size, 0 for none first; () where they have no price.
    """
    return xp.asarray(seconds)[late_size(needed, shape, xp)] if seconds else each
