"""Which holder a token goes to: the rule of the placement, counted for all tokens at once; shares written for it.

The token of rank i among the n of (source, expert) goes to the first candidate j with

    num_j n // den > i     even split over c candidates: num_j = j + 1, den = c
                           shares: num_j the running sum of the shares, den = 2^16

Quotas x [L, E, D] are tokens of expert e on device d; share rows keep tokens on their node where the quotas allow it.
Letters: docs/notation.md; h holder rows (layer, expert, device), p pairs (layer, expert) that have replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from moe_jax.errors import UserError
from moe_jax.planning.arrays import put
from moe_jax.planning.placement import SHARE_ONE, Placement, within_group

FEW_NODES = 64  # up to so many nodes each has share rows of its own for every replicated expert
PIECE = 1 << 16  # (source, expert) that are counted at a time


def candidate_rows(placement: Placement, layer: np.ndarray, source: np.ndarray, expert: np.ndarray):
    """Return (row, nth, device, num, den): the candidates of each (layer, source, expert), int [c] each.

    Row is the place in the arguments, by rising id, nth the candidate's j; num and den are those of the rule.
    """
    lists, node = placement.candidates, source // placement.devices_per_node
    shared, local = lists.shared[layer, expert, node], placement.holds[layer, expert, source]
    alone = ~shared & (local | np.array([name == "home" for name in placement.rule])[layer])
    count = np.where(alone, 1, lists.count[layer, expert, node])
    row = np.repeat(np.arange(len(layer)), count)
    nth, shared = within_group(row), shared[row]
    # An even split starts at another candidate for every source, so that remainders spread over the holders.
    at = lists.start[layer, expert, node][row] + np.where(shared, nth, (nth + source[row]) % count[row])
    single = np.where(local, source, placement.home[layer, expert])  # the destination where there is no choice
    device = np.where(alone[row], single[row], lists.device[at]).astype(np.int64)
    return row, nth, device, np.where(shared, lists.upto[at], nth + 1), np.where(shared, SHARE_ONE, count[row])


def counted(
    placement: Placement, loads: np.ndarray, sources: np.ndarray | None = None
) -> Iterator[tuple[int, slice, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Count by the rule, a layer and some sources at a time, so that what is alive stays small.

    Args:
      loads: [L, S, E], rounded here; sources: int [s], those that are counted; None: all.

    Yields:
      (layer, slice of `sources`, source as a place in the slice, expert, device, tokens), int [c] each.
    """
    sources, at_once = np.arange(placement.devices) if sources is None else sources, max(1, PIECE // placement.experts)
    for layer, start in itertools.product(range(placement.layers), range(0, len(sources), at_once)):
        piece = slice(start, start + at_once)
        mine = np.rint(loads[layer, sources[piece]]).astype(np.int64)
        place, expert = np.nonzero(mine)
        row, nth, device, num, den = candidate_rows(
            placement, np.full(len(place), layer), sources[piece][place], expert
        )
        upto = num * mine[place, expert][row] // den
        yield layer, piece, place[row], expert[row], device, np.where(nth > 0, np.diff(upto, prepend=0), upto)


def pair_loads(placement: Placement, loads: np.ndarray, sources: np.ndarray | None = None) -> np.ndarray:
    """Count tokens by (source, destination), what a bucket holds: loads int [L, S, E] -> int64 [L, s, D].

    Summed over all sources they are what each device computes, H.

    Args:
      sources: int [s], those that are counted; None: all.

    Raises:
      UserError: loads of another shape than the placement's.
    """
    layers, experts, devices, loads = placement.layers, placement.experts, placement.devices, np.asarray(loads)
    if loads.shape != (layers, devices, experts):
        raise UserError(
            f"loads have shape [layers, sources, experts] = {loads.shape}, but the placement has {layers} layers, "
            f"{devices} devices (a source is a device) and {experts} experts; use loads of the same run"
        )
    pairs = np.zeros((layers, devices if sources is None else len(sources), devices), np.int64)
    for layer, piece, source, _, device, tokens in counted(placement, loads, sources):
        part = pairs[layer, piece]
        part[:] = np.bincount(source * devices + device, tokens, part.size).reshape(part.shape)
    return pairs


def nearest_loads(xp, loads, holds, per_node: int):
    """Return what each device computes of its tokens, and of others', by the rule 'nearest' without its rounding.

    Args:
      xp: NumPy or jax.numpy.
      loads: [L, S, E], real; holds: bool [L, E, D]; per_node: devices of a node.

    Returns:
      (tokens of the device itself [L, E, D], tokens that it receives [L, E, D]).
    """
    layers, experts, devices = holds.shape
    by_node = (layers, experts, devices // per_node, per_node)
    mine = xp.swapaxes(loads, 1, 2)
    local = xp.where(holds, mine, 0.0)
    away = (mine - local).reshape(by_node).sum(axis=3)  # tokens of each node whose device lacks the expert
    on_node = holds.reshape(by_node).sum(axis=3)
    inside = xp.where(on_node > 0, away / xp.maximum(on_node, 1), 0.0)
    outside = xp.where(on_node > 0, 0.0, away).sum(axis=2) / holds.sum(axis=2)
    came = (inside + outside[:, :, None])[..., None] * holds.reshape(by_node)
    return local, came.reshape(holds.shape)


def expected(placement: Placement, loads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (H, R) [L, D] as real numbers for real loads: the rule without its rounding, in time linear in the loads.

    Planners judge placements with this; it differs from the counted rule by less than one token per (source, expert).
    """
    per_node, mine = placement.devices_per_node, loads.swapaxes(1, 2)
    if len(placement.shares):
        shared = np.repeat(placement.candidates.shared, per_node, axis=2)
        loads = np.where(shared, 0, mine).swapaxes(1, 2)
    local, came = nearest_loads(np, loads, placement.holds, per_node)
    home_rule = np.array([name == "home" for name in placement.rule])[:, None, None]
    if home_rule.any():
        came = np.where(home_rule, came.sum(axis=2, keepdims=True) * placement.homes, came)
    computed, received = (local + came).sum(axis=1), came.sum(axis=1)
    if len(placement.shares):
        layer, expert, device, units, node = placement.shares.T
        part, here, by_node = units / SHARE_ONE, device // per_node, mine.reshape(*mine.shape[:2], -1, per_node)
        by_node = by_node.sum(axis=3)
        has_rows = np.zeros(by_node.shape, bool)
        has_rows[tuple(placement.shares[node >= 0][:, [0, 1, 4]].T)] = True  # nodes with rows of their own
        rest = np.where(has_rows, 0, by_node).sum(axis=2)  # of nodes that take the rows for all
        given = part * np.where(node < 0, rest[layer, expert], by_node[layer, expert, node])
        kept = np.where(node < 0, ~has_rows[layer, expert, here], node == here) * part * mine[layer, expert, device]
        np.add.at(computed, (layer, device), given)
        np.add.at(received, (layer, device), given - kept)
    return computed, received


def node_edges(xp, supply, quota, home, node):
    """Return running shares [p, D] of one node's tokens of p experts over rising devices, whole units of 2^-16.

    The node's tokens first use the quota of its own holders; what is over goes to nodes with quota left, in proportion.
    Where it has no tokens it gets the split of the whole.

    Args:
      xp: NumPy or jax.numpy.
      supply: [p, Nn], tokens of all nodes; quota: float [p, D], alike in sum; home: bool [p, D].
      node: int or int32 [].
    """
    quota = xp.where(quota.sum(axis=1, keepdims=True) > 0, quota, home)  # no tokens: where the home is
    by_node = quota.reshape(*supply.shape, -1)
    demand = by_node.sum(axis=2)
    stay = xp.minimum(supply, demand)
    left, spare = (supply - stay)[:, node], demand - stay
    flow = left[:, None] * spare / xp.maximum(spare.sum(axis=1, keepdims=True), xp.finfo(demand.dtype).tiny)
    flow = put(flow, (slice(None), node), stay[:, node])  # was 0: the node has no token or no quota left
    sent = flow.sum(axis=1, keepdims=True)
    flow = xp.where(sent > 1e-9, flow / xp.maximum(sent, 1e-9), demand / demand.sum(axis=1, keepdims=True))
    there = flow / xp.where(demand > 0, demand, 1.0)  # of each unit of quota on a node
    return edges(xp, (there[:, :, None] * by_node).reshape(quota.shape))


def edges(xp, share):
    """Round running sums of shares [..., n] to units of 2^-16, of which the last is 2^16; not all are 0."""
    upto = share.cumsum(axis=-1)
    return xp.rint(upto / upto[..., -1:] * SHARE_ONE)


def with_quotas(bare: Placement, quota: np.ndarray, loads: np.ndarray, holds: np.ndarray | None = None) -> Placement:
    """Return a placement's homes with the replicas and shares of quotas [L, E, D], for loads [L, S, E].

    Shares are written for replicated experts. A node's tokens first use the quota of the node's own holders; what is
    over goes to nodes with quota left, in proportion (`node_edges`). Beyond `FEW_NODES` nodes, where that is a row for
    each holder and node, a node keeps its tokens if its own holders have quota for all of them, and all other nodes
    share what is left of the quotas, by the same rows.

    Args:
      holds: bool [L, E, D], holders of which some may have no quota; None: those with a quota.
    """
    holds = quota > 0 if holds is None else holds
    placement = bare.replace(replicas=np.argwhere(holds & ~bare.homes), shares=None, rule="shares")
    nodes, pairs = placement.nodes, np.argwhere(placement.replicated)
    if not len(pairs):
        return placement
    layer, expert = pairs.T
    supply = loads.reshape(len(loads), nodes, -1, placement.experts).sum(axis=2)[layer, :, expert]  # [p, Nn]
    mine, at_home, whole = quota[layer, expert], placement.homes[layer, expert], supply.sum(axis=1, keepdims=True)
    total = mine.sum(axis=1, keepdims=True)
    # An expert without predicted tokens goes where its home is.
    mine = np.where(total > 0, mine * (whole / np.where(total > 0, total, 1.0)), at_home * whole)
    if nodes <= FEW_NODES:
        tables = [unit_rows(pairs, node_edges(np, supply, mine, at_home, node), node) for node in range(nodes)]
        return placement.replace(shares=np.concatenate(tables))
    mine = np.where(whole > 0, mine, at_home).reshape(len(pairs), nodes, -1)
    demand = mine.sum(axis=2)
    keeps = (demand > 0) & (supply <= demand)
    left = np.where(keeps, demand - supply, demand)
    left = np.where(left.sum(axis=1, keepdims=True) > 1e-9 * demand.sum(axis=1, keepdims=True), left, demand)
    left = mine * (left / np.where(demand > 0, demand, 1.0))[:, :, None]
    p, node = np.nonzero(keeps)
    kept = unit_rows(pairs[p], edges(np, mine[keeps]), node, node * placement.devices_per_node)
    shares = [unit_rows(pairs, edges(np, left.reshape(len(pairs), -1)), -1), kept]
    return placement.replace(shares=np.concatenate(shares))


def unit_rows(pairs: np.ndarray, upto: np.ndarray, source, first=0) -> np.ndarray:
    """Write running shares [p, n] of pairs int [p, 2] as rows (layer, expert, device, share, source node): int [m, 5].

    Args:
      source: the node, int or int [p]; -1 for every one; first: the device of the first share, int or int [p].
    """
    units = np.diff(upto, axis=1, prepend=0).astype(np.int32)
    row, nth = np.nonzero(units)
    source, first = (np.broadcast_to(of, len(pairs))[row] for of in (source, first))
    return np.column_stack([pairs[row], first + nth, units[row, nth], source])


def split_evenly(placement: Placement, loads: np.ndarray) -> Placement:
    """Let every source split an expert's tokens in the same proportions: those of the whole under this placement.

    Device loads stay what they are for `loads` [L, S, E]; what one source sends one device comes near the mean of all
    pairs, so the buckets of an exchange whose rows are padded can be small. Tokens travel that a nearer holder would
    have kept, which only an exchange of exact rows would gain from.
    """
    if not len(placement.replicas):
        return placement
    kept, devices, computed = placement.replicated, placement.devices, np.zeros(placement.holds.shape)
    for layer, _, _, expert, device, tokens in counted(placement, loads):  # what each holder computes of its expert
        of_layer = np.bincount(expert * devices + device, tokens, computed[layer].size)
        computed[layer] += of_layer.reshape(computed[layer].shape)
    computed = np.where(computed.sum(axis=2, keepdims=True) > 0, computed, placement.homes)[kept]
    return placement.replace(shares=unit_rows(np.argwhere(kept), edges(np, computed), -1), rule="shares")
