"""FasterMoE's dynamic shadowing, decided from the counts of the step: hot experts go to all devices while that pays.

Inputs: counts, homes. Outputs: tables by which a device computes its own tokens of a shadowed expert itself and sends
all others home. Twin of `moe_jax.planning.fastermoe` with `when = 'after_gate'`.
Source: FasterMoE, equations 7 and 8, algorithm 1.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from moe_jax.moe.after_gate import by_falling, late_size, slots_of
from moe_jax.moe.late_transfer import fit_late


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowRule:
    """Shadow experts by falling load until one does not pay; one that does not fit the late transfer is skipped.

    Attributes:
      compute, exchange: seconds of one token, computed forward and backward, and carried there and back both ways.
      shadow: seconds to broadcast an expert and to reduce its gradient, as the paper has it; counted where
        `late_seconds` is empty.
      late_seconds: seconds of the late transfer and its way back in each of its sizes, 0 for none first.
      residual: whether both sides of the comparison count the all-to-all that is left.
    """

    compute: float
    exchange: float
    residual: bool
    shadow: float = 0.0
    late_seconds: tuple[float, ...] = ()

    def decide(self, tables, counts, holders, me, shape):
        devices, experts = counts.shape
        slot, late = slots_of(holders[:, : shape.home_slots], experts), shape.late
        home = jnp.argmax(slot, axis=1).astype(jnp.int32)
        at_home = home * shape.slots + jnp.max(slot, axis=1)
        counts = counts.astype(jnp.result_type(float))
        totals = jnp.sum(counts, axis=0)
        own = counts[home, jnp.arange(experts)]
        order = by_falling(totals)
        tokens = jnp.zeros((devices,), counts.dtype).at[home].add(totals)
        received = jnp.zeros((devices,), counts.dtype).at[home].add(totals - own)
        copying = jnp.asarray(self.late_seconds or (0.0,), counts.dtype)

        def seconds(tokens, received):
            return self.compute * jnp.max(tokens) + (self.exchange * jnp.max(received) if self.residual else 0.0)

        def turn(carry, expert):
            tokens, received, best, going, offers = carry
            at = home[expert]
            more = offers.at[at].add(1)
            slots = jnp.max(jnp.sum(more) - more)  # of any device: all that are shadowed and not at home there
            crossing = jnp.max(jnp.sum(more.reshape(late.nodes, late.inside), axis=1)) if late.by_node else 0
            room = (more[at] <= late.offers) & (slots <= late.slots) & (crossing <= late.crossing)
            trial = (tokens + counts[:, expert]).at[at].add(-totals[expert])
            left = received.at[at].add(own[expert] - totals[expert])
            if self.late_seconds:
                extra = copying[late_size(jnp.stack([jnp.max(more), slots, jnp.int32(crossing)]), late)]
            else:
                extra = jnp.sum(more) * self.shadow
            time = seconds(trial, left) + extra
            going = going & (~room | (time < best))  # what does not fit is skipped, and the search goes on
            take = going & room
            kept = (
                jnp.where(take, trial, tokens),
                jnp.where(take, left, received),
                jnp.where(take, time, best),
                going,
                jnp.where(take, more, offers),
            )
            return kept, take

        before = seconds(tokens, received) if self.residual else (self.compute + self.exchange) * jnp.max(tokens)
        start = (tokens, received, before, jnp.bool_(True), jnp.zeros(devices, jnp.int32))
        taken = lax.scan(turn, start, order)[1]
        chosen = jnp.zeros(experts, bool).at[order].set(taken)
        everywhere = jnp.arange(devices)[None] != home[:, None]
        added, slot, transfer, used = fit_late(chosen[:, None] & everywhere, order, slot, me, shape)
        dest_slot = jnp.where(added[:, me], me * shape.slots + slot[:, me], at_home)
        decided = dataclasses.replace(
            tables,
            dest_slot=dest_slot[:, None] + jnp.zeros_like(tables.dest_slot),
            dest_num=jnp.ones_like(tables.dest_num),
            dest_den=jnp.ones_like(tables.dest_den),
        )
        return decided, transfer, used
