"""How long an exchange takes on shared links: the one place where bytes become seconds by bandwidths.

Inputs: bytes between every pair of devices, or what every device of a uniform exchange sends. Outputs: the traffic of
every directed link and the time of the slowest, max_e V_e / W_e (FasterMoE section 3.2). The graph is a tree: a device
is connected by an up and a down link to its switch (a PCIe switch or a CPU socket, where the cluster names them), the
switches of a node to each other, and the devices of a node through its network cards, each shared by its neighbours, to
the network; in a flat cluster devices are connected to the network themselves.

Letters: docs/notation.md; `...` stands for any leading dims.
"""

from __future__ import annotations

import typing

import numpy as np

from moe_jax.cluster.cluster import Cluster


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
