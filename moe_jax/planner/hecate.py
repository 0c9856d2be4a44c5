"""Hecate's sparse materialization: the heaviest experts get replicas for one step, nodes without them first.

Inputs: loads, homes, tau and mu. Outputs: the homes with replicas, rule `nearest`. `reshard` moves homes (sharding.py);
`refine` is the calibration after the gate.

Letters: docs/notation.md; tau experts that may get replicas, Et experts considered, mu replicas of a device.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.placement import Placement, routing
from moe_jax.planner.contract import PlannerBase, falling, replicated_everywhere, rows_of
from moe_jax.planner.cost import Cost
from moe_jax.planner.registry import balancer, knob
from moe_jax.planner.sharding import shard_homes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HecateKnobs:
    """The knobs of Hecate: each of its three parts can be off."""

    materialize: bool = knob(True, "replicas for one step by sparse materialization")
    shard_every: int | None = knob(None, "steps between reshards; 0: homes stay even; None: 100, as the paper")
    calibrate: bool | None = knob(None, "a second decision, from the step's own counts; None: on")

    def check(self):
        if self.shard_every is not None:
            self.whole("shard_every", 0)


# Loads are predicted by the mean of the last 5 steps (section 4.2); a reshard every 100 (section 5.1).
_PAPER = {"predictor": "window", "shard_every": 100, "calibrate": True}


@balancer("hecate", knobs=HecateKnobs, defaults=_PAPER, after_gate=True)
class HecatePlanner(PlannerBase):
    """Materialize replicas each step, reshard homes now and then, calibrate after the gate; each part can be off.

    Source: Hecate, algorithms 1 and 2, sections 4.2 to 4.4.
    """

    original = "sparse all-gather and reduce-scatter every step; state moves at a reshard"

    @classmethod
    def decides_late(cls, config):
        return config.calibrate or config.when == "after_gate"

    @property
    def reshard_every(self):
        return self.config.shard_every

    def propose(self, loads, placement, cost):
        bare = placement.replace(replicas=None, shares=None, rule="nearest")
        if not self.config.materialize:
            return bare
        layers, devices = bare.layers, bare.devices
        tau = min(cost.overlap(self.config.name), bare.experts)
        mu = min(cost.replica_slots, tau)
        totals = np.asarray(loads, np.float64).sum(axis=1)
        order = falling(totals)[:, :tau]
        if tau <= mu:
            chosen = np.zeros(bare.home.shape, bool)
            np.put_along_axis(chosen, order, True, axis=1)
            return bare.replace(replicas=replicated_everywhere(bare, chosen))
        counts = slots_by_load(np.take_along_axis(totals, order, axis=1), devices * mu, devices - 1)
        return bare.replace(replicas=rows_of(spread_replicas(bare, order, counts, np.full((layers, devices), mu))))

    def refine(self, loads, placement, cost):
        """Add replicas in what memory is left, layer by layer, where that saves more than the late gather costs.

        The first gather runs beside attention; this one does not, so all of its time counts.
        """
        if not self.decides_late(self.config):
            return placement
        name = self.config.name
        loads = np.asarray(loads, np.float64)
        tau = min(cost.overlap(name), placement.experts)
        used = np.zeros((placement.layers, placement.devices), int)
        np.add.at(used, (placement.replicas[:, 0], placement.replicas[:, 2]), 1)
        free = cost.replica_slots - used
        totals = loads.sum(axis=1)
        order = falling(totals)[:, :tau]
        if not order.size or free.max() <= 0:
            return placement
        # Replicas that stand already serve part of a load: share the free slots by what is left per holder.
        held = placement.holds.sum(axis=2)
        weight = np.take_along_axis(totals / held, order, axis=1)
        most = np.take_along_axis(placement.devices - held, order, axis=1)
        counts = slots_by_load(weight, free.sum(axis=1), most)
        added = spread_replicas(placement, order, counts, free)
        layer_pays = self._pays(loads, placement, added, cost)
        return placement.replace(
            replicas=np.concatenate([placement.replicas, rows_of(added & layer_pays[:, None, None])])
        )

    def reshard(self, loads, placement, cost):
        tau = min(cost.overlap(self.config.name), placement.experts)
        return shard_homes(np.asarray(loads, np.float64).sum(axis=1), placement, tau)

    def _pays(self, loads: np.ndarray, placement: Placement, added: np.ndarray, cost: Cost) -> np.ndarray:
        """Say for each layer whether the calibrated placement is faster, its gather included: bool [L]."""
        name = self.config.name
        before = routing.expected(placement, loads)
        trial = placement.replace(replicas=np.concatenate([placement.replicas, rows_of(added)]))
        after = routing.expected(trial, loads)
        gained = cost.layer(*before, np.zeros(len(loads)), name) - cost.layer(*after, np.zeros(len(loads)), name)
        replicated = added.any(axis=2)
        late = cost.transfer((added.sum(axis=2) + replicated).sum(axis=1), placement.devices, name)
        return gained > 2 * late  # a gather now and one more reduce later


def slots_by_load(loads: np.ndarray, slots, most) -> np.ndarray:
    """Share slots by load, largest remainder, at most `most` each; what is over goes to the next in order.

    Args:
      loads: [L, Et], falling; slots: int or [L]; most: int or [L, Et].

    Returns:
      int [L, Et], replicas of each expert.
    """
    slots = np.broadcast_to(np.asarray(slots), len(loads))
    total = loads.sum(axis=1, keepdims=True)
    even = np.full(loads.shape, 1.0 / loads.shape[1])
    quota = np.where(total > 0, loads / np.where(total > 0, total, 1.0), even) * slots[:, None]
    count = np.floor(quota + 1e-9).astype(int)
    rank = np.argsort(np.argsort(-(quota - count), axis=1, kind="stable"), axis=1)
    count += rank < (slots - count.sum(axis=1))[:, None]
    most = np.broadcast_to(np.asarray(most), loads.shape)
    over = np.zeros(len(loads), int)
    for at in range(loads.shape[1]):
        wanted = count[:, at] + over
        count[:, at] = np.minimum(wanted, most[:, at])
        over = wanted - count[:, at]
    return count


def spread_replicas(placement: Placement, order: np.ndarray, counts: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Place replicas one by one: nodes that lack the expert first, then nodes and devices with most free slots.

    Args:
      order: int [L, Et], experts by falling load; counts: int [L, Et], replicas of each.
      free: int [L, D], free replica slots.

    Returns:
      bool [L, E, D], the new replicas. A replica that finds no device is left out.
    """
    layers, devices, per_node = placement.layers, placement.devices, placement.devices_per_node
    nodes, rows = placement.nodes, np.arange(layers)
    steps = int(counts.sum(axis=1).max(initial=0))
    ends = counts.cumsum(axis=1)
    node_of = np.arange(devices) // per_node
    free = free.copy()
    node_free = free.reshape(layers, nodes, per_node).sum(axis=2)
    held = placement.holds.copy()
    node_held = np.any(held.reshape(layers, placement.experts, nodes, per_node), axis=3)
    added = np.zeros_like(held)
    most = int(free.max(initial=0)) + 1
    in_node = most * per_node * most
    for step in range(steps):
        at = np.minimum((ends <= step).sum(axis=1), order.shape[1] - 1)
        expert = order[rows, at]
        node_score = node_free * most + ~node_held[rows, expert] * in_node
        score = np.where((free > 0) & ~held[rows, expert], node_score[:, node_of] + free, -1)
        device = score.argmax(axis=1)
        ok = (score[rows, device] >= 0) & (step < ends[:, -1])
        layer, expert, device = rows[ok], expert[ok], device[ok]
        node = node_of[device]
        held[layer, expert, device] = added[layer, expert, device] = True
        node_held[layer, expert, node] = True
        free[layer, device] -= 1
        node_free[layer, node] -= 1
    return added
