"""Sizes of a transfer of replicas: what single layers need, and which replicas fit the transfer after the gate.

A transfer after the gate runs in one of several sizes (`TransferShape.halves`): a step has one branch for each and one
for nothing, and planners price their choices by the same list.
Letters: docs/notation.md; `...` stands for any leading dims, such as L.
"""

from __future__ import annotations

import typing

import numpy as np

from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning.arrays import loop, put

SIZES = ("offers", "slots", "crossing")


class TransferSizes(typing.NamedTuple):
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
