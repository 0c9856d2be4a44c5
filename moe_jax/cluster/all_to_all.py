"""Seconds of the three all-to-alls of inference, by messages and bytes: flat, hierarchical, parallelism-coordinated.

Inputs: devices of the exchange, of a node and of a tensor-slicing group, the bytes that a device sends, and a `Cluster`
with latencies and bandwidths. Outputs: seconds of one exchange, there or back, and the shortest of the three.

A device sends one message after the other, so seconds are messages x latency + bytes / bandwidth on either kind of
link; that is what decides at inference, where messages are small. Z are the bytes of the flat exchange, in which each
row goes to all shards of its expert:

    all_to_all   P - 1 messages: G - 1 inside the node, P - G to others; Z / P each
    two_level    inside the node G - 1 of Z / G, then P / G - 1 to other nodes of Z G / P: fewer messages, more bytes
    coordinated  P / L - 1 of Z / P among devices of equal place; then L - 1 of Z / L to gather inside the group

Source: DeepSpeed-MoE (Rajbhandari et al. 2022), section 5.3: O(P), O(G + P / G), O(P / L) + O(L).
Letters: docs/notation.md; P devices of the exchange, G of a node, L of a tensor-slicing group, which lies in a node.
"""

from __future__ import annotations

import dataclasses

from moe_jax.cluster.cluster import Cluster
from moe_jax.errors import UserError

KINDS = ("all_to_all", "two_level", "coordinated")  # as `MoEConfig.transport` names them
_REQUESTED_BY = "the choice of an all-to-all"


@dataclasses.dataclass(frozen=True)
class Messages:
    """What one device sends: how many messages of how many bytes, inside its node and to others."""

    inside: int
    inside_bytes: float
    across: int
    across_bytes: float

    def seconds(self, cluster: Cluster) -> float:
        """Return the time of all of them; all devices of a node send at the same time."""
        total = 0.0
        if self.inside:
            total += self.inside * cluster.need("intra_latency", _REQUESTED_BY)
            total += self.inside_bytes / cluster.need("intra_bandwidth", _REQUESTED_BY)
        if self.across:
            total += self.across * cluster.need("inter_latency", _REQUESTED_BY)
            total += self.across_bytes / cluster.device_bandwidth(_REQUESTED_BY)
        return total


def messages(kind: str, devices: int, per_node: int, slicing: int, sent: float) -> Messages:
    """Return what one device sends in one exchange.

    Args:
      kind: one of `KINDS`; devices: P; per_node: G, all P where there are fewer; slicing: L; sent: Z.

    Raises:
      UserError: an unknown kind, or sizes that do not divide one another.
    """
    near = min(per_node, devices)
    if devices % near or near % slicing:
        raise UserError(
            f"{devices} devices of an all-to-all must fill whole nodes ({near}), and a tensor-slicing group "
            f"({slicing}) must divide a node; change the mesh"
        )
    nodes = devices // near
    if kind == "all_to_all":
        return Messages(near - 1, sent * (near - 1) / devices, devices - near, sent * (devices - near) / devices)
    if kind == "two_level":
        return Messages(near - 1, sent * (near - 1) / near, nodes - 1, sent * (nodes - 1) / nodes)
    if kind == "coordinated":
        places, each = near // slicing, sent / devices
        inside = (places - 1) * each + sent * (slicing - 1) / slicing
        return Messages(places - 1 + slicing - 1, inside, places * (nodes - 1), places * (nodes - 1) * each)
    raise UserError(f"all-to-all {kind!r} is unknown; choose one of {', '.join(KINDS)}")


def all_to_all_seconds(cluster: Cluster, devices: int, slicing: int, sent: float) -> dict[str, float]:
    """Return {kind: seconds} of one exchange on this cluster.

    Raises:
      AbsentFigureError: the cluster lacks a latency or bandwidth.
    """
    per_node = cluster.need("devices_per_node", _REQUESTED_BY)
    return {kind: messages(kind, devices, per_node, slicing, sent).seconds(cluster) for kind in KINDS}
