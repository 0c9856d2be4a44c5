"""How large a transfer must be to bring the replicas of a layer: sizes only, for executors and for prices.

Inputs: homes and holders of every expert. Outputs: the most that one device offers, that one device receives, and that
one node sends one other. The largest over all layers are a `TransferShape`.

Letters: docs/notation.md; `...` stands for any leading dims, such as L; X, m, Cp as in collectives/transfer_shape.py.
"""

from __future__ import annotations

import typing

import numpy as np

from moe_jax.collectives.transfer_shape import TransferShape


class TransferSizes(typing.NamedTuple):
    """Sizes that single layers need, int [...] each: X offers, m slots, Cp crossing."""

    offers: np.ndarray
    slots: np.ndarray
    crossing: np.ndarray

    def shape(self, devices: int, devices_per_node: int, by_node: bool) -> TransferShape:
        """Return the smallest shape that serves all layers."""
        return TransferShape(
            devices=devices,
            devices_per_node=devices_per_node,
            offers=int(self.offers.max(initial=0)),
            slots=int(self.slots.max(initial=0)),
            by_node=by_node,
            crossing=int(self.crossing.max(initial=0)) if by_node else 0,
        )


def transfer_sizes(home: np.ndarray, held: np.ndarray, devices_per_node: int) -> TransferSizes:
    """Return the sizes that each layer needs.

    Args:
      home: int [..., E], the home of every expert.
      held: bool [..., E, D], who has the expert during a step; the home counts as holder whatever stands there.
      devices_per_node: devices that share a node, by rising id.
    """
    devices = held.shape[-1]
    nodes = devices // devices_per_node
    device = np.arange(devices)
    at_home = home[..., None] == device
    replicas = held & ~at_home
    travels = replicas.any(axis=-1)  # [..., E]
    offers = (travels[..., None] & at_home).sum(axis=-2)
    on_node = replicas.reshape(*replicas.shape[:-1], nodes, devices_per_node).any(axis=-1)  # [..., E, Nn]
    from_node = (home // devices_per_node)[..., None] == np.arange(nodes)
    sent = np.einsum("...ea,...eb->...ab", from_node.astype(np.int32), on_node.astype(np.int32))
    sent = sent * ~np.eye(nodes, dtype=bool)
    return TransferSizes(offers.max(axis=-1), replicas.sum(axis=-2).max(axis=-1), sent.max(axis=(-2, -1)))


def fit_replicas(
    wanted: np.ndarray, order: np.ndarray, home: np.ndarray, shape: TransferShape
) -> tuple[np.ndarray, int]:
    """Take experts in order while their replicas fit a transfer; each is taken whole or not at all.

    Args:
      wanted: bool [L, E, D], replicas; order: int [L, Et], experts that may have some, each once.
      home: int [L, E]; shape: the sizes.

    Returns:
      (bool [L, E, D], the replicas that fit; how many experts are left out).
    """
    layers, _, devices = wanted.shape
    rows, nodes, inside = np.arange(layers), shape.nodes, shape.inside
    offers, slots = np.zeros((layers, devices), int), np.zeros((layers, devices), int)
    crossing = np.zeros((layers, nodes, nodes), int)
    fitting, cut = np.zeros_like(wanted), 0
    for rank in range(order.shape[1]):
        expert = order[:, rank]
        mine, at = wanted[rows, expert], home[rows, expert]
        node = at // inside
        to = mine.reshape(layers, nodes, inside).any(axis=2) & (np.arange(nodes) != node[:, None])
        room = (offers[rows, at] < shape.offers) & ~(mine & (slots >= shape.slots)).any(axis=1)
        room &= ~(to & (crossing[rows, node] >= shape.crossing)).any(axis=1)
        ok = mine.any(axis=1) & room
        cut += int((mine.any(axis=1) & ~room).sum())
        offers[rows, at] += ok
        slots += mine & ok[:, None]
        crossing[rows, node] += to & ok[:, None]
        fitting[rows, expert] = mine & ok[:, None]
    return fitting, cut
