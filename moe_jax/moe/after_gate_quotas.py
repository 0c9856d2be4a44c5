"""A plan of quotas after the gate: how many tokens of an expert each device computes, with replicas that come late.

What is decided stands in a planner's file, written once for NumPy and jax.numpy; this makes tables of it: destinations
in shares, and the transfer of the replicas that the quotas need.
Letters: docs/notation.md; quota [E, D] tokens of e on d.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from moe_jax.moe.after_gate import by_falling, slots_of
from moe_jax.moe.after_gate_shares import share_tables
from moe_jax.moe.late_transfer import fit_late


class JaxArrays:
    """jax.numpy with the operations of `moe_jax.planning.llep`."""

    def __getattr__(self, name: str) -> typing.Any:
        return getattr(jnp, name)

    def put(self, array, index, value):
        """Return the array with `value` at `index`."""
        return array.at[index].set(value)

    def repeat(self, step, carry, going, times: int):
        """Return step(step(... carry)) for as long as `going(carry)` holds, at most `times` steps."""

        def more(state):
            return (state[0] < times) & going(state[1])

        return lax.while_loop(more, lambda state: (state[0] + 1, step(state[1])), (jnp.int32(0), carry))[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuotaRule:
    """Apply a plan of quotas; experts whose replicas do not fit the late transfer stay at home.

    Attributes:
      plan: what decides: tokens by expert and device [L, E, D], from (xp, totals [L, E], homes int [L, E], (slots of a
        device, devices), knobs).
    """

    plan: Callable
    knobs: tuple[float, ...]

    def decide(self, tables, counts, holders, me, shape):
        devices, experts = counts.shape
        slot = slots_of(holders, experts)
        at_home = (slot >= 0) & (slot < shape.home_slots)
        home = jnp.argmax(at_home, axis=1).astype(jnp.int32)
        counts = counts.astype(jnp.result_type(float))
        totals = jnp.sum(counts, axis=0)
        quota = self.plan(JaxArrays(), totals[None], home[None], (shape.late_slots, devices), self.knobs)[0]
        wanted = (quota > 0) & ~at_home
        added, slot, transfer, used = fit_late(wanted, by_falling(totals), slot, me, shape)
        cut = jnp.any(wanted & ~added, axis=1, keepdims=True)
        quota = jnp.where(cut, jnp.where(at_home, totals[:, None], 0.0), quota)
        return share_tables(tables, counts, quota, slot, me, shape), transfer, used
