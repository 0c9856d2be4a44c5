"""Which holder a token goes to: the rule of the placement, counted for all tokens at once.

The token of rank i among the n of (source, expert) goes to the first candidate j with

    num_j n // den > i     even split over c candidates: num_j = j + 1, den = c
                           shares: num_j the running sum of the shares, den = 2^16

Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.errors import UserError
from moe_jax.planning.placement import RULES, SHARE_ONE, Placement, within_group


def candidate_rows(placement: Placement, layer: np.ndarray, source: np.ndarray, expert: np.ndarray):
    """Return (row, nth, device, num, den): the candidates of each (layer, source, expert), int [c] each.

    Row is the place in the arguments, by rising id, nth the candidate's j; num and den are those of the rule.
    """
    lists = placement.candidates
    node = source // placement.devices_per_node
    rule = np.array([RULES.index(name) for name in placement.rule])[layer]
    on_node = lists.node_count[layer, expert, node]
    start = np.where(on_node > 0, lists.node_start[layer, expert, node], lists.start[layer, expert])
    count = np.where(on_node > 0, on_node, lists.count[layer, expert])
    local = placement.holds[layer, expert, source]
    alone = (rule == RULES.index("home")) | local
    single = np.where(local, source, placement.home[layer, expert])  # the destination where there is no choice
    by_share = (rule == RULES.index("shares")) & (lists.share_count[layer, expert, node] > 0)
    start = np.where(by_share, lists.share_start[layer, expert, node], start)
    count = np.where(by_share, lists.share_count[layer, expert, node], np.where(alone, 1, count))
    row = np.repeat(np.arange(len(layer)), count)
    nth = within_group(row)
    shared, alone = by_share[row], (alone & ~by_share)[row]
    even = ~shared & ~alone
    # An even split starts at another candidate for every source, so that remainders spread over the holders.
    at = start[row] + np.where(even, (nth + source[row]) % count[row], nth)
    device, num = single[row].astype(np.int64), nth + 1
    device[even] = lists.holder[at[even]]
    device[shared] = lists.share_device[at[shared]]
    num[shared] = lists.share_num[at[shared]]
    return row, nth, device, num, np.where(shared, SHARE_ONE, count[row])


def route(placement: Placement, loads: np.ndarray) -> tuple[np.ndarray, ...]:
    """Count tokens by destination: loads int [L, S, E] -> (layer, source, expert, device, tokens), int64 [n] each.

    Raises:
      UserError: loads of another shape than the placement's.
    """
    loads, (layers, experts) = np.asarray(loads, np.int64), placement.home.shape
    if loads.shape != (layers, placement.devices, experts):
        raise UserError(
            f"loads have shape [layers, sources, experts] = {loads.shape}, but the placement has {layers} layers, "
            f"{placement.devices} devices (a source is a device) and {experts} experts; use loads of the same run"
        )
    at = np.nonzero(loads)
    row, nth, device, num, den = candidate_rows(placement, *at)
    layer, source, expert = (part[row] for part in at)
    total = loads[layer, source, expert]
    before = np.where(nth > 0, np.roll(num, 1), 0)
    return layer, source, expert, device, num * total // den - before * total // den


def destinations(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count tokens by destination: loads int [L, S, E] -> int64 [L, S, E, D]."""
    *at, tokens = route(placement, loads)
    counts = np.zeros((*loads.shape, placement.devices), np.int64)
    counts[tuple(at)] = tokens
    return counts


def pair_loads(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count tokens by (source, destination), what a bucket holds: loads int [L, S, E] -> int64 [L, S, D].

    Summed over sources they are what each device computes, H.
    """
    layer, source, _, device, tokens = route(placement, loads)
    key = (layer * placement.devices + source) * placement.devices + device
    sums = np.bincount(key, tokens, placement.layers * placement.devices**2)
    return np.rint(sums).astype(np.int64).reshape(placement.layers, placement.devices, placement.devices)


def expected(placement: Placement, loads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (H, R) [L, D] as real numbers for real loads: the rule without its rounding, in time linear in the loads.

    Planners judge placements with this; it differs from the counted rule by less than one token per (source, expert).
    """
    layers, devices, per_node, nodes = placement.layers, placement.devices, placement.devices_per_node, placement.nodes
    lists = placement.candidates
    by_device = np.asarray(loads, np.float64).transpose(0, 2, 1)  # [L, E, S]
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
        layer, expert, node = np.nonzero(lists.share_count)
        count = lists.share_count[layer, expert, node]
        row = np.repeat(np.arange(len(count)), count)
        j = within_group(row)
        at = lists.share_start[layer, expert, node][row] + j
        part = (lists.share_num[at] - np.where(j > 0, lists.share_num[at - 1], 0)) / SHARE_ONE
        device = lists.share_device[at]
        layer, expert, node = layer[row], expert[row], node[row]
        np.add.at(computed, (layer, device), part * by_node[layer, expert, node])
        mine = device // per_node == node
        np.add.at(local, (layer[mine], device[mine]), (part * by_device[layer, expert, device])[mine])
    return computed, computed - local
