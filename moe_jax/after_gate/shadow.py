"""FasterMoE's dynamic shadowing, decided from the counts of the step: hot experts go to all devices while that pays.

Inputs: counts, homes. Outputs: tables by which a device computes its own tokens of a shadowed expert itself and sends
all others home. Twin of `moe_jax.planner.fastermoe` with `when = 'after_gate'`.
Source: FasterMoE, equations 7 and 8, algorithm 1.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from moe_jax.after_gate.contract import by_falling, slots_of
from moe_jax.collectives.transfer_plan import Transfer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowRule:
    """Shadow experts by falling load until one does not pay.

    Attributes:
      compute, exchange: seconds of one token, computed forward and backward, and carried there and back both ways.
      shadow: seconds to broadcast an expert and to reduce its gradient.
      residual: whether both sides of the comparison count the all-to-all that is left.
      home_slots: Hs; replica_slots: Gs, the most experts shadowed.
    """

    compute: float
    exchange: float
    shadow: float
    residual: bool
    home_slots: int
    replica_slots: int
    ahead: bool = dataclasses.field(init=False, default=False)

    @property
    def late_replicas(self) -> int:
        return self.replica_slots

    def decide(self, tables, counts, holders, me):
        devices, experts = counts.shape
        homes = slots_of(holders[:, : self.home_slots], experts)
        home = jnp.argmax(homes, axis=1).astype(jnp.int32)
        order, shadowed = self._search(counts, home)
        rank = jnp.zeros((experts,), jnp.int32).at[order].set(jnp.arange(experts, dtype=jnp.int32))
        mine = (rank < shadowed) & (home != me)
        groups = self.home_slots + self.replica_slots
        at_home = home * groups + jnp.max(homes, axis=1)
        here = me * groups + self.home_slots + rank
        chunk = jnp.arange(self.late_replicas, dtype=jnp.int32)
        chosen = order[: self.late_replicas]
        used = chunk < shadowed
        send = jnp.where(used & (home[chosen] == me), homes[chosen, home[chosen]], self.home_slots)
        take = jnp.where(used & (home[chosen] != me), chunk, self.late_replicas)
        one = jnp.ones_like(tables.dest_num)
        decided = dataclasses.replace(
            tables,
            dest_slot=jnp.where(mine, here, at_home)[:, None] + jnp.zeros_like(tables.dest_slot),
            dest_num=one,
            dest_den=jnp.ones_like(tables.dest_den),
            transfer=Transfer(send=send, take=take, layer=jnp.int32(0)),
        )
        return decided, shadowed

    def _search(self, counts, home):
        """Return (experts by falling load int32 [E], how many of them to shadow int32 [])."""
        devices, experts = counts.shape
        counts = counts.astype(jnp.result_type(float))
        totals = jnp.sum(counts, axis=0)
        own = counts[home, jnp.arange(experts)]
        order = by_falling(totals)
        tokens = jnp.zeros((devices,), counts.dtype).at[home].add(totals)
        received = jnp.zeros((devices,), counts.dtype).at[home].add(totals - own)

        def seconds(tokens, received):
            return self.compute * jnp.max(tokens) + (self.exchange * jnp.max(received) if self.residual else 0.0)

        def turn(carry, r):
            tokens, received, best, going, shadowed = carry
            expert = order[r]
            at = home[expert]
            trial = (tokens + counts[:, expert]).at[at].add(-totals[expert])
            left = received.at[at].add(own[expert] - totals[expert])
            time = seconds(trial, left) + (r + 1) * self.shadow
            going = going & (time < best)
            kept = (
                jnp.where(going, trial, tokens),
                jnp.where(going, left, received),
                jnp.where(going, time, best),
                going,
                shadowed + going,
            )
            return kept, None

        before = seconds(tokens, received) if self.residual else (self.compute + self.exchange) * jnp.max(tokens)
        start = (tokens, received, before, jnp.bool_(True), jnp.int32(0))
        turns = jnp.arange(min(self.late_replicas, experts), dtype=jnp.int32)
        return order, lax.scan(turn, start, turns)[0][4]
