"""Hecate's sparse materialization: the heaviest experts get replicas for one step, nodes without them first.

`reshard` moves homes (sharding.py); `refine` is the calibration after the gate.

Letters: docs/notation.md; tau experts that may get replicas, Et experts considered, mu replicas of a device.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.cluster import AbsentFigureError
from moe_jax.planning import routing
from moe_jax.planning.balancer import Planner, balancer, falling, home_loads, knob, replicated_everywhere
from moe_jax.planning.fastermoe import shadow_rates
from moe_jax.planning.placement import Placement
from moe_jax.planning.sharding import shard_homes
from moe_jax.planning.transfer_sizes import TransferSizes, fit_replicas, transfer_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HecateKnobs:
    """The knobs of Hecate: each of its three parts can be off."""

    materialize: bool = knob(True, "replicas for one step by sparse materialization")
    shard_every: int | None = knob(None, "steps between reshards; 0: homes stay even; None: 100, as the paper")
    calibrate: bool | None = knob(None, "a second decision, from the step's own counts; None: on")
    late_slots: int = knob(2, "replicas that a device may get by that decision, in slots of their own")

    def check(self):
        self.whole("late_slots", 1)
        if self.shard_every is not None:
            self.whole("shard_every", 0)


# Loads are predicted by the mean of the last 5 steps (section 4.2); a reshard every 100 (section 5.1).
_PAPER = {"predictor": "window", "shard_every": 100, "calibrate": True}


@balancer("hecate", knobs=HecateKnobs, defaults=_PAPER, after_gate=True)
class HecatePlanner(Planner):
    """Materialize replicas each step, reshard homes now and then, calibrate after the gate; each part can be off.

    Source: Hecate, algorithms 1 and 2, sections 4.2 to 4.4.
    """

    schedule = "hecate"
    late_by = "when = 'after_gate' or calibrate = True"
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
        free, limits = np.full((layers, devices), mu), self._limits(bare, tau)
        added = spread_replicas(bare, order, counts, free, limits)
        free = free - added.sum(axis=1)
        if free.any():
            # What did not fit the transfer leaves slots to others: share them by what is left per holder.
            placed = bare.replace(replicas=np.argwhere(added))
            self.increment("transfer_cut", free.sum())
            added |= spread_replicas(placed, order, _slots_left(totals, placed, order, free), free, limits)
        return bare.replace(replicas=np.argwhere(added))

    def _limits(self, placement: Placement, tau: int) -> tuple[int, int]:
        """Return the most experts that a device sends, and that a node sends one other: even, or one more a device."""
        return 1 + -(-tau // placement.devices), -(-tau // placement.nodes)

    def refine(self, loads, placement, cost):
        """Add replicas in the late slots, layer by layer, where that saves more than the late gather costs.

        The first gather runs beside attention; this one does not, so all of its time counts. An expert whose new
        replicas do not fit the late transfer gets none of them.
        """
        if not self.decides_late(self.config):
            return placement
        name = self.config.name
        loads = np.asarray(loads, np.float64)
        tau = min(cost.overlap(name), placement.experts)
        slots = self.config.late_slots if cost.late is None else cost.late.slots
        free = np.full((placement.layers, placement.devices), slots)
        totals = loads.sum(axis=1)
        order = falling(totals)[:, :tau]
        if not order.size or slots <= 0:
            return placement
        # Replicas that stand already serve part of a load: share the free slots by what is left per holder.
        added = spread_replicas(placement, order, _slots_left(totals, placement, order, free), free)
        if cost.late is not None:
            added, cut = fit_replicas(added, order, placement.home, cost.late)
            self.increment("late_cut", cut)
        compute, exchange, shadow = shadow_rates(cost, name)  # those of the rule on the device
        seconds = []
        for trial in (placement, _with_more(placement, added)):
            computed, received = routing.expected(trial, loads)
            seconds.append(compute * computed.max(axis=1) + exchange * received.max(axis=1))
        per_node = placement.devices_per_node if cost.late is None else cost.late.inside
        sizes = transfer_sizes(placement.home, added, per_node)
        late = cost.late_price(sizes, shadow / placement.devices * sizes.holders)  # a gather now, a reduce later
        pays = seconds[0] - seconds[1] > late
        return _with_more(placement, added & pays[:, None, None])

    def ahead_most(self, placement, cost):
        tau = min(cost.overlap(self.config.name), placement.experts)
        limits = self._limits(placement, tau)
        if tau <= cost.replica_slots:  # then all of them go everywhere
            return None
        return TransferSizes(limits[0], cost.replica_slots, limits[1])

    def late_needs(self, shape, cost):
        slots = cost.slots_left(self.config.late_slots) if self.decides_late(self.config) else 0
        if not slots or not cost.overlap(self.config.name):  # none left, or no expert may get replicas
            return None
        offers = min(slots, shape.home_slots)
        return TransferSizes(offers, slots, offers * shape.devices_per_node)

    def late_rule(self, shape, cost, groups):
        if shape.late is None:
            return None
        try:
            compute, exchange, shadow = shadow_rates(cost, self.config.name)
        except AbsentFigureError as error:
            raise AbsentFigureError(
                f"{error}; it prices the second decision, after the gate: PlannerConfig.calibrate = False does without"
            ) from None
        return "calibrate", {
            "compute": compute / groups,
            "exchange": exchange / groups,
            "late_transfer": shadow / shape.devices,
            "late_seconds": cost.late_seconds,
            "overlap_degree": min(cost.overlap(self.config.name), shape.experts),
        }

    def reshard(self, loads, placement, cost):
        # without materialisation no expert's tokens are taken off its home: all homes are to be balanced
        tau = min(cost.overlap(self.config.name), placement.experts) if self.config.materialize else 0
        return shard_homes(np.asarray(loads, np.float64).sum(axis=1), placement, tau)

    def remark(self, cost):
        """Say tau, and where it is 0, so that no expert gets a replica, why."""
        if not self.config.materialize and not self.decides_late(self.config):
            return None  # homes move, which tau has no part in
        tau = cost.overlap(self.config.name)
        if tau:
            return f"tau {tau}"
        if cost.overlap_degree == 0:
            return "tau 0: PlannerConfig.overlap_degree"
        one = float(cost.overlap_seconds(np.array(1), self.config.name))
        return f"tau 0: an expert travels {1e3 * one:.3g} ms, attention takes {1e3 * cost.attention_seconds:.3g} ms"


def _with_more(placement: Placement, added: np.ndarray) -> Placement:
    return placement.replace(replicas=np.concatenate([placement.replicas, np.argwhere(added)]))


def _slots_left(totals: np.ndarray, placement: Placement, order: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Share free slots [L, D] by load per holder: totals [L, E], order int [L, Et] -> int [L, Et]."""
    held = placement.holds.sum(axis=2)
    weight = np.take_along_axis(totals / held, order, axis=1)
    return slots_by_load(weight, free.sum(axis=1), np.take_along_axis(placement.devices - held, order, axis=1))


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


def spread_replicas(
    placement: Placement,
    order: np.ndarray,
    counts: np.ndarray,
    free: np.ndarray,
    limits: tuple[int, int] | None = None,
) -> np.ndarray:
    """Place replicas one by one: nodes that lack the expert first, then nodes and devices with most free slots.

    Args:
      order: int [L, Et], experts by falling load; counts: int [L, Et], replicas of each.
      free: int [L, D], free replica slots.
      limits: the most experts that one device sends (X), and that one node sends one other (Cp), the placement's own
        replicas counted; None for no limit.

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
    sent = _Sent(placement) if limits is not None else None
    for step in range(steps):
        at = np.minimum((ends <= step).sum(axis=1), order.shape[1] - 1)
        expert = order[rows, at]
        node_score = node_free * most + ~node_held[rows, expert] * in_node
        room = (free > 0) & ~held[rows, expert]
        if sent is not None:
            room &= sent.allowed(expert, limits)
        score = np.where(room, node_score[:, node_of] + free, -1)
        device = score.argmax(axis=1)
        ok = (score[rows, device] >= 0) & (step < ends[:, -1])
        layer, expert, device = rows[ok], expert[ok], device[ok]
        node = node_of[device]
        held[layer, expert, device] = added[layer, expert, device] = True
        node_held[layer, expert, node] = True
        free[layer, device] -= 1
        node_free[layer, node] -= 1
        if sent is not None:
            sent.add(layer, expert, node)
    return added


class _Sent:
    """What every device and node sends so far.

    An expert counts once for its home's device, and once for each other node that gets a replica: travels bool [L, E],
    offers int [L, D], here bool [L, E, Nn] (the home's node included), crossing int [L, Nn, Nn].
    """

    def __init__(self, placement: Placement):
        layers, nodes, self.per_node = placement.layers, placement.nodes, placement.devices_per_node
        self.home, self.rows = placement.home, np.arange(layers)
        self.home_node = self.home // self.per_node
        self.node_of = np.arange(placement.devices) // self.per_node
        held = placement.holds
        self.travels = held.sum(axis=2) > 1
        self.offers = home_loads(self.travels.astype(float), self.home, placement.devices).astype(int)
        self.here = held.reshape(*self.home.shape, nodes, self.per_node).any(axis=3)
        away = self.here & (np.arange(nodes) != self.home_node[:, :, None])
        self.crossing = np.zeros((layers, nodes, nodes), int)
        layer, expert, node = np.nonzero(away)
        np.add.at(self.crossing, (layer, self.home_node[layer, expert], node), 1)

    def allowed(self, expert: np.ndarray, limits: tuple[int, int]) -> np.ndarray:
        """Say which devices may get one replica more of each layer's expert [L]: -> bool [L, D]."""
        home = self.home[self.rows, expert]
        offered = self.travels[self.rows, expert] | (self.offers[self.rows, home] < limits[0])
        crossed = self.here[self.rows, expert] | (
            self.crossing[self.rows, self.home_node[self.rows, expert]] < limits[1]
        )
        return offered[:, None] & crossed[:, self.node_of]

    def add(self, layer: np.ndarray, expert: np.ndarray, node: np.ndarray) -> None:
        """Count one replica in each of these layers."""
        home = self.home[layer, expert]
        self.offers[layer, home] += ~self.travels[layer, expert]
        self.travels[layer, expert] = True
        self.crossing[layer, self.home_node[layer, expert], node] += ~self.here[layer, expert, node]
        self.here[layer, expert, node] = True
