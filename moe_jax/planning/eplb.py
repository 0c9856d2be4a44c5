"""EPLB (DeepSeek): replicate the experts with most load per holder, pack them on devices, heaviest first.

`rebalance` is the published procedure, layers at once; it counts the home as a replica, and the planner turns what it
packs onto floor(E / D) + replica slots a device into homes and replicas, with equal shares per packed slot.

Letters: docs/notation.md; r replicas of a layer, the homes counted; i independent problems.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.errors import UserError, check_bounds
from moe_jax.planning.arrays import falling
from moe_jax.planning.balancer import Planner, register
from moe_jax.planning.routing import edges, unit_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eplb:
    """Options of the planner `eplb`.

    Attributes:
      groups: expert groups; more than one packs them node by node when nodes divide them.
    """

    groups: int = 1

    def __post_init__(self):
        check_bounds(self, {"groups": 1})


@register("eplb")
class EplbPlanner(Planner):
    """Pack replicas anew from the loads; homes move with them, so plan at an interval."""

    options: Eplb = Eplb()
    defaults = {"interval": 10}
    most_devices = 4096

    def propose(self, loads, placement, cost):
        experts, devices = placement.experts, placement.devices
        if experts % devices and not cost.replica_slots:
            raise UserError(
                f"planner 'eplb' without replica slots needs experts ({experts}) to be a multiple of devices "
                f"({devices}): it fills all places alike; set PlannerConfig.replica_slots, or name = 'smartmoe'"
            )
        slots = experts // devices + cost.replica_slots
        totals = np.asarray(loads, np.float64).sum(axis=1)
        groups = self.options.groups
        nodes = placement.nodes if groups > 1 else 1
        replica_to_expert, _ = rebalance(totals, devices * slots, groups, nodes, devices)
        placed = replica_to_expert.reshape(placement.layers, devices, slots)
        count = np.zeros((placement.layers, experts, devices), np.int64)
        layer, device, _ = np.indices(placed.shape)
        np.add.at(count, (layer.ravel(), placed.ravel(), device.ravel()), 1)
        home, count = choose_homes(count, totals, placement.home)
        held = count > 0
        # Shares where an expert has several holders, in proportion to the slots that each has of it.
        several = held.sum(axis=2) > 1
        rows = unit_rows(np.argwhere(several), edges(np, count[several]), -1)
        away = held & (home[:, :, None] != np.arange(devices))
        return placement.replace(home=home, replicas=np.argwhere(away), shares=rows, rule="shares")


def rebalance(
    weight: np.ndarray, num_replicas: int, groups: int, nodes: int, devices: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose and pack replicas: weight [L, E] -> (replica_to_expert int [L, r], replica_counts int [L, E]).

    Replicas stand in device order, r / D on each device. Groups of experts stay on one node when `nodes` divides
    `groups`; otherwise packing is global.

    Source: deepseek-ai/EPLB.
    """
    layers, experts = weight.shape
    if num_replicas % devices or devices % nodes or experts % groups or num_replicas < experts:
        raise UserError(
            f"num_replicas ({num_replicas}) must be a multiple of devices ({devices}), at least experts ({experts}), "
            f"devices a multiple of nodes ({nodes}), experts a multiple of groups ({groups})"
        )
    if groups % nodes:
        groups = nodes = 1
    rows = np.arange(layers)[:, None]
    # Groups to nodes: expert ids of each node, [L, E] in node order.
    by_group = weight.reshape(layers, groups, -1).sum(axis=2)
    node, rank = pack(by_group, nodes)
    group_at = np.empty((layers, groups), int)
    group_at[rows, node * (groups // nodes) + rank] = np.arange(groups)
    size = experts // groups
    expert_at = (group_at[:, :, None] * size + np.arange(size)).reshape(layers * nodes, experts // nodes)
    # Replicas within each node, then devices within each node.
    local = np.take_along_axis(np.repeat(weight, nodes, axis=0), expert_at, axis=1)
    at, slots = np.arange(len(local)), num_replicas // nodes
    chosen, count = np.empty((len(local), slots), int), np.ones(local.shape, int)
    chosen[:, : experts // nodes] = np.arange(experts // nodes)
    load = np.array(local, np.float64)  # of one replica of each expert
    for slot in range(experts // nodes, slots):
        heaviest = load.argmax(axis=1)
        chosen[:, slot] = heaviest
        count[at, heaviest] += 1
        load[at, heaviest] = local[at, heaviest] / count[at, heaviest]
    load = np.take_along_axis(local / count, chosen, axis=1)
    device, rank = pack(load, devices // nodes)
    placed = np.empty_like(chosen)
    placed[at[:, None], device * (num_replicas // devices) + rank] = chosen
    replica_to_expert = np.take_along_axis(expert_at, placed, axis=1).reshape(layers, num_replicas)
    replica_counts = np.zeros((layers, experts), int)
    np.put_along_axis(replica_counts, expert_at.reshape(layers, experts), count.reshape(layers, experts), axis=1)
    return replica_to_expert, replica_counts


def pack(weight: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items, heaviest first, onto the least-loaded pack with room: of ceil(n / packs) items.

    Args:
      weight: [i, n].

    Returns:
      pack of each item int [i, n], and its rank within the pack int [i, n].
    """
    batch, items = weight.shape
    room = -(-items // packs)
    if room == 1:
        return np.broadcast_to(np.arange(items), weight.shape).copy(), np.zeros(weight.shape, int)
    rows = np.arange(batch)
    order = falling(np, weight)
    load, used = np.zeros((batch, packs)), np.zeros((batch, packs), int)
    pack_of, rank = np.empty(weight.shape, int), np.empty(weight.shape, int)
    for at in range(items):
        item = order[:, at]
        target = load.argmin(axis=1)
        pack_of[rows, item] = target
        rank[rows, item] = used[rows, target]
        used[rows, target] += 1
        load[rows, target] += weight[rows, item]
        load[rows, target] = np.where(used[rows, target] == room, np.inf, load[rows, target])
    return pack_of, rank


def choose_homes(count: np.ndarray, totals: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose homes: count int [L, E, D], totals [L, E], old homes [L, E] -> (home [L, E], count [L, E, D] after swaps).

    Every device homes at most ceil(L E / D) experts over all layers, so that parameters and optimizer state fit the
    bank; an expert stays at home where the packing allows it. Where replicas leave no choice, single ones change places
    with a replica of about equal load on a device that homes too few.
    """
    held = count > 0
    layers, experts, devices = count.shape
    single = held.sum(axis=2) == 1
    home = np.where(single, held.argmax(axis=2), -1).astype(np.int32)
    homes = np.bincount(home[single], minlength=devices)
    limit = -(-layers * experts // devices)
    in_layer = (single[:, :, None] & held).sum(axis=1)
    for layer, expert in np.argwhere(~single):
        holders = np.flatnonzero(held[layer, expert])
        mine = int(old[layer, expert])
        if held[layer, expert, mine] and homes[mine] < limit and in_layer[layer, mine] < -(-experts // devices):
            device = mine
        else:
            # Even in the layer first, so that home slots and replica slots stay few; then over all layers.
            device = int(holders[np.lexsort((homes[holders], in_layer[layer, holders]))[0]])
        home[layer, expert] = device
        homes[device] += 1
        in_layer[layer, device] += 1
    while homes.max() > limit and _shift_chain(home, held, homes, limit):
        pass
    if homes.max() > limit:
        count = count.copy()
        _swap_positions(home, count, homes, totals, limit)
    return home, count


def _shift_chain(home: np.ndarray, held: np.ndarray, homes: np.ndarray, limit: int) -> bool:
    """Move homes along a chain of holders from an overfull device to one with room; say whether there was one."""
    start = int(homes.argmax())
    came: dict[int, tuple[int, int, int] | None] = {start: None}
    queue = [start]
    for device in queue:
        layer, expert = np.nonzero(home == device)
        reach = held[layer, expert]  # [n, D]
        for other in np.flatnonzero(reach.any(axis=0)).tolist():
            if other in came:
                continue
            first = int(reach[:, other].argmax())
            came[other] = (device, int(layer[first]), int(expert[first]))
            if homes[other] < limit:
                homes[start] -= 1
                homes[other] += 1
                step = came[other]
                while step is not None:
                    previous, at_layer, at_expert = step
                    home[at_layer, at_expert] = other
                    other, step = previous, came[previous]
                return True
            queue.append(other)
    return False


def _swap_positions(home: np.ndarray, count: np.ndarray, homes: np.ndarray, totals: np.ndarray, limit: int) -> None:
    """Swap experts homed on overfull devices with replicas on the device that homes fewest, nearest loads first."""
    load = totals / np.maximum(count.sum(axis=2), 1)
    while homes.max() > limit:
        giver, best = int(homes.argmax()), None
        for taker in np.argsort(homes, kind="stable").tolist():
            if best is not None or homes[taker] >= limit:
                break
            mine = (home == giver) & (count[:, :, taker] == 0)
            spare = count[:, :, taker] > (home == taker)
            (at, give), (there, take) = np.nonzero(mine), np.nonzero(spare)
            if not len(at) or not len(there):
                continue
            gap = np.abs(load[at, give][:, None] - load[there, take])
            gap[at[:, None] != there] = np.inf  # swaps are within a layer only
            i, j = np.unravel_index(gap.argmin(), gap.shape)
            if np.isfinite(gap[i, j]):
                best = (int(at[i]), int(give[i]), int(take[j]), taker)
        if best is None:
            return
        layer, moved, returned, taker = best
        count[layer, moved, giver] -= 1
        count[layer, moved, taker] += 1
        count[layer, returned, taker] -= 1
        count[layer, returned, giver] += 1
        home[layer, moved] = taker
        homes[giver] -= 1
        homes[taker] += 1
