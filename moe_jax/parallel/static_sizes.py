"""The sizes that a program is compiled for: rows of the buckets of an exchange, and chunks of a sparse transfer.

Sizes only, and the tables of one transfer, which are data; nothing here communicates, or imports jax.

Buckets. Inputs: three sizes and the group's members. Outputs: where the rows of each bucket stand in one flat
buffer, and how many of them travel how far: to the own device, to devices of the own node, to those of other nodes.
Buckets are as long as the farther ones at least: own >= node >= far. So every bucket is cut into at most three pieces,
and a piece is one plain exchange of equal blocks:

    far    its first `far` rows, of every bucket                  exchanged by the whole group
    node   rows from `far` to `node`, of those for the own node   exchanged inside the node
    own    rows from `node` to `own`, of the own bucket           stay with the member

A bucket that asks for less than a farther one gets as much: what that costs is memory, and traffic inside the node.
One length for all buckets would cost more, where replicas keep tokens at home: of layers of GPT-MoE-S and Qwen3-30B
under hecate, fastermoe and pro_prophet, modelled on 8 and 32 H200 with skewed loads, 4 % to 15 times their time.

Transfers. A transfer brings chunks (rows of a bank, such as the parameters of an expert) from their homes to
replica slots on other devices. Every chunk is cut into slices, one for each device of a level, so that no device sends
a whole chunk more than about once: see `sparse_all_gather.py`.

Letters: docs/notation.md; X offers, Cp crossing, m slots of one transfer.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable

from moe_jax.errors import UserError

KINDS = ("far", "node", "own")  # in the buffer's order
PARTS = 8  # a transfer is cut at multiples of an eighth


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketRows:
    """Rows of one (source, destination) bucket.

    Attributes:
      own: where the destination is the source's own member of the expert-parallel group; these rows do not travel
        between members. node: of another member on the same node. far: on another node.
    """

    own: int
    node: int
    far: int

    @classmethod
    def even(cls, rows: int) -> BucketRows:
        """Return buckets of the same length for all destinations."""
        return cls(own=rows, node=rows, far=rows)

    def each(self, function: Callable[..., int], other: BucketRows | None = None) -> BucketRows:
        """Return function(size), or with `other` function(size, its size), for each of the three."""
        sizes = [dataclasses.astuple(self)] if other is None else [dataclasses.astuple(rows) for rows in (self, other)]
        own, node, far = map(function, *sizes)
        return BucketRows(own=own, node=node, far=far)

    def raised(self) -> BucketRows:
        """Return own >= node >= far: each size as large as that of the farther buckets at least."""
        node = max(self.node, self.far)
        return BucketRows(own=max(self.own, node), node=node, far=self.far)

    def used(self, members: int, near: int) -> BucketRows:
        """Return the rows that buckets wanted so have: own >= node >= far, and one size of two that are the same.

        Args: members: D; near: members of a node, which divides D; where that is 1 or D, two sizes are one.
        """
        rows = self.raised()
        assert members % near == 0 and rows.far > 0, (rows, members, near)
        if near == 1:
            rows = dataclasses.replace(rows, node=rows.far)
        if near == members:
            rows = dataclasses.replace(rows, far=rows.node)
        return BucketRows.even(rows.own) if members == 1 else rows

    def rounded(self, multiple: int) -> BucketRows:
        """Return the least multiples that hold these rows, one multiple at least."""
        return self.each(lambda rows: multiple * max(1, math.ceil(rows / multiple)))

    def within(self, other: BucketRows) -> bool:
        """Say whether no size is larger than the other's."""
        return self.each(min, other) == self


class Piece(typing.NamedTuple):
    """Rows `begin` to `end` of `count` buckets: [count, end - begin] rows of the buffer from `offset` on."""

    kind: str
    count: int
    begin: int
    end: int
    offset: int

    @property
    def width(self) -> int:
        """Rows of each bucket that are in this piece."""
        return self.end - self.begin

    @property
    def rows(self) -> int:
        """All rows of the piece."""
        return self.count * self.width


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """One flat buffer of a source's buckets, piece after piece; made by `bucket_layout`.

    Attributes:
      rows: length of the buckets, own >= node >= far.
      members: D, destinations.
      near: members of a node, the own one included; neighbours in the group's order.
    """

    rows: BucketRows
    members: int
    near: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces that have rows, in the buffer's order."""
        edges = (0, self.rows.far, self.rows.node, self.rows.own)
        out, offset = [], 0
        for kind, count, begin, end in zip(KINDS, (self.members, self.near, 1), edges, edges[1:], strict=False):
            piece = Piece(kind, count, begin, end, offset)
            offset += piece.rows
            out += [piece] if piece.rows else []
        return tuple(out)

    @property
    def total(self) -> int:
        """R, all rows of the buffer."""
        return sum(piece.rows for piece in self.pieces)


def bucket_layout(rows: BucketRows | int, members: int, near: int = 1) -> BucketLayout:
    """Return where the rows of the buckets of one source stand; arguments as of `BucketRows.used`, an int for all."""
    return BucketLayout((BucketRows.even(rows) if isinstance(rows, int) else rows).used(members, near), members, near)


def round_up(rows: float, multiple: int) -> int:
    """Return the smallest multiple that holds so many rows, one multiple at least."""
    return multiple * max(1, math.ceil(rows / multiple))


def sent_by_collective(
    offers, slots, crossing, *, devices: int, devices_per_node: int, by_node: bool
) -> list[tuple[float, float]]:
    """Return chunks that the busiest device sends in each collective of one Trans, in order: (inside a node, across).

    Sizes are numbers or arrays. Flat: offers, then slots, D devices each. By node: offers inside the node, crossing
    chunks to other nodes, slots inside the node.
    """
    group = devices_per_node
    if by_node:
        inside, nodes = (group - 1) / group, devices // group
        return [(offers * inside, 0.0), (0.0, (nodes - 1) * crossing / group), (slots * inside, 0.0)]
    near, far = (group - 1) / devices, (devices - group) / devices
    return [(size * near, size * far) for size in (offers, slots)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferShape:
    """Hold the sizes of a sparse transfer; equal shapes compile to equal programs.

    Attributes:
      devices: D, of the group that exchanges chunks; devices_per_node: Dn of them, neighbours in the group's order,
        share a node.
      offers: X, the most chunks of one device that travel.
      slots: m, replica slots of a device.
      by_node: slices cross nodes once per node (three exchanges), else all devices are one level (two exchanges).
      crossing: Cp, by node: the most chunks that one node sends one other.
    """

    devices: int
    devices_per_node: int
    offers: int
    slots: int
    by_node: bool = False
    crossing: int = 0

    def __post_init__(self):
        if self.devices % self.devices_per_node:
            raise UserError(
                f"a transfer among {self.devices} devices with {self.devices_per_node} on a node has nodes of unequal "
                f"size; set MeshConfig.devices_per_node to a divisor of {self.devices}"
            )
        if self.by_node and (self.devices_per_node == 1 or self.devices_per_node == self.devices):
            few = "one device on a node" if self.devices_per_node == 1 else "one node"
            raise UserError(
                f"PlannerConfig.transfer = 'by_node' needs several nodes of several devices, and there is {few} in the "
                "expert-parallel group; use 'flat' or 'auto'"
            )

    @property
    def inside(self) -> int:
        """Devices of one level: those of a node, or all of them."""
        return self.devices_per_node if self.by_node else self.devices

    @property
    def nodes(self) -> int:
        """Nn: groups of `inside` devices."""
        return self.devices // self.inside

    @property
    def crosses(self) -> bool:
        """Whether there is an exchange between nodes: none where all replicas are on their homes' nodes."""
        return self.by_node and self.crossing > 0

    @property
    def places(self) -> int:
        """How many slices a device can hand on: those of its level's offers, then what other nodes sent."""
        return self.inside * self.offers + (self.nodes * self.crossing if self.crosses else 0)

    def halves(self) -> tuple[TransferShape, ...]:
        """Return the whole, its half, a quarter and so on, small ones first: the sizes that a late transfer runs in."""
        sizes = [self]
        while max(sizes[0].offers, sizes[0].slots, sizes[0].crossing) > 1:
            half = {name: -(-getattr(sizes[0], name) // 2) for name in ("offers", "slots", "crossing")}
            sizes.insert(0, dataclasses.replace(sizes[0], **half))
        return tuple(sizes)

    def sent(self) -> tuple[float, float]:
        """Return the chunks that the busiest device sends in one Trans, inside and across; Agg sends the same back.

        Flat: (X + m) (D - 1) / D, of which (X + m) (D - Dn) / D cross nodes. By node: (X + m) (Dn - 1) / Dn inside and
        (Nn - 1) Cp / Dn across.
        """
        parts = sent_by_collective(
            self.offers,
            self.slots,
            self.crossing,
            devices=self.devices,
            devices_per_node=self.devices_per_node,
            by_node=self.by_node,
        )
        return sum(inside for inside, _ in parts), sum(across for _, across in parts)


@dataclasses.dataclass(frozen=True)
class TransferTables:
    """The data of one layer's transfer, for one device; int32.

    Attributes:
      offer: [X], the home slot of each chunk that this device offers; any other number for none.
      pick: [Nn, Cp], which of the Dn X chunks that this node offers go to each other node; Dn X for none. Equal on the
        devices of a node. None where the transfer is flat.
      want: [inside, m], where the chunk of replica slot k of each device of this level lies: among the `places` of the
        shape, that number for none. Equal on the devices of a level.
    """

    offer: typing.Any
    pick: typing.Any
    want: typing.Any
