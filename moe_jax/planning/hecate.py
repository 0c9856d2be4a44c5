"""Hecate: sparse materialization and heterogeneous sharding.

Letters: docs/notation.md; tau experts that may get replicas, Et experts considered, mu replicas of a device.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from moe_jax.errors import UserError, check_bounds
from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning import routing
from moe_jax.planning.arrays import falling, loop, put
from moe_jax.planning.balancer import Planner, register
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement, TransferSizes, fit_replicas, late_price, sent_of
from moe_jax.planning.plan import plan_seconds
from moe_jax.planning.plan_shape import PlanShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hecate:
    """Options of the planner `hecate`; defaults are the paper's.

    Attributes:
      overlap_degree: tau, experts that may get replicas; None: of 0, 1, 2, 4, .. that which gives layers the least
        predicted time; 'paper': those whose transfer hides behind attention, by the formula of section 4.2.
      materialize: replicas for one step by sparse materialization.
      shard_every: steps between reshards (section 5.1); 0: homes stay even.
      calibrate: a second decision, from the step's own counts.
      late_slots: replicas that a device may get by that decision, in slots of their own.
    """

    overlap_degree: int | str | None = None
    materialize: bool = True
    shard_every: int = 100
    calibrate: bool = True
    late_slots: int = 2

    def __post_init__(self):
        check_bounds(self, {"overlap_degree": 0, "shard_every": 0, "late_slots": 1})
        if isinstance(self.overlap_degree, str) and self.overlap_degree != "paper":
            raise UserError(
                f"Hecate.overlap_degree ({self.overlap_degree!r}) must be a whole number from 0 on, 'paper', or None"
            )


@register("hecate")
class HecatePlanner(Planner):
    """Materialize replicas each step, reshard homes now and then, calibrate after the gate; each part can be off.

    Source: Hecate, algorithms 1 and 2, sections 4.2 to 4.4.
    """

    options: Hecate = Hecate()
    defaults = {"predictor": "window"}  # the mean of the last 5 steps (section 4.2)
    after_gate = True
    late_option = "calibrate"
    schedule = "hecate"

    @property
    def reshard_every(self):
        return self.options.shard_every

    def overlap(self, cost: Cost) -> int | None:
        """Return tau as bound; None where each plan chooses its own, by the least predicted time.

        'paper': the most experts whose transfer takes no longer than attention, floor(T_attention bw / bytes of an
        expert), bw of a whole node where links differ (Hecate, section 4.2).
        """
        if self.options.overlap_degree == "paper":
            return math.floor(cost.attention_seconds / cost.overlap_seconds())
        return self.options.overlap_degree

    def overlap_of(self, of: Placement | PlanShape, cost: Cost, chosen: int) -> int:
        """Return tau, at most E; where each plan chooses its own, what was `chosen`."""
        tau = self.overlap(cost)
        return min(int(chosen) if tau is None else tau, of.experts)

    def propose(self, loads, placement, cost):
        bare, tau = super().propose(loads, placement, cost), self.overlap(cost)
        if not self.options.materialize:
            return bare
        totals, tried = loads.sum(axis=1).astype(np.float64), []
        for degree in [tau] if tau is not None else [0, *(2**power for power in range(bare.experts.bit_length()))]:
            plan, cut = materialized(bare, totals, degree, cost.replica_slots)
            tried.append((plan_seconds(self, plan, loads, cost) if tau is None else 0.0, len(tried), cut, plan))
            if len(tried) > 2 and tried[-1] > tried[-2] > tried[-3] and bare.experts >= bare.devices:
                break  # no faster twice: where no device is without a home, more experts do not pay
        *_, cut, plan = min(tried)
        self.counters["transfer_cut"] += cut
        return plan

    def refine(self, loads, placement, cost):
        """Add replicas in the late slots, layer by layer, where that saves more than the late gather costs.

        The first gather runs next to attention; this one does not, so all of its time counts. An expert whose new
        replicas do not fit the late transfer gets none of them.
        """
        if not self.config.decides_late:
            return placement
        slots, tau = self.options.late_slots, self.overlap_of(placement, cost, placement.devices)
        group = {"devices": placement.devices, "devices_per_node": placement.devices_per_node}
        late = cost.late or TransferShape(**group, offers=placement.experts, slots=slots)
        if not tau or not late.slots:
            return placement
        rule = Calibration(overlap_degree=tau, **cost.prices.rates(placement.devices, cost.late))
        wanted, (added, *_), pays = rule.choose(np, loads.astype(np.float64), placement.holds, placement.home, late)
        self.counters["late_cut"] += int((wanted & ~added).any(axis=2).sum())
        rows = np.argwhere(added & pays[:, None, None])
        return placement.replace(replicas=np.concatenate([placement.replicas, rows]))

    def ahead_most(self, plan, cost):
        chosen = plan.replicated.sum(axis=1).max(initial=0)
        return most_sent(plan, self.overlap_of(plan, cost, chosen), cost.replica_slots)

    def slots_after_gate(self, cost):
        slots, memory, room = self.options.late_slots, cost.prices.cluster.memory_bytes, cost.late_room
        if memory is not None:  # what fits besides the replicas that are planned ahead
            if room is None:
                room = cost.slots_in(memory) - cost.replica_slots
            slots = max(0, min(slots, room))
        # none where nothing is to decide, or no expert may get replicas
        return slots if self.config.decides_late and slots and self.overlap(cost) != 0 else 0

    def late_rule(self, shape, cost, groups):
        if shape.late is None:
            return None
        tau = self.overlap_of(shape, cost, shape.devices)
        return Calibration(overlap_degree=tau, **cost.prices.rates(shape.devices, shape.late, groups))

    def reshard(self, loads, placement, cost):
        # without materialisation no expert's tokens are taken off its home: all homes are to be balanced
        chosen = placement.replicated.sum(axis=1).max(initial=0)
        tau = self.overlap_of(placement, cost, chosen) if self.options.materialize else 0
        return shard_homes(np.asarray(loads, np.float64).sum(axis=1), placement, tau)

    def remark(self, cost):
        """Say tau, and where it is 0, so that no expert gets a replica, why."""
        if not self.options.materialize and not self.config.decides_late:
            return None  # homes move, which tau has no part in
        tau = self.overlap(cost)
        if tau != 0:
            return f"tau {tau}" if tau else "tau of each plan by predicted time"
        if self.options.overlap_degree == 0:
            return "tau 0: Hecate.overlap_degree"
        one, attention = 1e3 * cost.overlap_seconds(), 1e3 * cost.attention_seconds
        return f"tau 0: an expert travels {one:.3g} ms, attention takes {attention:.3g} ms"


def materialized(bare: Placement, totals: np.ndarray, tau: int, slots: int) -> tuple[Placement, int]:
    """Return the homes with replicas of the heaviest `tau` experts of each layer, and the slots that were cut off.

    Source: Hecate, algorithm 1. Args: totals: [L, E]; slots: mu.
    """
    order, most = falling(np, totals)[:, :tau], most_sent(bare, tau, slots)
    if most is None:
        chosen = np.zeros(bare.home.shape, bool)
        np.put_along_axis(chosen, order, True, axis=1)
        return bare.replace(replicas=np.argwhere(chosen[:, :, None] & ~bare.homes)), 0
    # what a device sends, and what a node sends one other, stays even, or one more a device
    free, limits = np.full((bare.layers, bare.devices), most.slots), (bare.home, most)
    added = spread_replicas(np, totals, bare.holds, order, free, bare.devices_per_node, limits)
    free = free - added.sum(axis=1)
    if free.any():  # what did not fit the transfer leaves slots to others: share them by what is left per holder
        added |= spread_replicas(np, totals, bare.holds | added, order, free, bare.devices_per_node, limits)
    return bare.replace(replicas=np.argwhere(added)), int(free.sum())


def most_sent(placement: Placement, tau: int, slots: int) -> TransferSizes | None:
    """Return the most that a transfer of `tau` experts into `slots` of a device sends; None where all go everywhere."""
    tau = min(tau, placement.experts)
    if tau <= slots:
        return None
    return TransferSizes(1 + -(-tau // placement.devices), slots, -(-tau // placement.nodes))


def slots_by_load(xp, loads, slots, most):
    """Share slots by load, largest remainder, at most `most` each; what is over goes to the next in order.

    Args:
      loads: [L, Et], falling; slots: int [L]; most: int or [L, Et].

    Returns:
      int [L, Et], replicas of each expert.
    """
    total = loads.sum(axis=1, keepdims=True)
    part = xp.where(total > 0, loads / xp.where(total > 0, total, 1.0), 1.0 / loads.shape[1])
    quota = part * slots[:, None]
    count = xp.floor(quota + 1e-9).astype(int)
    rank = xp.argsort(xp.argsort(-(quota - count), axis=1, stable=True), axis=1)
    count = count + (rank < (slots - count.sum(axis=1))[:, None])
    # what expert k hands on is max(0, what it got + count - most): the running sum above its lowest point so far
    running = (count - most).cumsum(axis=1)
    over = running - xp.minimum(xp.minimum.accumulate(running, axis=1), 0)
    return count - xp.diff(over, axis=1, prepend=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Add replicas, in the slots that are filled late, where that saves more than it costs.

    Source: Hecate, sections 4.2 to 4.4, algorithm 1.

    Attributes:
      overlap_degree: tau, at most E.
      compute, exchange: seconds of one token, computed forward and backward, and carried there and back both ways.
      shadow: seconds in which an expert goes to all devices and its gradient comes back; a D-th of it is counted for
        each holder of an added expert, as the paper has it, where `late_seconds` is empty.
      late_seconds: seconds of the late transfer and its way back in each of its sizes, 0 for none first.
    """

    overlap_degree: int
    compute: float
    exchange: float
    shadow: float = 0.0
    late_seconds: tuple[float, ...] = ()

    def choose(self, xp, loads, holds, home, late: TransferShape):
        """Return replicas that a layer wants, those that fit the transfer (`fit_replicas`), and whether they pay.

        Args:
          xp: NumPy or jax.numpy.
          loads: [L, S, E], real; holds: bool [L, E, D], holders before; home: int [L, E].

        Returns:
          (bool [L, E, D], what `fit_replicas` returns, bool [L]).
        """
        order, free = falling(xp, loads.sum(axis=1))[:, : self.overlap_degree], (len(loads), late.devices)
        free = np.full(free, late.slots, np.int32)
        wanted = spread_replicas(xp, loads.sum(axis=1), holds, order, free, late.devices_per_node)
        added, places, used = fit_replicas(xp, wanted, order, home, late)
        each = self.shadow / late.devices * (added.sum(axis=(1, 2)) + added.any(axis=2).sum(axis=1))
        gain = self.seconds(xp, loads, holds, late) - self.seconds(xp, loads, holds | added, late)
        return wanted, (added, places, used), gain > late_price(used, late, self.late_seconds, each, xp)

    def seconds(self, xp, loads, holds, late: TransferShape):
        """Return the seconds of layers without their transfers, by expected loads under the rule 'nearest': -> [L]."""
        local, came = (of.sum(axis=1) for of in routing.nearest_loads(xp, loads, holds, late.devices_per_node))
        return self.compute * (local + came).max(axis=1) + self.exchange * came.max(axis=1)


def spread_replicas(xp, totals, holds, order, free, per_node: int, limits=None):
    """Give slots to experts by falling load: nodes that lack one first, then nodes and devices with most free slots.

    The slots are shared by load per holder: replicas that stand already serve a part of it. An expert's turn takes
    nodes that lack it, by falling free slots, a device of each; then what devices are left on nodes that have it, each
    of which counts the slots that those before it on its node take.

    Args:
      xp: NumPy or jax.numpy.
      totals: [L, E], loads; holds: bool [L, E, D], holders so far.
      order: int [L, Et], experts by falling load; free: int [L, D], free replica slots, of NumPy for either.
      per_node: devices of a node.
      limits: (homes int [L, E], `TransferSizes`), the most offers and crossings of the replicas that stand and the new
        ones together, on the host; None for no limit.

    Returns:
      bool [L, E, D], the new replicas. A replica that finds no device is left out.
    """
    layers, _, devices = holds.shape
    rows, before, holders = xp.arange(layers), holds, holds.sum(axis=2)
    weight, lacking = (xp.take_along_axis(of, order, axis=1) for of in (totals / holders, devices - holders))
    wanted = slots_by_load(xp, weight, free.sum(axis=1), lacking)
    by_node, sent = (layers, -1, per_node), None
    high = int(free.max(initial=0)) + 1  # outweighs the free slots of a device

    def fill(turn, carry):
        holds, free, sent = carry
        expert, left = order[:, turn], wanted[:, turn]
        if xp is np and not left.any():
            return carry
        mine, slots = holds[rows, expert], free.reshape(by_node)
        on_node = mine.reshape(by_node).any(axis=2)
        reach, travels = ~on_node, mine.sum(axis=1) > 1
        if limits is not None:
            at, (offers, crossing) = home[rows, expert], sent
            left = xp.where(travels | (offers[rows, at] < most.offers), left, 0)
            reach = reach & (crossing[rows, at // per_node] < most.crossing)
        score = slots.sum(axis=2) * high + slots.max(axis=2)
        to = highest(xp, xp.where(reach, score, 0), left)
        first = to[:, :, None] & (xp.arange(per_node)[None, None] == slots.argmax(axis=2)[:, :, None])
        room = xp.where(mine.reshape(by_node) | first | ~(on_node | to)[:, :, None], 0, slots)
        key = room * per_node + xp.arange(per_node)[None, None, ::-1]
        nth = (key[:, :, None] > key[..., None]).sum(axis=3)  # who goes first on the node
        score = xp.where(room > 0, ((slots.sum(axis=2) - to)[:, :, None] - nth) * high + room, 0)
        more = highest(xp, score.reshape(layers, devices), left - to.sum(axis=1))
        new = first.reshape(layers, devices) | more
        if limits is not None:
            sent = (
                put(offers, (rows, at), offers[rows, at] + (~travels & new.any(axis=1))),
                put(crossing, (rows, at // per_node), crossing[rows, at // per_node] + to),
            )
        return put(holds, (rows, expert), mine | new), free - new, sent

    if limits is not None:
        home, most = limits
        homes = home[:, :, None] == np.arange(devices)
        sent = sent_of(homes, holds & ~homes, per_node)[:2]
    return loop(xp, fill, (holds.copy(), free, sent), order.shape[1])[0] & ~before


def highest(xp, score, count):
    """Return bool [L, n], the `count` [L] highest scores above 0 of int [L, n], of equal ones the lowest ids."""
    size = score.shape[1]
    key = score * size + xp.arange(size)[None, ::-1]
    least = xp.take_along_axis(xp.sort(key, axis=1), xp.clip(size - count, 0, size - 1)[:, None], axis=1)
    return (key >= least) & (score > 0) & (count > 0)[:, None]


def shard_homes(totals: np.ndarray, placement: Placement, tau: int) -> Placement:
    """Return the placement with new homes for totals [L, E] and no replicas, or the same one if nothing changes.

    Every device homes L E / D experts, rounded down or up, 0 .. E of any one layer. Those that are not materialized are
    balanced first; the top tau of a layer get the homes that are left. Of equal devices each takes the part that moves
    fewest experts (`relabelled`, ours). Source: Hecate, algorithm 2.
    """
    layers, experts, devices = placement.layers, placement.experts, placement.devices
    if layers * experts < devices:  # one a device at most: there is nothing to even out
        return placement
    per_node = placement.devices_per_node
    free = np.bincount(np.arange(layers * experts) * devices // (layers * experts), minlength=devices)
    home = np.full((layers, experts), -1, np.int32)
    order = falling(np, totals)
    rest, hot = order[:, tau:], order[:, :tau]
    # The rest, heaviest layer and expert first: each on the least-loaded node, then its least-loaded device.
    heaviest = np.take_along_axis(totals, rest[:, :1], axis=1)[:, 0] if rest.size else np.zeros(0)
    for layer in falling(np, heaviest):
        device_load, node_load = np.zeros(devices), np.zeros(placement.nodes)
        node_free = free.reshape(-1, per_node).sum(axis=1)
        for expert in rest[layer].tolist():
            # of equals the one with fewer free slots, of those the lowest id
            node = int(np.lexsort((node_free, np.where(node_free > 0, node_load, np.inf)))[0])
            mine = slice(node * per_node, (node + 1) * per_node)
            slots = free[mine]
            device = node * per_node + int(np.lexsort((slots, np.where(slots > 0, device_load[mine], np.inf)))[0])
            home[layer, expert] = device
            free[device] -= 1
            node_free[node] -= 1
            device_load[device] += totals[layer, expert]
            node_load[node] += totals[layer, expert]
    # The overlappable experts, which the paper places anywhere. What a transfer sends grows with the most hot experts
    # that one device, or one node, homes in a layer, so every layer takes an equal part of what room each node and
    # device has left. Within that, heaviest first, each goes to its layer's least-loaded device: this also serves steps
    # without replicas.
    for layer in range(layers):
        left = layers - layer
        of_node = _even_part(free.reshape(-1, per_node).sum(axis=1), left, hot.shape[1])
        room = np.concatenate(
            [_even_part(part, left, count) for part, count in zip(free.reshape(-1, per_node), of_node, strict=True)]
        )
        free -= room
        placed = home[layer] >= 0
        load = np.bincount(home[layer][placed], totals[layer][placed], devices)
        for expert in hot[layer].tolist():
            device = int(np.where(room > 0, load, np.inf).argmin())
            home[layer, expert] = device
            load[device] += totals[layer, expert]
            room[device] -= 1
    home = relabelled(home, placement.home, devices, per_node)
    return placement if (home == placement.home).all() else placement.replace(home=home, replicas=None, shares=None)


def _even_part(places: np.ndarray, parts: int, count: int) -> np.ndarray:
    """Return `count` of `places` [n], from each its part of 1 / parts, rounded down or up."""
    part = places // parts
    rest = places - part * parts
    part[np.argsort(-rest, kind="stable")[: count - part.sum()]] += 1
    return part


def relabelled(home_new: np.ndarray, home_old: np.ndarray, devices: int, devices_per_node: int) -> np.ndarray:
    """Return the new homes, int [L, E], with labels under which more experts stay where they are, never fewer.

    Devices of a node are exchanged among themselves, and whole nodes: first in all layers at once, then in single
    layers among devices that home as many experts of it. So every layer keeps the loads and the transfers that the new
    homes were made for, and every device as many rows of the bank.
    """
    home = _exchanged(home_new, home_old, devices, devices_per_node, np.zeros(devices, int))
    for layer, (new, old) in enumerate(zip(home, home_old, strict=True)):
        home[layer] = _exchanged(new, old, devices, devices_per_node, np.bincount(new, minlength=devices))
    return home


def _exchanged(new: np.ndarray, old: np.ndarray, devices: int, per_node: int, kind: np.ndarray) -> np.ndarray:
    """Return new homes under the permutation of nodes and of devices on them that agrees most with the old ones.

    Args:
      new, old: int [...]; kind: int [D]; a device takes the place of one of its own kind only.
    """
    nodes = devices // per_node
    forbidden = -new.size * devices  # one of these outweighs all that could agree
    agreement = np.bincount(new.ravel().astype(np.int64) * devices + old.ravel(), minlength=devices**2)
    value = np.where(kind[:, None] == kind, agreement.reshape(devices, devices), forbidden)
    blocks = value.reshape(nodes, per_node, nodes, per_node).swapaxes(1, 2)  # for each pair of nodes

    def inside(i, j):
        """Return which member of node j each of node i becomes, and how many experts then stay."""
        member = best_assignment(blocks[i, j])
        return member, blocks[i, j][np.arange(per_node), member].sum()

    kinds = np.sort(kind.reshape(nodes, per_node), axis=1)
    alike = (kinds[:, None] == kinds).all(axis=2)
    staying = np.where(alike, 0, forbidden)  # where none agrees
    for i, j in np.argwhere(alike & (blocks > 0).any(axis=(2, 3))):
        staying[i, j] = inside(i, j)[1]
    to_node = best_assignment(staying)
    place = np.concatenate([j * per_node + inside(i, j)[0] for i, j in enumerate(to_node.tolist())])
    return place[new].astype(new.dtype)


def best_assignment(value: np.ndarray) -> np.ndarray:
    """Return column int [n] of each row, each once, with the largest sum of value [n, n]; of equals those that stay."""
    from scipy.optimize import linear_sum_assignment  # comes with jax; large, and needed only where homes move

    size = len(value)
    moves = np.arange(size)[:, None] != np.arange(size)
    return linear_sum_assignment(value * (size + 1) - moves, maximize=True)[1]
