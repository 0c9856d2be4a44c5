"""How much of an expert each holder computes: quotas solved for equal devices, share rows, and the split of tokens.

Quotas x [L, E, D] are tokens of expert e on device d; share rows keep tokens on their node where the quotas allow it.
Letters: docs/notation.md; h holder rows (layer, expert, device), p pairs (layer, expert) that have replicas.
"""

from __future__ import annotations

import numpy as np

from moe_jax.cluster import Links
from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.planning import routing
from moe_jax.planning.arrays import loop, put
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import SHARE_ONE, Placement

SPLITS = ("plan", "even")
FEW_NODES = 64  # up to so many nodes each has share rows of its own for every replicated expert
STAY = 1.25  # how much dearer the split in use may get before the other one takes over


def level_quotas(xp, totals, holds, homes, sweeps: int, error=0.0):
    """Even out device loads over fixed holders: totals [L, E], holds, homes bool [L, E, D] -> quota [L, E, D].

    Every token starts at its expert's home; one expert after the other fills its holders to a common level, the others
    held fixed. Each step lowers the sum of squared device loads, whose minimum over all splits also has the least
    possible maximum. A layer is done when a sweep changes little; what it gets depends on its own loads alone.

    Args:
      xp: NumPy or jax.numpy.
      error: [L, 1] or one, standard error of the totals, relative and independent for each expert. What is lowered then
        is the expected sum of squares, sum_d (sum_e x)^2 + sum_e (error x)^2: quotas x spread over more holders.
    """
    (layers, _, devices), stiff = holds.shape, 1.0 + error**2
    rows, upto = xp.arange(layers), xp.arange(1, devices + 1)[None]
    replicated = holds.sum(axis=2) > 1
    count, order = replicated.sum(axis=1), xp.argsort(~replicated, axis=1, stable=True)

    def pour(turn, carry):
        quota, load, going = carry
        expert = order[:, turn]
        mine, holders = quota[rows, expert], holds[rows, expert]
        base = load - mine
        # The level to which the expert's tokens fill up its holders, over the lowest as many as get wet.
        ground = xp.sort(xp.where(holders, base, xp.inf), axis=1)
        dry = xp.isinf(ground)
        level = (totals[rows, expert][:, None] * stiff + xp.where(dry, 0.0, ground).cumsum(axis=1)) / upto
        wet = ~dry & ((level > ground) | (upto == 1))
        level = level[rows, devices - 1 - wet[:, ::-1].argmax(axis=1)]
        new = xp.where(holders, xp.maximum((level[:, None] - base) / stiff, 0.0), 0.0)
        new = xp.where((going & (turn < count))[:, None], new, mine)
        return put(quota, (rows, expert), new), base + new, going

    def sweep(_, carry):
        _, load, going = carry
        quota, after, _ = loop(xp, pour, carry, count.max())
        return quota, after, going & (xp.abs(after - load).max(axis=1) > 1e-3 * after.mean(axis=1))

    quota = xp.where(homes, totals[:, :, None], 0.0)
    start = quota, quota.sum(axis=1), xp.full(layers, True)
    return loop(xp, sweep, start, sweeps, lambda carry: carry[2].any())[0]


def node_flow(xp, supply, demand, node):
    """Return the parts [p, Nn] in which the nodes compute one node's tokens of p experts; each row sums to 1.

    The node's tokens first use the quota of its own holders; what is over goes to nodes with quota left, in proportion.
    Where it has no tokens it gets the split of the whole.

    Args:
      xp: as in `level_quotas`; supply, demand: [p, Nn], tokens and quotas of all nodes, alike in sum; demand float.
      node: int or int32 [].
    """
    stay = xp.minimum(supply, demand)
    left, spare = (supply - stay)[:, node], demand - stay
    flow = left[:, None] * spare / xp.maximum(spare.sum(axis=1, keepdims=True), xp.finfo(demand.dtype).tiny)
    flow = put(flow, (slice(None), node), stay[:, node])  # was 0: the node has no token or no quota left
    plain = demand / demand.sum(axis=1, keepdims=True)
    sent = flow.sum(axis=1, keepdims=True)
    return xp.where(sent > 1e-9, flow / xp.maximum(sent, 1e-9), plain)


def node_edges(xp, supply, quota, home, node):
    """Return running shares [p, D] of one node's tokens (`node_flow`) over rising devices, whole units of 2^-16.

    Args:
      xp, node: as in `node_flow`; supply: [p, Nn], tokens of all nodes; quota: [p, D], alike in sum; home: bool [p, D].
    """
    quota = xp.where(quota.sum(axis=1, keepdims=True) > 0, quota, home)  # no tokens: where the home is
    by_node = quota.reshape(*supply.shape, -1)
    demand = by_node.sum(axis=2)
    there = node_flow(xp, supply, demand, node) / xp.where(demand > 0, demand, 1.0)
    return edges(xp, (there[:, :, None] * by_node).reshape(quota.shape))


def edges(xp, share):
    """Round running sums of shares [..., n] to units of 2^-16, of which the last is 2^16; not all are 0."""
    upto = share.cumsum(axis=-1)
    return xp.rint(upto / upto[..., -1:] * SHARE_ONE)


def share_rows(placement: Placement, quota: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Write quotas [L, E, D] of replicated experts as rows (layer, expert, device, share, source node), int32 [m, 5].

    A node's tokens of loads [L, S, E] first use the quota of the node's own holders; what is over goes to nodes with
    quota left, in proportion (`node_flow`). Beyond `FEW_NODES` nodes, where that is a row for each holder and node, a
    node keeps its tokens if its own holders have quota for all of them, and all other nodes share what is left of the
    quotas, by the same rows.
    """
    nodes, pairs = placement.nodes, np.argwhere(placement.replicated)
    if not len(pairs):
        return np.zeros((0, 5), np.int32)
    layer, expert = pairs.T
    supply = loads.reshape(len(loads), nodes, -1, placement.experts).sum(axis=2)[layer, :, expert]  # [p, Nn]
    mine, at_home, whole = quota[layer, expert], placement.homes[layer, expert], supply.sum(axis=1, keepdims=True)
    total = mine.sum(axis=1, keepdims=True)
    # An expert without predicted tokens goes where its home is.
    mine = np.where(total > 0, mine * (whole / np.where(total > 0, total, 1.0)), at_home * whole)
    if nodes <= FEW_NODES:
        tables = [unit_rows(pairs, node_edges(np, supply, mine, at_home, node), node) for node in range(nodes)]
        return np.concatenate(tables)
    mine = np.where(whole > 0, mine, at_home).reshape(len(pairs), nodes, -1)
    demand = mine.sum(axis=2)
    keeps = (demand > 0) & (supply <= demand)
    left = np.where(keeps, demand - supply, demand)
    left = np.where(left.sum(axis=1, keepdims=True) > 1e-9 * demand.sum(axis=1, keepdims=True), left, demand)
    left = mine * (left / np.where(demand > 0, demand, 1.0))[:, :, None]
    p, node = np.nonzero(keeps)
    kept = unit_rows(pairs[p], edges(np, mine[keeps]), node, node * placement.devices_per_node)
    return np.concatenate([unit_rows(pairs, edges(np, left.reshape(len(pairs), -1)), -1), kept])


def unit_rows(pairs: np.ndarray, upto: np.ndarray, source, first=0) -> np.ndarray:
    """Write running shares [p, n] of pairs int [p, 2] as rows (layer, expert, device, share, source node): int [m, 5].

    Args:
      source: the node, int or int [p]; -1 for every one; first: the device of the first share, int or int [p].
    """
    units = np.diff(upto, axis=1, prepend=0).astype(np.int32)
    row, nth = np.nonzero(units)
    source, first = (np.broadcast_to(of, len(pairs))[row] for of in (source, first))
    return np.column_stack([pairs[row], first + nth, units[row, nth], source])


def with_quotas(bare: Placement, quota: np.ndarray, loads: np.ndarray, holds: np.ndarray | None = None) -> Placement:
    """Return a placement's homes with the replicas and shares of quotas [L, E, D], for loads [L, S, E].

    Args:
      holds: bool [L, E, D], holders of which some may have no quota; None: those with a quota.
    """
    holds = quota > 0 if holds is None else holds
    placement = bare.replace(replicas=np.argwhere(holds & ~bare.homes), rule="shares")
    return placement.replace(shares=share_rows(placement, quota, loads))


def split_evenly(placement: Placement, loads: np.ndarray) -> Placement:
    """Let every source split an expert's tokens in the same proportions: those of the whole under this placement.

    Device loads stay what they are for `loads` [L, S, E]; what one source sends one device comes near the mean of all
    pairs, so the buckets of an exchange whose rows are padded can be small. Tokens travel that a nearer holder would
    have kept, which only an exchange of exact rows would gain from.
    """
    if not len(placement.replicas):
        return placement
    kept, computed = placement.replicated, routing.expert_loads(placement, loads)
    computed = np.where(computed.sum(axis=2, keepdims=True) > 0, computed, placement.homes)[kept]
    return placement.replace(shares=unit_rows(np.argwhere(kept), edges(np, computed), -1), rule="shares")


def padded_seconds(rows: BucketRows, placement: Placement, cost: Cost) -> float:
    """Return the seconds of one exchange of buckets of so many rows between all devices of the placement."""
    sent = rows.carried(placement.devices, placement.devices_per_node)
    inside, across = sent.node * cost.exchanged_bytes, sent.far * cost.exchanged_bytes
    links = Links.of(cost.cluster, placement.devices, "the split of tokens", cost.shards)
    return float(links.uniform(inside, across))


def choose_split(placement: Placement, loads: np.ndarray, cost: Cost, now: str = "") -> tuple[Placement, str]:
    """Return (placement, split) whose padded exchange takes less time for loads [L, S, E].

    'plan' is as the planner says, near holders first; 'even' in the same proportions from every source. A padded
    exchange carries as many rows between all pairs of a kind (own device, own node, other nodes) as the fullest pair of
    that kind needs: near holders keep most rows at home and leave the rest uneven, an even split sends more and leaves
    nothing empty. Neither is less for every plan.

    Args:
      now: the split in use, kept until the other is cheaper by `STAY`; '' for none yet.
    """
    if not len(placement.replicas):
        return placement, now
    plans, price = {"plan": placement, "even": split_evenly(placement, loads)}, {}
    for name, plan in plans.items():
        price[name] = padded_seconds(routing.fullest(plan, loads).each(lambda size: max(size, 1)), plan, cost)
    other = {"plan": "even", "even": "plan"}.get(now)
    if other is None:
        best = min(SPLITS, key=price.__getitem__)
    else:
        best = other if price[other] * STAY < price[now] else now
    return plans[best], best
