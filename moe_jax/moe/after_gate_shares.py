"""`balanced` after the gate: over the replicas planned ahead, each device gets the same number of this step's tokens.

Inputs: counts, who holds what. Outputs: destinations in shares; the transfer of replicas, planned ahead, stays. Twin of
`BalancedPlanner.refine` and of `moe_jax.planning.shares`, for one layer and one source.
Letters: docs/notation.md; quota [E, D] tokens of e on d.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax

from moe_jax.moe.after_gate import slots_of
from moe_jax.moe.level_kernel import fits_one_kernel, level_in_one_kernel

SHARE_ONE = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareRule:
    """Solve the shares again, for the counts of this step.

    Attributes:
      sweeps: rounds over the replicated experts, at most.
    """

    sweeps: int

    def decide(self, tables, counts, holders, me, shape):
        slot = slots_of(holders, counts.shape[1])
        home = (slot >= 0) & (slot < shape.home_slots)
        counts = counts.astype(jnp.result_type(float))
        totals = jnp.sum(counts, axis=0)
        quota = self.quotas(totals, slot >= 0, home, shape.replica_slots)
        return share_tables(tables, counts, quota, slot, me, shape), None, jnp.zeros(3, jnp.int32)

    def quotas(self, totals, held, home, replica_slots):
        """Return what `level` does; on an NVIDIA GPU by one kernel that fits it, equal up to rounding."""
        loops = functools.partial(self.level, replica_slots=replica_slots)
        if not fits_one_kernel(*held.shape):
            return loops(totals, held, home)
        return lax.platform_dependent(
            totals,
            held,
            home,
            cuda=functools.partial(level_in_one_kernel, sweeps=self.sweeps),
            default=loops,
        )

    def level(self, totals, held, home, replica_slots):
        """Return quotas [E, D] with device sums as equal as the holders allow; held, home bool [E, D]."""
        experts, devices = held.shape
        quota = jnp.where(home, totals[:, None], 0.0)
        replicated = jnp.sum(held, axis=1) > 1
        number = jnp.sum(replicated)
        order = jnp.argsort(~replicated, stable=True)[: min(experts, devices * replica_slots)]

        def pour(carry, inputs):
            quota, load, going = carry
            expert, at = inputs
            active = going & (at < number)
            mine = quota[expert]
            base = load - mine
            # the level to which the tokens fill what the holders have, as in water-filling
            ground = jnp.sort(jnp.where(held[expert], base, jnp.inf))
            dry, number_of = jnp.isinf(ground), jnp.arange(1, devices + 1, dtype=base.dtype)
            level = (totals[expert] + jnp.cumsum(jnp.where(dry, 0.0, ground))) / number_of
            wet = ~dry & ((level > ground) | (jnp.arange(devices) == 0))
            level = level[devices - 1 - jnp.argmax(wet[::-1])]
            new = jnp.where(held[expert], jnp.maximum(level - base, 0.0), 0.0)
            new = jnp.where(active, new, mine)
            return (quota.at[expert].set(new), base + new, going), None

        def sweep(carry, _):
            quota, load, going = carry
            places = jnp.arange(order.shape[0])
            (quota, after, _), _ = lax.scan(pour, (quota, load, going), (order, places))
            going = going & (jnp.max(jnp.abs(after - load)) > 1e-3 * jnp.mean(after))
            return (quota, after, going), None

        start = (quota, jnp.sum(quota, axis=0), jnp.bool_(True))
        return lax.scan(sweep, start, None, length=self.sweeps)[0][0]


def share_tables(tables, counts, quota, slot, me, shape):
    """Return the tables of this source by which tokens are split as quotas [E, D] say; slot int32 [E, D], -1: none."""
    devices, experts = counts.shape
    at_home = (slot >= 0) & (slot < shape.home_slots)
    device = jnp.arange(devices, dtype=jnp.int32)
    return dataclasses.replace(
        tables,
        dest_slot=device[None] * shape.slots + jnp.maximum(slot, 0),
        dest_num=edges_of(counts, quota, at_home, me // shape.devices_per_node, shape.devices_per_node),
        dest_den=jnp.full((experts,), SHARE_ONE, jnp.uint32),
    )


def edges_of(counts, quota, home, node, devices_per_node: int):
    """Return uint32 [E, D], running shares of one node's tokens over rising devices, in units of 2^-16.

    A node's tokens first use the quota of the node's own holders; what is over goes where quota is left.
    """
    devices, experts = counts.shape
    nodes = devices // devices_per_node
    tiny = jnp.finfo(counts.dtype).tiny
    supply = jnp.sum(counts.reshape(nodes, devices_per_node, experts), axis=1).T  # [E, Nn]
    quota = jnp.where(jnp.sum(quota, axis=1, keepdims=True) > 0, quota, home)  # no tokens: where the home is
    demand = jnp.sum(quota.reshape(experts, nodes, devices_per_node), axis=2)
    stay = jnp.minimum(supply, demand)
    left, spare = (supply - stay)[:, node], demand - stay
    flow = left[:, None] * spare / jnp.maximum(jnp.sum(spare, axis=1, keepdims=True), tiny)
    flow = flow.at[:, node].add(stay[:, node])  # [E, Nn], tokens of this node by where they go
    plain = demand / jnp.sum(demand, axis=1, keepdims=True)
    sent = jnp.sum(flow, axis=1, keepdims=True)
    part = jnp.where(sent > 1e-9, flow / jnp.maximum(sent, 1e-9), plain)
    there = jnp.repeat(part / jnp.where(demand > 0, demand, 1.0), devices_per_node, axis=1)
    upto = jnp.cumsum(there * quota, axis=1)
    return jnp.rint(upto / upto[:, -1:] * SHARE_ONE).astype(jnp.uint32)
