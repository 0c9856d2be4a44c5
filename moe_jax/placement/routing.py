"""Which holder a token goes to: the rule of the placement, counted for all tokens at once.

Inputs: a Placement and loads [L, S, E]. Outputs: rows (layer, source, expert, device, tokens), and their sums by device
and by pair of devices. Nothing here chooses replicas. The token of rank i among the n of (source, expert) goes to the
first candidate j with

    num_j n // den > i     even split over c candidates: num_j = j + 1, den = c
                           shares: num_j the running sum of the shares, den = 2^16

Letters: docs/notation.md.
"""

from __future__ import annotations

import typing

import numpy as np

from moe_jax.placement.placement import Placement

SHARE_BITS = 16


class Flow(typing.NamedTuple):
    """Rows of tokens with one source, expert and destination; all arrays have the same length."""

    layer: np.ndarray
    source: np.ndarray
    expert: np.ndarray
    device: np.ndarray
    tokens: np.ndarray


def choose_slices(placement: Placement, layer: np.ndarray, source: np.ndarray, expert: np.ndarray):
    """Return (kind, start, count, device) of each (layer, source, expert): 0 one device, 1 even split, 2 shares.

    `start` points into `Candidates.holder` for kind 1 and into `share_device` for kind 2; `device` is set for kind 0.
    """
    lists = placement.candidates
    node = source // placement.devices_per_node
    rule = np.array([("nearest", "home", "shares").index(name) for name in placement.rule])[layer]
    on_node = lists.node_count[layer, expert, node]
    start = np.where(on_node > 0, lists.node_start[layer, expert, node], lists.start[layer, expert])
    count = np.where(on_node > 0, on_node, lists.count[layer, expert])
    device = lists.holder[start]
    kind = (count > 1).astype(np.int8)
    home = placement.home[layer, expert]
    device = np.where(rule == 1, home, device)
    kind[rule == 1] = 0
    local = placement.holds[layer, expert, source]
    device = np.where(local, source, device)
    kind[local] = 0
    by_share = (rule == 2) & (lists.share_count[layer, expert, node] > 0)
    kind[by_share] = 2
    start = np.where(by_share, lists.share_start[layer, expert, node], start)
    count = np.where(by_share, lists.share_count[layer, expert, node], np.where(kind == 0, 1, count))
    return kind, start, count, device


def route(placement: Placement, loads: np.ndarray) -> Flow:
    """Count tokens by destination: loads int64 [L, S, E] -> rows without zeros."""
    layer, source, expert = np.nonzero(loads)
    tokens = loads[layer, source, expert]
    kind, start, count, device = choose_slices(placement, layer, source, expert)
    one = kind == 0
    parts = [Flow(layer[one], source[one], expert[one], device[one].astype(np.int64), tokens[one])]
    many = np.flatnonzero(~one)
    if len(many):
        row = np.repeat(many, count[many])
        first = np.cumsum(count[many]) - count[many]
        j = np.arange(len(row)) - np.repeat(first, count[many])
        parts.append(
            _split(
                placement,
                Flow(layer[row], source[row], expert[row], row, tokens[row]),
                kind[row],
                start[row],
                count[row],
                j,
            )
        )
    flow = Flow(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    keep = flow.tokens > 0
    return Flow(*(column[keep] for column in flow))


def _split(placement: Placement, rows: Flow, kind, start, count, j) -> Flow:
    """Give candidate j of each row its part of the row's tokens."""
    lists = placement.candidates
    even = kind == 1
    at = np.where(even, start + (j + rows.source % count) % count, start + j)
    device = np.empty(len(j), np.int64)
    num = np.empty(len(j), np.int64)
    before = np.empty(len(j), np.int64)
    device[even] = lists.holder[at[even]]
    num[even], before[even] = j[even] + 1, j[even]
    if not even.all():
        shared = ~even
        device[shared] = lists.share_device[at[shared]]
        num[shared] = lists.share_num[at[shared]]
        before[shared] = np.where(j[shared] > 0, lists.share_num[at[shared] - 1], 0)
    den = np.where(even, count, 1 << SHARE_BITS)
    tokens = num * rows.tokens // den - before * rows.tokens // den
    return Flow(rows.layer, rows.source, rows.expert, device, tokens)


def destinations(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count tokens by destination: loads int [L, S, E] -> int64 [L, S, E, D]."""
    placement, loads = placement.matched(loads)
    flow = route(placement, loads)
    counts = np.zeros((*loads.shape, placement.devices), np.int64)
    counts[flow.layer, flow.source, flow.expert, flow.device] = flow.tokens
    return counts


def device_loads(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count the tokens that each device computes: loads int [L, S, E] -> H int64 [L, D]."""
    return computed_and_received(placement, loads)[0]


def received(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count the tokens that each device gets from other devices: loads int [L, S, E] -> R int64 [L, D]."""
    return computed_and_received(placement, loads)[1]


def computed_and_received(placement: Placement, loads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (H, R), both int64 [L, D], from one pass over the tokens."""
    placement, loads = placement.matched(loads)
    flow = route(placement, loads)
    key = flow.layer * placement.devices + flow.device
    size = placement.layers * placement.devices
    total = np.bincount(key, flow.tokens, size)
    own = np.bincount(key, flow.tokens * (flow.source == flow.device), size)
    shape = (placement.layers, placement.devices)
    return np.rint(total).astype(np.int64).reshape(shape), np.rint(total - own).astype(np.int64).reshape(shape)


def pair_loads(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count tokens by (source, destination), what a bucket holds: loads int [L, S, E] -> int64 [L, S, D]."""
    placement, loads = placement.matched(loads)
    flow = route(placement, loads)
    key = (flow.layer * placement.devices + flow.source) * placement.devices + flow.device
    sums = np.bincount(key, flow.tokens, placement.layers * placement.devices**2)
    return np.rint(sums).astype(np.int64).reshape(placement.layers, placement.devices, placement.devices)


def expected(placement: Placement, loads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (H, R) [L, D] as real numbers for real loads: the rule without its rounding, in time linear in the loads.

    Planners judge placements with this; it differs from the counted rule by less than one token per (source, expert).
    """
    layers, devices, per_node, nodes = placement.layers, placement.devices, placement.devices_per_node, placement.nodes
    lists = placement.candidates
    loads = np.asarray(loads, np.float64)
    by_device = loads.transpose(0, 2, 1)  # [L, E, S]
    by_node = by_device.reshape(layers, placement.experts, nodes, per_node).sum(axis=3)
    shared = lists.share_count > 0
    held = placement.holds.reshape(layers, placement.experts, nodes, per_node)
    own = np.where(placement.holds, by_device, 0.0).reshape(held.shape)
    own = np.where(shared[..., None], 0.0, own)
    away = np.where(shared, 0.0, by_node) - own.sum(axis=3)  # tokens of each node whose device lacks the expert
    computed = own.sum(axis=1).reshape(layers, devices)
    local = computed.copy()
    home_rule = np.array([name == "home" for name in placement.rule])
    if home_rule.any():
        sent = np.where(home_rule[:, None], away.sum(axis=2), 0.0)
        flat = np.arange(layers)[:, None] * devices + placement.home
        computed += np.bincount(flat.ravel(), sent.ravel(), layers * devices).reshape(layers, devices)
        away = np.where(home_rule[:, None, None], 0.0, away)
    inside = np.where(lists.node_count > 0, away / np.maximum(lists.node_count, 1), 0.0)
    outside = np.where(lists.node_count > 0, 0.0, away).sum(axis=2) / lists.count
    computed += (held * (inside + outside[:, :, None])[..., None]).sum(axis=1).reshape(layers, devices)
    if len(placement.shares):
        _add_shared(placement, by_node, by_device, computed, local)
    return computed, computed - local


def _add_shared(placement: Placement, by_node, by_device, computed, local) -> None:
    lists = placement.candidates
    layer, expert, node = np.nonzero(lists.share_count)
    count = lists.share_count[layer, expert, node]
    row = np.repeat(np.arange(len(count)), count)
    j = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    at = lists.share_start[layer, expert, node][row] + j
    part = (lists.share_num[at] - np.where(j > 0, lists.share_num[at - 1], 0)) / (1 << SHARE_BITS)
    device = lists.share_device[at]
    layer, expert, node = layer[row], expert[row], node[row]
    np.add.at(computed, (layer, device), part * by_node[layer, expert, node])
    mine = device // placement.devices_per_node == node
    np.add.at(local, (layer[mine], device[mine]), (part * by_device[layer, expert, device])[mine])
