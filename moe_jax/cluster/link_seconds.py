"""How long an exchange takes on shared links.

Inputs: bytes between every pair of devices. Outputs: the traffic of every directed link and the time of the slowest,
max_e V_e / W_e (FasterMoE section 3.2). The graph is a tree: a device is connected to its node by an up and a down
link, a node to the network by another pair; in a flat cluster devices are connected to the network themselves. Overhead
per message is left out.

Letters: docs/notation.md; `...` stands for any leading dims.
"""

from __future__ import annotations

import typing

import numpy as np

from moe_jax.cluster.cluster import Cluster


class LinkTraffic(typing.NamedTuple):
    """Bytes over each directed link: device links [..., D], node links [..., Nn] (empty where nodes share none)."""

    device_up: np.ndarray
    device_down: np.ndarray
    node_up: np.ndarray
    node_down: np.ndarray


def link_traffic(cluster: Cluster, pair_bytes: np.ndarray) -> LinkTraffic:
    """Add every message along its path: pair_bytes [..., D, D] (source, destination) -> traffic of each link."""
    per_node = cluster.need("devices_per_node", "the topology")
    lead, devices = pair_bytes.shape[:-2], pair_bytes.shape[-1]
    away = pair_bytes * ~np.eye(devices, dtype=bool)
    nodes = devices // per_node
    none = np.zeros((*lead, 0))
    if cluster.flat or nodes == 1:
        return LinkTraffic(away.sum(axis=-1), away.sum(axis=-2), none, none)
    blocks = away.reshape(*lead, nodes, per_node, nodes, per_node).sum(axis=(-3, -1))
    across = blocks * ~np.eye(nodes, dtype=bool)
    return LinkTraffic(away.sum(axis=-1), away.sum(axis=-2), across.sum(axis=-1), across.sum(axis=-2))


def exchange_seconds(cluster: Cluster, pair_bytes: np.ndarray, requested_by: str) -> np.ndarray:
    """Return the time of an all-to-all-v: pair_bytes [..., D, D] -> seconds [...].

    Device links are left out when their speed is absent but nodes share links: those are then the slow ones.
    """
    traffic = link_traffic(cluster, np.asarray(pair_bytes, np.float64))
    times = []
    if traffic.node_up.shape[-1]:
        node = np.maximum(traffic.node_up.max(axis=-1), traffic.node_down.max(axis=-1))
        times.append(node / cluster.need("inter_bandwidth", requested_by))
    if not times or cluster.intra_bandwidth is not None:
        device = np.maximum(traffic.device_up.max(axis=-1), traffic.device_down.max(axis=-1))
        times.append(device / cluster.need("intra_bandwidth", requested_by))
    return np.max(times, axis=0)


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
