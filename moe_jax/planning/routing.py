"""Which holder a token goes to: the rule of the placement, counted for all tokens at once.

The token of rank i among the n of (source, expert) goes to the first candidate j with

    num_j n // den > i     even split over c candidates: num_j = j + 1, den = c
                           shares: num_j the running sum of the shares, den = 2^16

Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.errors import UserError
from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.planning.placement import RULES, SHARE_ONE, Placement, within_group

LOOKED_AT = 1 << 20  # pairs of a layer, all of up to 1,024 devices


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


def pair_loads(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count tokens by (source, destination), what a bucket holds: loads int [L, S, E] -> int64 [L, S, D].

    Summed over sources they are what each device computes, H.

    Raises:
      UserError: loads of another shape than the placement's.
    """
    layers, experts, devices = placement.layers, placement.experts, placement.devices
    loads, (pair, device) = np.asarray(loads), placement.holders
    if loads.shape != (layers, devices, experts):
        raise UserError(
            f"loads have shape [layers, sources, experts] = {loads.shape}, but the placement has {layers} layers, "
            f"{devices} devices (a source is a device) and {experts} experts; use loads of the same run"
        )
    pairs = np.zeros((layers, devices, devices), np.int64)
    for layer, rows in enumerate(np.split(np.arange(len(pair)), np.searchsorted(pair, np.arange(1, layers) * experts))):
        np.add.at(pairs[layer].T, device[rows], from_everywhere(placement, loads, rows).reshape(len(rows), -1))
    return pairs


def owned(placement: Placement) -> np.ndarray:
    """Return bool [L, E, Nn]: the node has share rows of its own for the expert."""
    found = np.zeros((*placement.home.shape, placement.nodes), bool)
    layer, expert, _, _, node = placement.shares[placement.shares[:, 4] >= 0].T
    found[layer, expert, node] = True
    return found


def expected(placement: Placement, loads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (H, R) [L, D] as real numbers for real loads: the rule without its rounding, in time linear in the loads.

    Planners judge placements with this; it differs from the counted rule by less than one token per (source, expert).
    """
    layers, devices, per_node = placement.layers, placement.devices, placement.devices_per_node
    lists, (at, device) = placement.candidates, placement.holders
    at = (*np.divmod(at, placement.experts), device // per_node)  # [L, E, Nn]
    at_home = device == placement.home[at[:2]]
    by_node = loads.reshape(layers, placement.nodes, per_node, -1).sum(axis=2).swapaxes(1, 2)  # [L, E, Nn]
    shared = lists.share_count > 0
    local = np.where(shared[at], 0.0, loads[at[0], device, at[1]])
    away = np.where(shared, 0.0, by_node)  # tokens of each node whose device lacks the expert
    away -= np.bincount(np.ravel_multi_index(at, away.shape), local, away.size).reshape(away.shape)
    outside = np.where(lists.node_count > 0, 0.0, away).sum(axis=2) / lists.count
    tokens = local + away[at] / lists.node_count[at] + outside[at[:2]]
    home_rule = np.array([name == "home" for name in placement.rule])[at[0]]
    tokens = np.where(home_rule, local + at_home * away.sum(axis=2)[at[:2]], tokens)
    place = at[0] * devices + device
    if len(placement.shares):
        layer, expert, device, units, node = placement.shares.T
        own, part, here = owned(placement), units / SHARE_ONE, device // per_node
        rest = np.where(own, 0.0, by_node).sum(axis=2)  # of nodes that take the rows for all
        given = part * np.where(node < 0, rest[layer, expert], by_node[layer, expert, node])
        kept = np.where(node < 0, ~own[layer, expert, here], node == here) * part * loads[layer, device, expert]
        place = np.concatenate([place, layer * devices + device])
        tokens, local = np.concatenate([tokens, given]), np.concatenate([local, kept])
    computed, local = (np.bincount(place, of, layers * devices).reshape(layers, devices) for of in (tokens, local))
    return computed, computed - local


def whole(loads: np.ndarray) -> np.ndarray:
    """Return integers as they are, and other numbers rounded to int64: predicted loads are no whole tokens."""
    return loads if loads.dtype.kind == "i" else np.rint(loads).astype(np.int64)


def taken(placement: Placement, loads: np.ndarray, row: np.ndarray, node: np.ndarray) -> np.ndarray:
    """Count the tokens that single holders get from all sources of a node, by the rule above.

    Args:
      row: int [n], of `placement.holders`; node: int [n, k]; loads: [L, S, E], rounded here.

    Returns:
      int64 [n, k, Dn].
    """
    lists, per_node, nodes = placement.candidates, placement.devices_per_node, placement.nodes
    pair, device = (part[row][:, None] for part in placement.holders)
    layer, expert = np.divmod(pair, placement.experts)
    at, tokens = (layer, expert, node), np.zeros((*node.shape, per_node), np.int64)
    total = whole(loads.reshape(placement.layers, nodes, per_node, -1)[layer, node, :, expert])
    shared = lists.share_count[at] > 0
    if shared.any():
        keys = placement.share_keys
        group = placement.shares[np.where(shared, lists.share_start[at], 0), 4] + 1
        key = (pair * (nodes + 1) + group) * placement.devices + device
        place = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        high, units = lists.share_num[place], placement.shares[place, 3] * (shared & (keys[place] == key))
        tokens = (high[:, :, None] * total >> 16) - ((high - units)[:, :, None] * total >> 16)
    if shared.all():
        return tokens
    source, total = node[:, :, None] * per_node + np.arange(per_node), total.astype(np.int64)
    inside, at_home = lists.node_count[at], device == placement.home[layer, expert]
    start = np.where(inside > 0, lists.node_start[at], lists.start[layer, expert])
    count = np.where(inside > 0, inside, lists.count[layer, expert])[:, :, None]
    nth = ((row[:, None] - start)[:, :, None] - source) % count
    reached = (inside == 0) | (node == device // per_node)
    turn = np.where(reached[:, :, None], (nth + 1) * total // count - nth * total // count, 0)
    home_rule = np.array([name == "home" for name in placement.rule])[layer]
    turn = np.where(home_rule[:, :, None], at_home[:, :, None] * total, turn)
    local = placement.holds.reshape(placement.layers, -1, nodes, per_node)[at]
    turn = np.where(local, (source == device[:, :, None]) * total, turn)
    return np.where(shared[:, :, None], tokens, turn)


def from_everywhere(placement: Placement, loads: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Count the tokens that holders get from every source: rows int [n] as in `taken` -> int64 [n, Nn, Dn]."""
    return taken(placement, loads, rows, np.broadcast_to(np.arange(placement.nodes), (len(rows), placement.nodes)))


def held_loads(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count what each holder computes of its expert: loads [L, S, E] -> int64 [h], by the rows of `holders`."""
    layers, experts, nodes, per_node = placement.layers, placement.experts, placement.nodes, placement.devices_per_node
    lists, (pair, device) = placement.candidates, placement.holders
    at = (*np.divmod(pair, experts), device // per_node)
    shared = lists.share_count > 0
    split = whole(loads).reshape(layers, nodes, per_node, experts)
    near = taken(placement, loads, np.arange(len(pair)), at[2][:, None]).sum(axis=(1, 2))
    tokens = np.where(shared[at], 0, near)
    # what comes from other nodes, without shares: to the only one, or all of them in turn
    left = np.where(shared, 0, split.sum(axis=2).swapaxes(1, 2)).sum(axis=2).ravel()
    left -= np.rint(np.bincount(pair, tokens, len(left))).astype(np.int64)
    one = np.array([name == "home" for name in placement.rule])[:, None] | (lists.count == 1)
    tokens += (one[at[:2]] & (device == placement.home[at[:2]])) * left[pair]
    for layer, expert in np.argwhere(~one & (left.reshape(one.shape) > 0)):
        node = np.flatnonzero(~shared[layer, expert] & (lists.node_count[layer, expert] == 0))[None]
        start, many = lists.start[layer, expert], max(1, (1 << 20) // (node.size * per_node + 1))
        rows = np.arange(start, start + lists.count[layer, expert])
        for row in np.split(rows, range(many, len(rows), many)):
            tokens[row] += taken(placement, loads, row, np.repeat(node, len(row), axis=0)).sum(axis=(1, 2))
    if not len(placement.shares):
        return tokens
    # by share rows: of one node, or of all without rows of their own, whose sources have few different numbers
    layer, expert, _, _, node = placement.shares.T
    held, others, key = placement.find(placement.shares), ~owned(placement), layer * experts + expert
    own, every = node >= 0, np.flatnonzero(node < 0)
    np.add.at(tokens, held[own], taken(placement, loads, held[own], node[own, None]).sum(axis=(1, 2)))
    for rows in np.split(every, np.flatnonzero(np.diff(key[every], prepend=-1)))[1:]:
        at = layer[rows[0]], expert[rows[0]]
        many = np.bincount(split[at[0], :, :, at[1]][others[at]].ravel())
        value = np.flatnonzero(many)
        upto = (lists.share_num[rows, None] * value >> 16) @ many[value]
        tokens[held[rows]] += np.diff(upto, prepend=0)
    return tokens


def fullest(placement: Placement, loads: np.ndarray) -> BucketRows:
    """Return the most tokens of a pair (source, destination) of each kind, 0 where there is none: loads [L, S, E].

    Devices are taken by falling bounds of what one source on another node can send them, until no bound is higher than
    what was found, and no more than have `LOOKED_AT` pairs: one beyond those could be fuller by what bounds are loose.
    """
    lists, (pair, device), per_node = placement.candidates, placement.holders, placement.devices_per_node
    at = np.divmod(pair, placement.experts)
    place = at[0] * placement.devices + device
    by_device = np.argsort(place, kind="stable")  # rows of holders, those of a device one after the other
    place = place[by_device]
    start = np.flatnonzero(np.diff(place, prepend=-1))
    end = np.append(start[1:], len(place))
    near = taken(placement, loads, by_device, (device[by_device] // per_node)[:, None])[:, 0]
    near = np.add.reduceat(near, start)
    own = np.arange(per_node) == (place[start] % per_node)[:, None]
    # bounds: of a share, or of one of so many holders in turn
    most = whole(loads.max(axis=1)).astype(np.int64)  # times a share it passes 32 bits
    bound = np.where((lists.node_count == 0).any(axis=2), np.ceil(most / lists.count), 0)[at]
    home_rule = np.array([name == "home" for name in placement.rule])[at[0]]
    bound = np.where(home_rule, most[at] * (device == placement.home[at]), bound)
    if len(placement.shares):
        bound[(lists.share_count > 0).all(axis=2)[at]] = 0
        far = placement.shares[placement.shares[:, 4] != placement.shares[:, 2] // per_node]
        held = placement.find(far)
        np.maximum.at(bound, held, np.ceil(most[at][held] * far[:, 3] / SHARE_ONE))
    bound = np.add.reduceat(bound[by_device], start)
    order, far, done, many = np.argsort(-bound), 0, 0, 1
    while done < min(len(order), LOOKED_AT // placement.devices * placement.layers) and bound[order[done]] > far:
        group = order[done : done + many]
        length = end[group] - start[group]
        row = by_device[np.repeat(start[group], length) + within_group(np.repeat(np.arange(len(group)), length))]
        tokens = from_everywhere(placement, loads, row)
        tokens[np.arange(len(row)), device[row] // per_node] = 0
        far = max(far, int(np.add.reduceat(tokens, np.cumsum(length) - length).max()))
        done, many = done + many, min(2 * many, 8)
    return BucketRows(own=int(near[own].max()), node=int(near[~own].max(initial=0)), far=far)
