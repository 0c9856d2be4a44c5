"""How long a collective takes by its bytes, its groups and the links: the one place where bytes become seconds.

`exchange_seconds` and `uniform_seconds` take a `Cluster`: the slowest link, max_e V_e / W_e (FasterMoE section 3.2), of
a tree in which a device has an up and a down link to its switch (a PCIe switch or a CPU socket, where the cluster names
them), switches are joined in a node, and nodes through network cards that neighbours share; in a flat cluster devices
are connected to the network themselves. `all_to_all_seconds` adds start-ups and messages, which decide at inference;
`traffic` takes a `Target`, for one collective of a compiled program. Letters: docs/notation.md; `...` stands for any
leading dims.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections import Counter

import numpy as np

from moe_jax.cluster.cluster import Cluster
from moe_jax.cluster.targets import Target
from moe_jax.errors import UserError


class LinkTraffic(typing.NamedTuple):
    """Bytes over each directed link; links that are not shared, or not there, are an empty last dim.

    Attributes:
      device_up, device_down: [..., D]; node_up, node_down: of network cards, [..., Nn x cards of a node].
      switch_up, switch_down: between a switch and the others of its node, [..., Nn x switches of a node].
    """

    device_up: np.ndarray
    device_down: np.ndarray
    node_up: np.ndarray
    node_down: np.ndarray
    switch_up: np.ndarray
    switch_down: np.ndarray


def link_traffic(cluster: Cluster, pair_bytes: np.ndarray) -> LinkTraffic:
    """Add every message along its path: pair_bytes [..., D, D] (source, destination) -> traffic of each link."""
    per_node = cluster.need("devices_per_node", "the topology")
    lead, devices = pair_bytes.shape[:-2], pair_bytes.shape[-1]
    away = pair_bytes * ~np.eye(devices, dtype=bool)
    up, down = away.sum(axis=-1), away.sum(axis=-2)
    none = np.zeros((*lead, 0))
    node = np.arange(devices) // per_node
    same_node = node[:, None] == node
    switch_up = switch_down = node_up = node_down = none
    if (switches := _divisor(cluster.switches_per_node, per_node)) > 1:
        switch = np.arange(devices) // (per_node // switches)
        passing = away * (same_node & (switch[:, None] != switch))
        switch_up, switch_down = (_grouped(passing.sum(axis=axis), per_node // switches) for axis in (-1, -2))
    if not cluster.flat and devices > per_node:
        across, sharers = away * ~same_node, per_node // _divisor(cluster.cards_per_node, per_node)
        node_up, node_down = (_grouped(across.sum(axis=axis), sharers) for axis in (-1, -2))
    return LinkTraffic(up, down, node_up, node_down, switch_up, switch_down)


def exchange_seconds(cluster: Cluster, pair_bytes: np.ndarray, requested_by: str) -> np.ndarray:
    """Return the time of an all-to-all-v: pair_bytes [..., D, D] -> seconds [...].

    Device links are left out when their speed is absent but nodes share links: those are then the slow ones.
    """
    traffic = link_traffic(cluster, np.asarray(pair_bytes, np.float64))
    times = []
    if traffic.node_up.shape[-1]:
        times.append(_slowest(traffic.node_up, traffic.node_down) / _card_bandwidth(cluster, requested_by))
    if traffic.switch_up.shape[-1]:
        width = cluster.need("switch_bandwidth", requested_by)
        times.append(_slowest(traffic.switch_up, traffic.switch_down) / width)
    if not times or cluster.intra_bandwidth is not None:
        width = cluster.need("intra_bandwidth", requested_by)
        times.append(_slowest(traffic.device_up, traffic.device_down) / width)
    return np.max(times, axis=0)


def received_seconds(cluster: Cluster, received: np.ndarray, requested_by: str) -> np.ndarray:
    """Return the time of an exchange whose sources are spread evenly: bytes received [..., D] -> seconds [...].

    For searches, which know what every device receives but not from whom; links that are absent are left out as in
    `exchange_seconds`, and the start-up counts.
    """
    devices = received.shape[-1]
    per_node = min(cluster.devices_per_node or devices, devices)
    others, times = max(1, devices - 1), []
    shared = not cluster.flat and devices > per_node
    if shared:
        sharers = per_node // _divisor(cluster.cards_per_node, per_node)
        across = _grouped(received, sharers).max(axis=-1) * (devices - per_node) / others
        times.append(across / _card_bandwidth(cluster, requested_by))
    if (switches := _divisor(cluster.switches_per_node, per_node)) > 1:
        below = per_node // switches
        passing = _grouped(received, below).max(axis=-1) * (per_node - below) / others
        times.append(passing / cluster.need("switch_bandwidth", requested_by))
    most = received.max(axis=-1)
    if not shared or cluster.intra_bandwidth is not None:
        times.append(most / cluster.need("intra_bandwidth", requested_by))
    latency = (cluster.inter_latency if devices > per_node else cluster.intra_latency) or 0.0
    seconds = times[0]
    for time in times[1:]:
        seconds = np.maximum(seconds, time)
    return np.where(most > 0, seconds + latency, 0.0) if latency else seconds


def uniform_seconds(cluster: Cluster, inside, across, requested_by: str):
    """Return the time of one collective in which every device sends the same, with its start-up.

    Args:
      inside, across: bytes that a device sends to its own node and to other nodes, spread evenly over their devices;
        numbers or arrays [...]. Nothing to send takes no time.
    """
    inside, across = np.asarray(inside, np.float64), np.asarray(across, np.float64)
    shared = not cluster.flat and np.any(across > 0)
    times = [np.zeros(np.broadcast_shapes(inside.shape, across.shape))]
    if shared:
        per_node = cluster.need("devices_per_node", requested_by)
        sharers = per_node // _divisor(cluster.cards_per_node, per_node)
        times.append(across * sharers / _card_bandwidth(cluster, requested_by))
    if np.any(inside > 0) and (switches := _divisor(cluster.switches_per_node, cluster.devices_per_node or 1)) > 1:
        per_node = cluster.need("devices_per_node", requested_by)
        below = per_node // switches
        passing = inside * below * (per_node - below) / (per_node - 1)
        times.append(passing / cluster.need("switch_bandwidth", requested_by))
    if not shared or cluster.intra_bandwidth is not None:
        times.append((inside + across) / cluster.need("intra_bandwidth", requested_by))
    latency = np.where(across > 0, cluster.inter_latency or 0.0, cluster.intra_latency or 0.0)
    return np.where(inside + across > 0, np.max(np.broadcast_arrays(*times), axis=0) + latency, 0.0)


def _card_bandwidth(cluster: Cluster, requested_by: str) -> float:
    """Return bytes/s of one card; of the whole node where its devices cannot be shared out evenly."""
    per_node, cards = cluster.need("devices_per_node", requested_by), cluster.cards_per_node
    shared = min(cards, per_node) > 1 and _divisor(cards, per_node) == 1
    return cluster.need("inter_bandwidth", requested_by) / (1 if shared else cards)


def _divisor(parts: int, whole: int) -> int:
    """Return into how many equal parts neighbours fall: `parts`, or the whole where it is smaller; else 1."""
    return min(parts, whole) if whole % min(parts, whole) == 0 else 1


def _grouped(values: np.ndarray, size: int) -> np.ndarray:
    return values.reshape(*values.shape[:-1], -1, size).sum(axis=-1)


def _slowest(up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return np.maximum(up.max(axis=-1), down.max(axis=-1))


def overlap_bound(communication: float, computation: float) -> float:
    """Return the largest speed-up of a layer whose transfers and matmuls overlap.

    Args:
      communication, computation: seconds of the layer's transfers and of its experts, one after the other.

    Source: FasterMoE, section 4.2: (comm + comp) / max(comm, comp), at most 2.
    """
    longer = max(communication, computation)
    return (communication + computation) / longer if longer > 0 else 1.0


def all_reduce_bytes(size: float, members):
    """Return what a ring all-reduce of Z bytes over n members (or an array n) sends over each link, 2 (n - 1) / n Z."""
    return 2.0 * (members - 1) / members * size


ALL_TO_ALLS = ("all_to_all", "two_level", "coordinated")  # as `MoEConfig.transport` names them
_REQUESTED_BY = "the choice of an all-to-all"


class Messages(typing.NamedTuple):
    """What one device sends in one collective: how many messages of how many bytes, inside its node and to others."""

    inside: int
    inside_bytes: float
    across: int
    across_bytes: float

    def seconds(self, cluster: Cluster) -> float:
        """Return the time of the collective: one start-up, a step a message, and the bytes."""
        if not self.inside and not self.across:
            return 0.0
        cluster.need("inter_latency" if self.across else "intra_latency", _REQUESTED_BY)  # counted with the bytes
        steps = sum(
            number * cluster.need(field, _REQUESTED_BY)
            for field, number in (("intra_step", self.inside), ("inter_step", self.across))
            if number
        )
        return steps + float(uniform_seconds(cluster, self.inside_bytes, self.across_bytes, _REQUESTED_BY))


def messages(kind: str, devices: int, per_node: int, slicing: int, shards: int, sent: float) -> tuple[Messages, ...]:
    """Return what one device sends in each collective of one exchange, in their order.

    Args:
      kind: one of `ALL_TO_ALLS`; devices: P; per_node: G, all P where there are fewer; slicing: L; shards: S; sent: Z.

    Raises:
      UserError: an unknown kind, or sizes that do not divide one another.
    """
    near = min(per_node, devices)
    if devices % near or near % slicing or slicing % shards:
        raise UserError(
            f"{devices} devices of an all-to-all must fill whole nodes ({near}), a tensor-slicing group ({slicing}) "
            f"must divide a node, and the shards of an expert ({shards}) such a group; change the mesh"
        )
    nodes = devices // near
    if kind == "all_to_all":
        each = sent / devices
        return (Messages(near - 1, (near - 1) * each, devices - near, (devices - near) * each),)
    if kind == "two_level":
        return (
            Messages(near - 1, sent * (near - 1) / near, 0, 0),
            Messages(0, 0, nodes - 1, sent * (nodes - 1) / nodes),
        )
    if kind == "coordinated":
        places, homes = near // slicing, slicing // shards
        each = sent * slicing / (devices * shards)
        return (
            Messages(places - 1, (places - 1) * each, places * (nodes - 1), places * (nodes - 1) * each),
            Messages(homes - 1, sent / shards * (homes - 1) / homes, 0, 0),
            Messages(shards - 1, sent * (shards - 1) / shards, 0, 0),
        )
    raise UserError(f"all-to-all {kind!r} is unknown; choose one of {', '.join(ALL_TO_ALLS)}")


def all_to_all_seconds(cluster: Cluster, devices: int, slicing: int, shards: int, sent: float) -> dict[str, float]:
    """Return {kind: seconds} of one exchange on this cluster.

    Raises:
      AbsentFigureError: the cluster lacks a start-up, a step or a bandwidth.
    """
    per_node = cluster.need("devices_per_node", _REQUESTED_BY)
    return {
        kind: sum(part.seconds(cluster) for part in messages(kind, devices, per_node, slicing, shards, sent))
        for kind in ALL_TO_ALLS
    }


KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one execution of a collective puts on the links.

    Attributes:
      intra_bytes: sent by the busiest device to others of its node.
      inter_bytes: that leave the busiest node.
      intra_seconds, inter_seconds: those bytes over their links.
      seconds: of the collective alone, latency included.
    """

    intra_bytes: float
    inter_bytes: float
    intra_seconds: float
    inter_seconds: float
    seconds: float


def traffic(kind: str, size: float, groups: tuple[tuple[int, ...], ...], target: Target) -> Traffic:
    """Return the traffic of one collective.

    Args:
      kind: one of `KINDS`.
      size: Z, bytes of the larger of one device's operand and result.
      groups: device ids by group; for a permute its (source, target) pairs.
      target: with its topology.
    """
    if kind not in KINDS:
        raise UserError(f"the collective {kind!r} is not known to the cost model")
    if kind == "collective-permute":
        return _permute(size, groups, target)
    inside = outside = leaving = 0.0
    steps = 1
    nodes_out: Counter[int] = Counter()
    for group in groups:
        n = len(group)
        if n == 1:
            continue
        nodes = Counter(device // target.per_node for device in group)
        least = min(nodes.values())
        times = 2 if kind == "all-reduce" else 1
        if kind == "all-to-all":
            most = max(nodes.values())
            inside = max(inside, (most - 1) / n * size)
            outside = max(outside, (n - least) / n * size)
            for node, members in nodes.items():
                nodes_out[node] += members * (n - members) / n * size
        else:
            steps = max(steps, times * math.ceil(math.log2(n)))
            inside = max(inside, times * (n - 1) / n * size if max(nodes.values()) > 1 else 0.0)
            for node, members in nodes.items():
                nodes_out[node] += times * (n - members) / n * size
                outside = max(outside, times * (n - members) / n * size / members)
    leaving = max(nodes_out.values(), default=0.0)
    return _timed(inside, outside, leaving, steps, target, any(len(group) > 1 for group in groups))


def _permute(size: float, pairs, target: Target) -> Traffic:
    crossing = [(a, b) for a, b in pairs if a // target.per_node != b // target.per_node]
    local = any(a != b and a // target.per_node == b // target.per_node for a, b in pairs)
    by_node = Counter(a // target.per_node for a, _ in crossing)
    into = Counter(b // target.per_node for _, b in crossing)
    leaving = size * max([*by_node.values(), *into.values()], default=0)
    return _timed(size if local else 0.0, size if crossing else 0.0, leaving, 1, target, bool(crossing or local))


def _timed(inside: float, outside: float, leaving: float, steps: int, target: Target, moves: bool) -> Traffic:
    """Return traffic with its times.

    Args:
      inside: bytes of the busiest device's link in its node; outside: bytes that one device sends by one adapter.
      leaving: bytes of the busiest node.
    """
    if not moves:
        return Traffic(0.0, 0.0, 0.0, 0.0, 0.0)
    intra = inside / target.intra_bandwidth
    inter = max(leaving / target.node_bandwidth, outside * target.adapters / target.node_bandwidth)
    step = target.inter_latency if leaving else target.intra_latency
    seconds = target.base_latency + steps * step + max(intra, inter)
    return Traffic(inside, leaving, intra, inter, seconds)
