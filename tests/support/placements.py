"""Placements drawn at random, and experts in the order of a placement's bank."""

import jax
import numpy as np

from moe_jax.planning import routing
from moe_jax.planning.placement import SHARE_ONE, Placement, bank_rows


def random_placement(seed, *, layers, experts, devices, replica_slots, fewest=0, rules="nearest", per_node=None):
    """Draw homes (L E / D on each device), `fewest` to `replica_slots` replicas a device and layer, rules and shares.

    Args:
      rules: 'nearest' everywhere without shares; 'any', drawn for each layer, with shares for most experts of a layer
        that has them; 'every', each rule as often, with shares for all experts of such a layer.
    """
    rng = np.random.default_rng(seed)
    home = rng.permutation(np.repeat(np.arange(devices), layers * experts // devices)).reshape(layers, experts)
    replicas = []
    for layer, device in np.ndindex(layers, devices):
        away = np.flatnonzero(home[layer] != device)
        number = min(len(away), rng.integers(fewest, replica_slots + 1))
        replicas += [(layer, e, device) for e in rng.choice(away, number, replace=False)]
    replicas = np.array(replicas, np.int32).reshape(-1, 3)
    if rules == "nearest":
        return Placement(home, replicas, devices=devices, devices_per_node=per_node)
    kinds = ["nearest", "home", "shares"]
    rule = rng.choice(kinds, layers) if rules == "any" else rng.permutation(kinds * layers)[:layers]
    rule = tuple(rule.tolist())
    shares = []
    for layer, expert in np.ndindex(layers, experts):
        if rule[layer] == "shares" and (rules == "every" or rng.random() < 0.7):
            mine = replicas[(replicas[:, 0] == layer) & (replicas[:, 1] == expert), 2]
            holders = [*mine.tolist(), int(home[layer, expert])]
            cuts = np.sort(rng.integers(0, SHARE_ONE + 1, len(holders) - 1))
            parts = np.diff([0, *cuts, SHARE_ONE])
            shares += [(layer, expert, d, s, -1) for d, s in zip(holders, parts.tolist(), strict=True)]
    return Placement(home, replicas, shares or None, rule, devices=devices, devices_per_node=per_node)


def counted_destinations(placement, loads):
    """Count tokens by destination: loads int [L, S, E] -> int64 [L, S, E, D]."""
    counts = np.zeros((*loads.shape, placement.devices), np.int64)
    for layer, piece, source, expert, device, tokens in routing.counted(placement, loads):
        np.add.at(counts[layer, piece], (source, expert, device), tokens)
    return counts


def to_bank(experts, placement, rows=None):
    """Return leaves [D Rb, ...] in the order of a bank, from leaves [L, E, ...]; `rows` is Rb, or else the least."""
    at = bank_rows(placement)
    rows = int(at.max()) + 1 if rows is None else rows
    at = (placement.home * rows + at).ravel()

    def one(value):
        bank = np.zeros((placement.devices * rows, *value.shape[2:]), value.dtype)
        bank[at] = np.asarray(value).reshape(-1, *value.shape[2:])
        return bank

    return jax.tree.map(one, experts)
