"""Hecate's calibration: with the counts of the step, more replicas in the slots that are left, if a late gather pays.

Inputs: counts, the homes and replicas planned ahead. Outputs: destinations by the rule `nearest` over the replicas of
both kinds, and a transfer of the added ones. Twin of `HecatePlanner.refine`, for one layer.
Source: Hecate, sections 4.2 to 4.4, algorithm 1.
Letters: docs/notation.md; Et = min(tau, E) experts that may get replicas.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from moe_jax.moe.after_gate import by_falling, late_size, slots_of
from moe_jax.moe.late_transfer import fit_late


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateRule:
    """Add replicas, in the slots that are filled late, where that saves more than it costs.

    Attributes:
      overlap_degree: tau, at most E.
      compute, exchange: seconds of one token, computed forward and backward, and carried there and back both ways.
      late_transfer: seconds of the late gather and the reduce that follows, per holder of an added expert, as the
        paper has it; counted where `late_seconds` is empty.
      late_seconds: seconds of the late transfer and its way back in each of its sizes, 0 for none first.
    """

    overlap_degree: int
    compute: float
    exchange: float
    late_transfer: float = 0.0
    late_seconds: tuple[float, ...] = ()

    def decide(self, tables, counts, holders, me, shape):
        devices, experts = counts.shape
        slot = slots_of(holders, experts)
        held = slot >= 0
        free = jnp.full((devices,), shape.late_slots, jnp.int32)
        counts = counts.astype(jnp.result_type(float))
        totals = jnp.sum(counts, axis=0)
        order = by_falling(totals)[: self.overlap_degree]
        holding = jnp.sum(held, axis=1, dtype=jnp.int32)
        # the slots of each expert by load, largest remainder; what an expert cannot take goes to the next
        loads, slots, most = (totals / holding)[order], jnp.sum(free), (devices - holding)[order]
        total = jnp.sum(loads)
        quota = jnp.where(total > 0, loads / jnp.where(total > 0, total, 1.0), 1.0 / loads.shape[0]) * slots
        count = jnp.floor(quota + 1e-9).astype(jnp.int32)
        rank = jnp.argsort(jnp.argsort(-(quota - count), stable=True))
        count = count + (rank < slots - jnp.sum(count))

        def pass_on(over, inputs):
            wanted, limit = inputs[0] + over, inputs[1]
            kept = jnp.minimum(wanted, limit)
            return wanted - kept, kept

        wanted = lax.scan(pass_on, jnp.zeros((), count.dtype), (count, most.astype(count.dtype)))[1]
        # their places, one by one, as `moe_jax.planning.hecate.spread_replicas`
        per_node = shape.devices_per_node
        node_of = jnp.arange(devices) // per_node
        most = shape.late_slots + 1
        in_node = most * per_node * most
        ends = jnp.cumsum(wanted)

        def place(carry, step):
            held, added, free = carry
            expert = order[jnp.minimum(jnp.sum(ends <= step), order.shape[0] - 1)]
            node_free = jnp.sum(free.reshape(-1, per_node), axis=1)
            node_held = jnp.any(held[expert].reshape(-1, per_node), axis=1)
            score = (node_free * most + ~node_held * in_node)[node_of] + free
            score = jnp.where((free > 0) & ~held[expert], score, -1)
            device = jnp.argmax(score)
            ok = (score[device] >= 0) & (step < ends[-1])
            here = ok & (jnp.arange(devices) == device)
            held, added = (mask.at[expert].set(mask[expert] | here) for mask in (held, added))
            return (held, added, free - here), None

        steps = jnp.arange(devices * shape.late_slots)
        wanted = lax.scan(place, (held, jnp.zeros_like(held), free), steps)[0][1]
        added, with_late, transfer, used = fit_late(wanted, order, slot, me, shape)
        gain = self.seconds(counts, held, per_node) - self.seconds(counts, held | added, per_node)
        if self.late_seconds:
            costs = jnp.asarray(self.late_seconds, jnp.result_type(float))[late_size(used, shape.late)]
        else:
            costs = self.late_transfer * (jnp.sum(added) + jnp.sum(jnp.any(added, axis=1)))
        pays = gain > costs
        slot = jnp.where(pays, with_late, slot)
        return nearest(tables, slot, me, shape), transfer, jnp.where(pays, used, 0)

    def seconds(self, counts, held, per_node: int):
        """Return the layer's seconds without its transfers, by expected loads: held bool [E, D] -> []."""
        devices, experts = counts.shape
        split = (experts, devices // per_node, per_node)
        own = jnp.where(held, counts.T, 0.0)
        away = jnp.sum((counts.T - own).reshape(split), axis=2)  # [E, Nn], tokens whose device lacks the expert
        on_node = jnp.sum(held.reshape(split), axis=2)
        inside = jnp.where(on_node > 0, away / jnp.maximum(on_node, 1), 0.0)
        outside = jnp.sum(jnp.where(on_node > 0, 0.0, away), axis=1) / jnp.sum(held, axis=1)
        came = jnp.repeat(inside + outside[:, None], per_node, axis=1) * held
        received = jnp.sum(came, axis=0)
        return self.compute * jnp.max(jnp.sum(own, axis=0) + received) + self.exchange * jnp.max(received)


def nearest(tables, slot, me, shape):
    """Return the tables with this source's destinations: the own device, else the own node's holders, else all."""
    experts, devices = slot.shape
    held = slot >= 0
    device = jnp.arange(devices, dtype=jnp.int32)
    own, near = device == me, device // shape.devices_per_node == me // shape.devices_per_node
    here, inside = held & own[None], held & near[None]
    one = jnp.any(here, axis=1, keepdims=True)
    candidate = jnp.where(one, here, jnp.where(jnp.any(inside, axis=1, keepdims=True), inside, held))
    number = jnp.sum(candidate, axis=1, dtype=jnp.int32)
    place = (jnp.cumsum(candidate, axis=1, dtype=jnp.int32) - 1 - (me % number)[:, None]) % number[:, None]
    place = jnp.where(candidate, place, devices)
    target = device[None] * shape.slots + jnp.maximum(slot, 0)
    expert = jnp.broadcast_to(jnp.arange(experts)[:, None], place.shape)
    upto = jnp.minimum(device[None] + 1, number[:, None])
    return dataclasses.replace(
        tables,
        dest_slot=jnp.zeros_like(target).at[expert, place].set(target, mode="drop"),
        dest_num=upto.astype(jnp.uint32),
        dest_den=number.astype(jnp.uint32),
    )
