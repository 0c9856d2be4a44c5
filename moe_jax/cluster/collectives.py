"""How long a collective takes by its bytes, its groups and the links: the one place where bytes become seconds.

    Links.exchange        bytes of every pair of devices are known     a replayed sample
    Links.received        what every device receives is known          a planner's search
    Links.uniform         all devices send the same                    transfers, padded exchanges, layers
    traffic               groups of a compiled program                 `inspect`, XLA's scheduler

All of them ask `Links.seconds`: the fit of a user's calibration where there is one; else one start-up of the
collective, a step for each of its messages, and the slowest link, max_e V_e / W_e (FasterMoE section 3.2), whose time
inside a node comes from a public table where the device has one (`prices.py`). Links are a tree: a device has an up and
a down link to its switch (a PCIe switch or a CPU socket, where the cluster names them), switches are joined in a node,
and nodes through network cards that neighbours share; in a flat cluster devices are connected to the network
themselves.
Letters: docs/notation.md; `...` stands for any leading dims.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter

import numpy as np

from moe_jax.cluster.cluster import Cluster, cluster_of
from moe_jax.cluster.fits import Fit, fit_name
from moe_jax.cluster.prices import Prices


@dataclasses.dataclass(frozen=True)
class Links:
    """The links of a cluster as the devices of one collective meet them; a UserError names `asked_by`.

    Devices' own links are left out where their speed is absent and nodes share cards: those are then the slow ones.
    """

    cluster: Cluster
    members: int  # of the collective's group
    in_node: int  # of them on the node that has most
    asked_by: str = ""
    kind: str = "all-to-all"  # of `KINDS`
    stride: int = 1  # how far members stand apart, as fits are named

    @classmethod
    def of(cls, cluster: Cluster, members: int, asked_by: str = "", stride: int = 1) -> Links:
        """Return those of an all-to-all over so many members, neighbours in a cluster."""
        return cls(cluster, members, min(cluster.devices_per_node or members, members), asked_by, stride=stride)

    @property
    def passes(self) -> int:
        """How often what a device sends of its bytes passes it: an all-reduce is a reduce-scatter and an all-gather."""
        return 2 if self.kind == "all-reduce" else 1

    @property
    def fit(self) -> Fit | None:
        """What the user's calibration has for an all-to-all of this group."""
        if not self.cluster.fits or self.kind != "all-to-all":
            return None
        return dict(self.cluster.fits).get(fit_name("all_to_all", self.members, stride=self.stride))

    @property
    def measured(self) -> Fit | None:
        """What a public table has for this collective inside a node."""
        prices = self.cluster.prices
        return None if prices is None else prices.collective(self.kind, self.in_node)

    def seconds(self, inside, across, shared: tuple = (None, None)) -> np.ndarray:
        """Return the time of one collective by the most bytes over a link of each kind; nothing to send takes none.

        Args:
          inside, across: [...], bytes that the busiest device sends to its own node and to others.
          shared: bytes [...] over the busiest switch and the busiest card, None for a kind that is not there.

        Raises:
          UserError: a link's speed is absent; a device's own must be known where nodes share no card.
        """
        inside, across = np.broadcast_arrays(np.asarray(inside, np.float64), np.asarray(across, np.float64))
        cluster, by_device, (by_switch, by_card) = self.cluster, inside + across, shared
        fit, measured = self.fit, self.measured
        if fit is not None:
            handed = by_device * self.members / max(1, self.members - 1)
            return np.where(by_device > 0, np.maximum(0.0, fit.seconds(handed)), 0.0)
        times = []
        if by_card is not None:
            per_node, cards = cluster.need("devices_per_node", self.asked_by), cluster.cards_per_node
            # where its devices cannot be shared out evenly among its cards, a node's count as one
            as_one = cards > 1 and self.sharers(cards, per_node) == per_node > 1
            times.append(by_card / (cluster.need("inter_bandwidth", self.asked_by) / (1 if as_one else cards)))
        if by_switch is not None:
            times.append(by_switch / cluster.need("switch_bandwidth", self.asked_by))
        if measured is not None:
            near = self.in_node  # one device sends (n - 1) / n of Z, in an all-reduce twice that, in a permute all
            size = inside / (1.0 if self.kind == "collective-permute" else (near - 1) / near * self.passes)
            times.append(dataclasses.replace(measured, alpha=0.0).seconds(np.sqrt(size), size))
        elif by_card is None or cluster.intra_bandwidth is not None:
            times.append(by_device / cluster.need("intra_bandwidth", self.asked_by))
        started = np.where(across > 0, self.start_up(True), self.start_up(False))
        return np.where(by_device > 0, functools.reduce(np.maximum, times) + started, 0.0)

    def start_up(self, leaves: bool) -> float:
        """Return the seconds of an empty collective: a start, and a step for each message or round; absent ones are 0.

        Args:
          leaves: whether it leaves its node; a flat cluster has none, and its devices' links are those inside.
        """
        cluster, measured = self.cluster, self.measured
        if (fit := self.fit) is not None:
            return fit.alpha
        rounds = self.passes * math.ceil(math.log2(max(self.members, 1)))
        inside, outside = (0, rounds) if leaves else (rounds, 0)
        if self.kind in ("all-to-all", "collective-permute"):
            inside, outside = self.in_node - 1, self.members - self.in_node
        if self.kind == "collective-permute":
            inside, outside = (0, 1) if leaves else (1, 0)
        if not leaves and measured is not None:
            return measured.alpha
        steps = 0.0 if measured is not None else inside * (cluster.intra_step or 0.0)
        if cluster.flat:
            return (cluster.intra_latency or 0.0) + (inside + outside) * (cluster.intra_step or 0.0)
        start = cluster.inter_latency if leaves else cluster.intra_latency
        return (start or 0.0) + steps + outside * (cluster.inter_step or 0.0)

    def exchange(self, pair_bytes: np.ndarray) -> np.ndarray:
        """Return the time of an all-to-all-v: pair_bytes [..., D, D] (source, destination) -> seconds [...]."""
        pairs, cluster = np.asarray(pair_bytes, np.float64), self.cluster
        devices, per_node = pairs.shape[-1], cluster.need("devices_per_node", "the topology")
        away = pairs * ~np.eye(devices, dtype=bool)
        node = np.arange(devices) // per_node
        same_node = node[:, None] == node

        def busiest(moving, neighbours):
            """Return the most bytes that leave or reach so many neighbours by the link that they share."""
            sums = [self.summed(moving.sum(axis=axis), neighbours).max(axis=-1) for axis in (-1, -2)]
            return np.maximum(*sums)

        by_switch = by_card = None
        below = self.sharers(cluster.switches_per_node, per_node)
        if below < per_node:
            switch = np.arange(devices) // below
            by_switch = busiest(away * (same_node & (switch[:, None] != switch)), below)
        if cluster.flat or devices <= per_node:
            return self.seconds(busiest(away, 1), 0.0, (by_switch, None))
        by_card = busiest(away * ~same_node, self.sharers(cluster.cards_per_node, per_node))
        inside, total = busiest(away * same_node, 1), busiest(away, 1)
        return self.seconds(inside, total - inside, (by_switch, by_card))

    def received(self, received: np.ndarray) -> np.ndarray:
        """Return the time of an exchange whose sources are spread evenly: bytes received [..., D] -> seconds [...].

        For searches, which know what every device receives but not from whom.
        """
        cluster, devices = self.cluster, self.members
        per_node = min(cluster.devices_per_node or devices, devices)
        others, most = max(1, devices - 1), received.max(axis=-1)
        by_switch = by_card = None
        if not cluster.flat and devices > per_node:
            sharers = self.sharers(cluster.cards_per_node, per_node)
            by_card = self.summed(received, sharers).max(axis=-1) * (devices - per_node) / others
        if (below := self.sharers(cluster.switches_per_node, per_node)) < per_node:
            by_switch = self.summed(received, below).max(axis=-1) * (per_node - below) / others
        out = 0.0 if cluster.flat else (devices - per_node) / others
        return self.seconds(most * (1 - out), most * out, (by_switch, by_card))

    def uniform(self, inside, across) -> np.ndarray:
        """Return the time of one collective in which every device sends the same.

        Args:
          inside, across: bytes that a device sends to its own node and to other nodes, spread evenly over their
            devices; numbers or arrays [...]. Nothing to send takes no time.
        """
        inside, across = np.broadcast_arrays(np.asarray(inside, np.float64), np.asarray(across, np.float64))
        cluster, by_switch, by_card = self.cluster, None, None
        if not cluster.flat and np.any(across > 0):
            by_card = across * self.sharers(cluster.cards_per_node, cluster.need("devices_per_node", self.asked_by))
        per_node = cluster.devices_per_node or 1
        if np.any(inside > 0) and (below := self.sharers(cluster.switches_per_node, per_node)) < per_node:
            by_switch = inside * below * (per_node - below) / (per_node - 1)
        return self.seconds(inside, across, (by_switch, by_card))

    @staticmethod
    def sharers(links: int, per_node: int) -> int:
        """Return how many neighbours share one of a node's links: an equal part of them, or all where there is none."""
        links = min(links, per_node)
        return per_node // links if per_node % links == 0 else per_node

    @staticmethod
    def summed(values: np.ndarray, size: int) -> np.ndarray:
        """Return the sums of so many neighbours each: [..., D] -> [..., D / size]."""
        return values.reshape(*values.shape[:-1], -1, size).sum(axis=-1)


KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def traffic(kind: str, size: float, groups: tuple[tuple[int, ...], ...], prices: Prices) -> tuple[float, float, float]:
    """Return what one execution of a collective puts on the links, and its time alone.

    That is bytes sent by the busiest device to others of its node, bytes that leave the busiest node, and seconds.

    Args:
      kind: one of `KINDS`.
      size: Z, bytes of the larger of one device's operand and result.
      groups: device ids by group; for a permute its (source, target) pairs.
      prices: of a target with its topology.
    """
    target, near, widest = prices.target, 1, 1
    inside = outside = 0.0  # bytes of the busiest device's link in its node, and that one device sends by one adapter
    per_node = target.per_node
    nodes_out: Counter[int] = Counter()  # bytes that leave a node
    if kind == "collective-permute":
        moves = any(a != b for a, b in groups)
        nodes_in: Counter[int] = Counter()
        for a, b in groups:
            if a // per_node != b // per_node:
                nodes_out[a // per_node] += 1
                nodes_in[b // per_node] += 1
                outside = size
            elif a != b:
                inside = size
        leaving = size * max([*nodes_out.values(), *nodes_in.values()], default=0)
        widest = near = 2
    else:
        moves = any(len(group) > 1 for group in groups)
        times = 2 if kind == "all-reduce" else 1
        for group in groups:
            n, nodes = len(group), Counter(device // per_node for device in group)
            if n == 1:
                continue
            most = max(nodes.values())
            widest, near = max(widest, n), max(near, most)
            if kind == "all-to-all":
                inside = max(inside, (most - 1) / n * size)
                outside = max(outside, (n - min(nodes.values())) / n * size)
                for node, members in nodes.items():
                    nodes_out[node] += members * (n - members) / n * size
            else:
                inside = max(inside, times * (n - 1) / n * size if most > 1 else 0.0)
                for node, members in nodes.items():
                    nodes_out[node] += times * (n - members) / n * size
                    outside = max(outside, times * (n - members) / n * size / members)
        leaving = max(nodes_out.values(), default=0.0)
    if not moves:
        return 0.0, 0.0, 0.0
    # a device reaches one adapter at a time; `outside` are its own bytes
    cluster, by_card = cluster_of(prices), max(leaving / target.adapters, outside)
    shared = (None, by_card if leaving else None)
    seconds = Links(cluster, widest, near, "a program", kind).seconds(inside, outside, shared)
    return inside, leaving, float(seconds)
