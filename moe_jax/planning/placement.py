"""Which device holds which expert, for all layers at once, and where each expert lies in the bank of parameters.

A frozen, checked `Placement`: homes, the replicas held for one step, and the rule that sends a token to a holder. How
many tokens go where is counted in `routing.py`.

Letters: docs/notation.md; n replica rows, m share rows, h holder rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple

import numpy as np

from moe_jax.errors import UserError

RULES = ("nearest", "home", "shares")
SHARE_ONE = 1 << 16
_NOT_GIVEN: Any = None  # fields typed as what they are once checked


class Candidates(NamedTuple):
    """The holders that a token may choose between, as slices of two sorted row tables.

    Devices of a node have neighbouring ids, so in rows sorted by (layer, expert, device) the holders of an expert on
    one node are a slice too.

    Attributes:
      holder: int32 [h], devices by rising (layer, expert, device).
      start, count: int32 [L, E], the slice of all holders.
      node_start, node_count: int32 [L, E, Nn], the slice on one node.
      share_device: int32 [m], share_num: int64 [m], running sums of shares within a slice.
      share_start, share_count: int32 [L, E, Nn]; count 0 where no shares apply.
    """

    holder: np.ndarray
    start: np.ndarray
    count: np.ndarray
    node_start: np.ndarray
    node_count: np.ndarray
    share_device: np.ndarray
    share_num: np.ndarray
    share_start: np.ndarray
    share_count: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Hold homes, replicas and the token rule of every layer.

    Args:
      home: int [L, E], the device that owns parameters and optimizer state of an expert: exactly one.
      replicas: int [n, 3], rows (layer, expert, device): who else holds the parameters during a step.
      shares: int [m, 4] or [m, 5], rows (layer, expert, device, share[, source node]). Shares are in units of 2^-16 and
        sum to 2^16 for each (layer, expert, source node). Without a source node (or with -1) a row counts for every
        node that has no rows of its own for that expert.
      rule: one of `nearest`, `home`, `shares`, for all layers or one per layer.
      devices: D; taken from the largest device id, or from the loads, when not given.
      devices_per_node: devices that share a node, by rising id; all of them when not given.
      replica_slots: if given, the most replicas that one device may hold in one layer.

    Raises:
      UserError: an expert without a home or with two, a replica listed twice, too many replicas, or wrong shares.
    """

    home: np.ndarray
    replicas: np.ndarray = _NOT_GIVEN
    shares: np.ndarray = _NOT_GIVEN
    rule: str | tuple[str, ...] = "nearest"
    devices: int = _NOT_GIVEN
    devices_per_node: int = _NOT_GIVEN
    replica_slots: int | None = None
    _inferred: bool = dataclasses.field(init=False, repr=False, default=False)

    def __post_init__(self):
        home = np.asarray(self.home)
        if home.ndim != 2 or home.size == 0:
            raise UserError(f"home must have 2 dims and at least one entry, not shape {home.shape}")
        home, replicas = _whole("home", home), _rows("replicas", self.replicas, 3)
        shares = np.zeros((0, 5), np.int32) if self.shares is None else np.asarray(self.shares)
        if shares.ndim == 2 and shares.shape[1] == 4:
            shares = np.concatenate([shares, np.full((len(shares), 1), -1, shares.dtype)], axis=1)
        shares = _rows("shares", shares, 5)
        inferred = self.devices is None
        largest = max(home.max(initial=0), replicas[:, 2].max(initial=0))
        devices = int(largest) + 1 if inferred else int(self.devices)
        fields = {
            "home": home,
            "replicas": replicas[np.lexsort(replicas.T[::-1])],
            "shares": shares[np.lexsort(shares[:, [2, 4, 1, 0]].T)],
            "rule": (self.rule,) * home.shape[0] if isinstance(self.rule, str) else tuple(self.rule),
            "devices": devices,
            "devices_per_node": devices if self.devices_per_node is None else int(self.devices_per_node),
            "_inferred": inferred,
        }
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            object.__setattr__(self, name, value)
        self._check_homes()
        self._check_replicas()
        self._check_shares()

    @classmethod
    def even(cls, layers: int, experts: int, devices: int, devices_per_node: int | None = None, **fields) -> Placement:
        """Home experts d E/D ... (d+1) E/D - 1 of every layer on device d: plain expert parallelism."""
        if min(layers, experts, devices) < 1 or experts % devices:
            raise UserError(
                f"experts ({experts}) must be a positive multiple of devices ({devices}) and layers ({layers}) at "
                f"least 1; use a multiple of {max(devices, 1)} experts or fewer devices"
            )
        home = np.broadcast_to(np.arange(experts, dtype=np.int32) // (experts // devices), (layers, experts))
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
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        if self._inferred and "devices" not in fields:
            kept["devices"] = None
            kept["devices_per_node"] = None if self.nodes == 1 else self.devices_per_node
        return Placement(**{**kept, **fields})

    @functools.cached_property
    def homes(self) -> np.ndarray:
        """bool [L, E, D]: the device is the expert's home."""
        homes = self.home[:, :, None] == np.arange(self.devices)
        homes.setflags(write=False)
        return homes

    @functools.cached_property
    def holds(self) -> np.ndarray:
        """bool [L, E, D]: the device has the expert's parameters during a step, as home or as replica."""
        held = self.homes.copy()
        held[tuple(self.replicas.T)] = True
        held.setflags(write=False)
        return held

    @functools.cached_property
    def replicated(self) -> np.ndarray:
        """bool [L, E]: the expert has replicas."""
        found = np.zeros(self.home.shape, bool)
        found[tuple(self.replicas[:, :2].T)] = True
        return found

    @functools.cached_property
    def candidates(self) -> Candidates:
        """The holders a token may choose between, as slices of sorted rows."""
        layers, experts, nodes = self.layers, self.experts, self.nodes
        node_count = self.holds.reshape(layers, experts, nodes, -1).sum(axis=3, dtype=np.int32)
        count = node_count.sum(axis=2, dtype=np.int32)
        start, node_start = (
            (np.cumsum(part.ravel()) - part.ravel()).reshape(part.shape).astype(np.int32)
            for part in (count, node_count)
        )
        layer, expert, device, share, node = self.shares.T.astype(np.int64)
        key = (layer * experts + expert) * (nodes + 1) + node + 1  # column 0: rows for every node without its own
        key_count = np.bincount(key, minlength=layers * experts * (nodes + 1))
        key_start = np.cumsum(key_count) - key_count
        before = np.concatenate([[0], np.cumsum(share)])
        share_num = before[1:] - before[key_start[key]] if len(key) else np.zeros(0, np.int64)
        key_count, key_start = (part.reshape(layers, experts, nodes + 1) for part in (key_count, key_start))
        own = key_count[:, :, 1:] > 0
        share_start, share_count = (
            np.where(own, part[:, :, 1:], part[:, :, :1]).astype(np.int32) for part in (key_start, key_count)
        )
        holder = np.nonzero(self.holds)[2].astype(np.int32)
        of_shares = device.astype(np.int32), share_num, share_start, share_count
        return Candidates(holder, start, count, node_start, node_count, *of_shares)

    def fingerprint(self) -> str:
        """Hash everything that decides numbers or bytes, so that processes can compare their plans."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.home, self.replicas, self.shares):
            digest.update(repr(array.shape).encode() + np.ascontiguousarray(array, np.int32).tobytes())
        digest.update(repr((self.rule, self.devices, self.devices_per_node)).encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def matched(self, loads: np.ndarray) -> tuple[Placement, np.ndarray]:
        """Return (placement, loads int64 [L, S, E]), checked; where devices were inferred they grow to the sources.

        Raises:
          UserError: negative or fractional loads, or loads of another shape.
        """
        loads = np.asarray(loads)
        if loads.ndim != 3:
            raise UserError(f"loads must have dims [layers, sources, experts], not shape {loads.shape}")
        if loads.dtype.kind not in "iuf":
            raise UserError(f"loads must be whole numbers of tokens, not {loads.dtype}")
        wrong = loads < 0
        if loads.dtype.kind == "f":
            wrong |= ~np.isfinite(loads) | (loads != np.floor(loads))
        if wrong.any():
            layer, source, expert = np.argwhere(wrong)[0]
            raise UserError(
                f"layer {layer}, source {source}, expert {expert}: load {loads[layer, source, expert]} is not a whole "
                "number of tokens >= 0; loads count routed tokens"
            )
        placed, sources = self, loads.shape[1]
        if self._inferred and sources > self.devices:
            placed = self.replace(
                devices=sources, devices_per_node=sources if self.nodes == 1 else self.devices_per_node
            )
        if loads.shape != (placed.layers, placed.devices, placed.experts):
            raise UserError(
                f"loads have shape [layers, sources, experts] = {loads.shape}, but the placement has {placed.layers} "
                f"layers, {placed.devices} devices (a source is a device) and {placed.experts} experts; use loads of "
                "the same run"
            )
        return placed, loads.astype(np.int64)

    def _check_homes(self) -> None:
        """Check device and node counts, the name of every layer's rule, and that every home exists."""
        home, devices, per_node = self.home, self.devices, self.devices_per_node
        if devices < 1 or per_node < 1 or devices % per_node:
            raise UserError(f"devices ({devices}) must be a positive multiple of devices_per_node ({per_node})")
        if len(self.rule) != len(home):
            raise UserError(
                f"rule has {len(self.rule)} entries for {len(home)} layers; give one name, or one per layer"
            )
        for layer, name in enumerate(self.rule):
            if name not in RULES:
                raise UserError(f"layer {layer}: rule {name!r} is not one of {', '.join(RULES)}")
        for layer, expert in np.argwhere((home < 0) | (home >= devices)):
            raise UserError(
                f"layer {layer}, expert {expert}: home device {home[layer, expert]} does not exist (rule: exactly one "
                f"home in 0..{devices - 1}); an expert without a home loses its parameters"
            )

    def _check_ids(self, name: str, table: np.ndarray) -> None:
        """Check layer, expert and device of rows; `name` is 'replicas' or 'shares'."""
        layers, experts, devices = self.layers, self.experts, self.devices
        outside = (table[:, :3] < 0) | (table[:, :3] >= (layers, experts, devices))
        for layer, expert, _ in table[outside[:, :2].any(axis=1), :3]:
            raise UserError(
                f"{name}: layer {layer}, expert {expert} does not exist ({layers} layers, {experts} experts)"
            )
        for layer, expert, device in table[outside[:, 2], :3]:
            raise UserError(
                f"layer {layer}, expert {expert}, device {device}: {name[:-1]} on a device outside 0..{devices - 1}"
            )

    def _check_replicas(self) -> None:
        """Check ids, repeated rows, replicas on the home itself, and the replica slots."""
        replicas, devices, most = self.replicas, self.devices, self.replica_slots
        self._check_ids("replicas", replicas)
        repeated = (replicas[1:] == replicas[:-1]).all(axis=1)
        for layer, expert, device in replicas[1:][repeated]:
            raise UserError(
                f"layer {layer}, expert {expert}, device {device}: replica listed twice (rule: a device holds an "
                "expert once); drop one row"
            )
        for layer, expert, device in replicas[self.homes[tuple(replicas.T)]]:
            raise UserError(
                f"layer {layer}, expert {expert}, device {device}: a replica on its own home would home it twice "
                "(rule: replicas lie on other devices); drop the row"
            )
        key = replicas[:, 0] * devices + replicas[:, 2]
        held = np.bincount(key, minlength=self.layers * devices)
        if most is not None and held.max() > most:
            layer, device = divmod(int(np.argmax(held > most)), devices)
            experts = replicas[key == layer * devices + device, 1].tolist()
            raise UserError(
                f"layer {layer}, device {device}: {len(experts)} replicas (experts {experts}) exceed replica_slots "
                f"({most}) (rule: at most replica_slots replicas per device and layer); replicate fewer experts or "
                "raise replica_slots"
            )

    def _check_shares(self) -> None:
        """Check that share rows name holders, belong to layers that use them, and sum to one."""
        if not len(self.shares):
            return
        self._check_ids("shares", self.shares)
        layer, expert, device, share, node = self.shares.T
        unused = np.array([name != "shares" for name in self.rule])[layer]
        outside = (node < -1) | (node >= self.nodes) | (share < 0) | (share > SHARE_ONE)
        not_held = ~self.holds[layer, expert, device]
        group = (layer.astype(np.int64) * self.experts + expert) * (self.nodes + 1) + node + 1
        repeated = np.r_[False, np.diff(group * self.devices + device) == 0]  # rows are sorted
        start = np.flatnonzero(np.r_[True, np.diff(group) != 0])
        sums = np.add.reduceat(share.astype(np.int64), start)
        short = np.zeros(len(share), bool)
        short[start] = sums != SHARE_ONE
        for wrong in (unused, outside, not_held, repeated, short):
            if not wrong.any():
                continue
            i = int(np.argmax(wrong))
            if wrong is unused:
                what = f"share rows in a layer whose rule is {self.rule[layer[i]]!r}, not 'shares'"
            elif wrong is outside:
                what = (
                    f"share {share[i]} must lie in 0..{SHARE_ONE} and source node {node[i]} in 0..{self.nodes - 1} "
                    "(-1: every node)"
                )
            elif wrong is not_held:
                what = "share for a device that does not hold the expert"
            elif wrong is repeated:
                what = "share listed twice; add the two rows"
            else:
                what = (
                    f"shares of source node {node[i]} sum to {sums[np.searchsorted(start, i)]}, not {SHARE_ONE} "
                    "(rule: units of 2^-16 that sum to one)"
                )
            raise UserError(f"layer {layer[i]}, expert {expert[i]}, device {device[i]}: {what}")


def _whole(name: str, array: np.ndarray) -> np.ndarray:
    """Return a fresh int32 array; anything but whole numbers is an error."""
    whole = array.dtype.kind == "f" and np.isfinite(array).all() and (array == np.floor(array)).all()
    if not whole and array.dtype.kind not in "iu":
        raise UserError(f"{name} must hold whole numbers, not {array.dtype}")
    return array.astype(np.int32)


def _rows(name: str, value, width: int) -> np.ndarray:
    """Return int32 rows [n, width]; None or an empty list is no rows."""
    array = np.zeros((0, width), np.int32) if value is None else np.asarray(value)
    if array.size == 0:
        return np.zeros((0, width), np.int32)
    if array.ndim != 2 or array.shape[1] != width:
        raise UserError(f"{name} must be rows of {width} integers, not an array of shape {array.shape}")
    return _whole(name, array)


def bank_rows(placement: Placement) -> np.ndarray:
    """Number the experts homed on each device by (layer, expert): int32 [L, E], rows within the device's bank."""
    return numbered(placement.home.ravel()).reshape(placement.home.shape)


def reshard_permutation(old: Placement, new: Placement, rows: int | None = None) -> np.ndarray:
    """Return source int32 [D Rb]: row r of the new bank holds what row source[r] of the old bank held.

    Args:
      rows: Rb, bank rows of a device; the most that either placement needs when not given. Unused rows map to unused
        ones.
    """
    if old.home.shape != new.home.shape or old.devices != new.devices:
        raise UserError(
            f"cannot reshard {old.layers} layers x {old.experts} experts on {old.devices} devices into {new.layers} x "
            f"{new.experts} on {new.devices}; a reshard keeps all three"
        )
    rows = rows or max(most_homes(old), most_homes(new))
    at_old = (old.home * rows + bank_rows(old)).ravel()
    at_new = (new.home * rows + bank_rows(new)).ravel()
    source = np.full(old.devices * rows, -1, np.int32)
    source[at_new] = at_old
    source[source < 0] = np.setdiff1d(np.arange(len(source), dtype=np.int32), at_old)
    return source


def most_homes(placement: Placement) -> int:
    """Return the most experts, over all layers, that one device homes."""
    return int(np.bincount(placement.home.ravel()).max())


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
