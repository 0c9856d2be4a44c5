"""How long one collective takes on a target's links, without other traffic on them.

Inputs: kind, bytes of one device's operand and result, the groups of devices, the target. Outputs: `Traffic`: bytes on
the busiest device link and node, and seconds = latency + the larger of two times, inside nodes and across them, which
run at the same time. Device d is in node d // per_node. Z bytes of the larger of operand and result, a group of n
devices, m of them in the device's own node:

    all-gather, reduce-scatter   a device receives (n - 1)/n Z; a node (n - m)/n Z, in m rings, each by its own adapter
    all-reduce                   twice that
    all-to-all                   a device sends (n - 1)/n Z, of which (n - m)/n Z leave the node, by its own adapter
    collective-permute           a device sends Z to one other

Latency: base + steps x (latency of a step), one step for an all-to-all or a permute, log2(n) steps for the others,
twice that for an all-reduce. Compute is not slowed by transfers, nor transfers by each other's start-up.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from moe_jax.errors import UserError
from moe_jax.inspection.targets import Target

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast")  # fmt: skip


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

    @property
    def crosses_nodes(self) -> bool:
        return self.inter_bytes > 0


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
        if kind in ("all-to-all", "ragged-all-to-all"):
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
