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

from moe_jax.after_gate.contract import by_falling, slots_of
from moe_jax.collectives.transfer_plan import Transfer


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateRule:
    """Add replicas where that saves more than it costs.

    Attributes:
      home_slots: Hs; replica_slots: Gs; devices_per_node: Dn.
      most_replicas: mu; overlap_degree: tau, at most E.
      compute, exchange: seconds of one token, computed forward and backward, and carried there and back both ways.
      late_transfer: seconds of the late gather and the reduce that follows, per holder of an added expert.
      ahead: whether replicas are planned and fetched ahead as well.
    """

    home_slots: int
    replica_slots: int
    devices_per_node: int
    most_replicas: int
    overlap_degree: int
    compute: float
    exchange: float
    late_transfer: float
    ahead: bool = True

    @property
    def late_replicas(self) -> int:
        return self.overlap_degree

    def decide(self, tables, counts, holders, me):
        devices, experts = counts.shape
        slot = slots_of(holders, experts)
        held = slot >= 0
        used = jnp.sum(held & (slot >= self.home_slots), axis=0, dtype=jnp.int32)
        free = jnp.maximum(self.most_replicas - used, 0)
        counts = counts.astype(jnp.result_type(float))
        totals = jnp.sum(counts, axis=0)
        order = by_falling(totals)[: self.overlap_degree]
        holding = jnp.sum(held, axis=1, dtype=jnp.int32)
        wanted = slots_by_load((totals / holding)[order], jnp.sum(free), (devices - holding)[order])
        added = self.spread(held, order, wanted, free)
        replicated = jnp.any(added, axis=1)
        pays = self.seconds(counts, held) - self.seconds(counts, held | added) > self.late_transfer * (
            jnp.sum(added) + jnp.sum(replicated)
        )
        added, replicated = added & pays, replicated & pays
        late_slot = self.home_slots + used[None] + jnp.cumsum(added, axis=0, dtype=jnp.int32) - 1
        slot = jnp.where(added, late_slot, slot)
        chunk_of = jnp.full((experts,), self.late_replicas, jnp.int32)
        chunk_of = chunk_of.at[order].set(
            jnp.where(replicated[order], jnp.cumsum(replicated[order], dtype=jnp.int32) - 1, self.late_replicas)
        )
        return dataclasses.replace(
            tables, **self.nearest(slot, me), transfer=self.transfer(slot[:, me], added[:, me], chunk_of)
        ), jnp.sum(replicated, dtype=jnp.int32)

    def spread(self, held, order, wanted, free):
        """Place replicas one by one, as `moe_jax.planner.hecate.spread_replicas`: -> the new replicas, bool [E, D]."""
        experts, devices = held.shape
        node_of = jnp.arange(devices) // self.devices_per_node
        most = self.most_replicas + 1
        in_node = most * self.devices_per_node * most
        ends = jnp.cumsum(wanted)

        def place(carry, step):
            held, added, free = carry
            expert = order[jnp.minimum(jnp.sum(ends <= step), order.shape[0] - 1)]
            node_free = jnp.sum(free.reshape(-1, self.devices_per_node), axis=1)
            node_held = jnp.any(held[expert].reshape(-1, self.devices_per_node), axis=1)
            score = (node_free * most + ~node_held * in_node)[node_of] + free
            score = jnp.where((free > 0) & ~held[expert], score, -1)
            device = jnp.argmax(score)
            ok = (score[device] >= 0) & (step < ends[-1])
            here = ok & (jnp.arange(devices) == device)
            held, added = (mask.at[expert].set(mask[expert] | here) for mask in (held, added))
            return (held, added, free - here), None

        steps = jnp.arange(devices * self.most_replicas)
        return lax.scan(place, (held, jnp.zeros_like(held), free), steps)[0][1]

    def seconds(self, counts, held):
        """Return the layer's seconds without its transfers, by expected loads: held bool [E, D] -> []."""
        devices, experts = counts.shape
        split = (experts, devices // self.devices_per_node, self.devices_per_node)
        own = jnp.where(held, counts.T, 0.0)
        away = jnp.sum((counts.T - own).reshape(split), axis=2)  # [E, Nn], tokens whose device lacks the expert
        on_node = jnp.sum(held.reshape(split), axis=2)
        inside = jnp.where(on_node > 0, away / jnp.maximum(on_node, 1), 0.0)
        outside = jnp.sum(jnp.where(on_node > 0, 0.0, away), axis=1) / jnp.sum(held, axis=1)
        came = jnp.repeat(inside + outside[:, None], self.devices_per_node, axis=1) * held
        received = jnp.sum(came, axis=0)
        return self.compute * jnp.max(jnp.sum(own, axis=0) + received) + self.exchange * jnp.max(received)

    def nearest(self, slot, me):
        """Return the destinations of this source: the own device, else the own node's holders, else all, evenly."""
        experts, devices = slot.shape
        held = slot >= 0
        device = jnp.arange(devices, dtype=jnp.int32)
        own, near = device == me, device // self.devices_per_node == me // self.devices_per_node
        here, inside = held & own[None], held & near[None]
        one = jnp.any(here, axis=1, keepdims=True)
        candidate = jnp.where(one, here, jnp.where(jnp.any(inside, axis=1, keepdims=True), inside, held))
        number = jnp.sum(candidate, axis=1, dtype=jnp.int32)
        place = (jnp.cumsum(candidate, axis=1, dtype=jnp.int32) - 1 - (me % number)[:, None]) % number[:, None]
        place = jnp.where(candidate, place, devices)
        target = device[None] * (self.home_slots + self.replica_slots) + jnp.maximum(slot, 0)
        expert = jnp.broadcast_to(jnp.arange(experts)[:, None], place.shape)
        upto = jnp.minimum(device[None] + 1, number[:, None])
        return {
            "dest_slot": jnp.zeros_like(target).at[expert, place].set(target, mode="drop"),
            "dest_num": upto.astype(jnp.uint32),
            "dest_den": number.astype(jnp.uint32),
        }

    def transfer(self, my_slot, mine, chunk_of):
        """Return what this device sends and takes of the added chunks; my_slot [E], mine bool [E], chunk_of [E]."""
        late = self.late_replicas
        home = (my_slot >= 0) & (my_slot < self.home_slots)
        chunk = jnp.where(home, chunk_of, late)
        send = jnp.full((late,), self.home_slots, jnp.int32).at[chunk].set(my_slot, mode="drop")
        replica = jnp.where(mine, my_slot - self.home_slots, self.replica_slots)
        take = jnp.full((self.replica_slots,), late, jnp.int32).at[replica].set(chunk_of, mode="drop")
        return Transfer(send=send, take=take, layer=jnp.int32(0))


def slots_by_load(loads, slots, most):
    """Share slots by load, largest remainder, twin of the planner's: loads, most [Et] -> int32 [Et]."""
    total = jnp.sum(loads)
    quota = jnp.where(total > 0, loads / jnp.where(total > 0, total, 1.0), 1.0 / loads.shape[0]) * slots
    count = jnp.floor(quota + 1e-9).astype(jnp.int32)
    rank = jnp.argsort(jnp.argsort(-(quota - count), stable=True))
    count = count + (rank < slots - jnp.sum(count))

    def pass_on(over, inputs):
        wanted, limit = inputs[0] + over, inputs[1]
        kept = jnp.minimum(wanted, limit)
        return wanted - kept, kept

    return lax.scan(pass_on, jnp.zeros((), count.dtype), (count, most.astype(count.dtype)))[1]
