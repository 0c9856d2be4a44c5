"""What a sparse transfer is: the sizes that a program is compiled for, and the tables of one layer, which are data.

A transfer brings chunks (rows of a bank, such as the parameters of an expert) from their homes to replica slots on
other devices. Every chunk is cut into slices, one for each device of a level, so that no device sends a whole chunk
more than about once: see `sparse_all_gather.py`. Nothing here communicates, and nothing imports jax.

Letters: docs/notation.md; X offers, Cp crossing, m slots of one transfer.
"""

from __future__ import annotations

import dataclasses
import typing

from moe_jax.errors import UserError

PARTS = 8  # a transfer is cut at multiples of an eighth


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
