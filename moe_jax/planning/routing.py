"""Which holder a token goes to: the rule of the placement, counted for all tokens at once.

The token of rank i among the n of (source, expert) goes to the first candidate j with

    num_j n // den > i     even split over c candidates: num_j = j + 1, den = c
                           shares: num_j the running sum of the shares, den = 2^16

Letters: docs/notation.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from moe_jax.errors import UserError
from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.planning.placement import RULES, SHARE_ONE, Placement, within_group

LOOKED_AT = 1 << 22  # pairs of all layers: all that four of 1,024 devices have
PIECE = 1 << 16  # (source, expert) that are counted at a time


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
        mine = whole(loads[layer, sources[piece]])
        place, expert = np.nonzero(mine)
        row, nth, device, num, den = candidate_rows(
            placement, np.full(len(place), layer), sources[piece][place], expert
        )
        upto = num * mine[place, expert].astype(np.int64)[row] // den  # with shares it passes 32 bits
        yield layer, piece, place[row], expert[row], device, np.where(nth > 0, np.diff(upto, prepend=0), upto)


def pair_loads(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count tokens by (source, destination), what a bucket holds: loads int [L, S, E] -> int64 [L, S, D].

    Summed over sources they are what each device computes, H.

    Raises:
      UserError: loads of another shape than the placement's.
    """
    layers, experts, devices, loads = placement.layers, placement.experts, placement.devices, np.asarray(loads)
    if loads.shape != (layers, devices, experts):
        raise UserError(
            f"loads have shape [layers, sources, experts] = {loads.shape}, but the placement has {layers} layers, "
            f"{devices} devices (a source is a device) and {experts} experts; use loads of the same run"
        )
    pairs = np.zeros((layers, devices, devices), np.int64)
    for layer, piece, source, _, device, tokens in counted(placement, loads):
        pairs[layer, piece] = _summed((source, device), tokens, pairs[layer, piece].shape)
    return pairs


def expert_loads(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Count tokens by (expert, destination), what each holder computes of its expert: loads [L, S, E] -> [L, E, D]."""
    computed = np.zeros((placement.layers, placement.experts, placement.devices), np.int64)
    for layer, _, _, expert, device, tokens in counted(placement, loads):
        computed[layer] += _summed((expert, device), tokens, computed.shape[1:])
    return computed


def fullest(placement: Placement, loads: np.ndarray) -> BucketRows:
    """Return the most tokens of a pair (source, destination) of each kind, 0 where there is none: loads [L, S, E].

    Of more than `LOOKED_AT` pairs those of some sources are counted, one in every so many.
    """
    devices, per_node, most = placement.devices, placement.devices_per_node, BucketRows.even(0)
    every = -(-placement.layers * devices**2 // LOOKED_AT)
    device, sources = np.arange(devices), np.arange(0, devices, every)
    for _, piece, source, _, to, tokens in counted(placement, loads, sources):
        at = sources[piece][:, None]
        pairs, same = _summed((source, to), tokens, (len(at), devices)), at == device
        near = at // per_node == device // per_node
        kinds = {"own": same, "node": near & ~same, "far": ~near}
        rows = {kind: int(pairs.max(where=mask, initial=getattr(most, kind))) for kind, mask in kinds.items()}
        most = BucketRows(**rows)
    return most


def _summed(at: tuple[np.ndarray, np.ndarray], tokens: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Add tokens int [c] at their places in an array of this shape, int64."""
    return np.bincount(np.ravel_multi_index(at, shape), tokens, math.prod(shape)).astype(np.int64).reshape(shape)


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
        shared = np.repeat(placement.candidates.share_count > 0, per_node, axis=2)
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


def whole(loads: np.ndarray) -> np.ndarray:
    """Return integers as they are, and other numbers rounded to int64: predicted loads are no whole tokens."""
    return loads if loads.dtype.kind == "i" else np.rint(loads).astype(np.int64)
