"""Rows of the buckets of an exchange: to the own device, to devices of the own node, to those of other nodes.

Inputs: three sizes and the group's members. Outputs: where the rows of each bucket stand in one flat buffer, and how
many of them travel how far. Sizes only, which a program is compiled for; nothing here communicates, or imports jax.

Buckets are as long as the farther ones at least: own >= node >= far. So every bucket is cut into at most three pieces,
and a piece is one plain exchange of equal blocks:

    far    its first `far` rows, of every bucket                  exchanged by the whole group
    node   rows from `far` to `node`, of those for the own node   exchanged inside the node
    own    rows from `node` to `own`, of the own bucket           stay with the member

A bucket that asks for less than a farther one gets as much: what that costs is memory, and traffic inside the node.
One length for all buckets would cost more, where replicas keep tokens at home: of layers of GPT-MoE-S and Qwen3-30B
under hecate, fastermoe and pro_prophet, modelled on 8 and 32 H200 with skewed loads, 4 % to 15 times their time.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable

KINDS = ("far", "node", "own")  # in the buffer's order


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
        return self.each(lambda rows: round_up(rows, multiple))

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
