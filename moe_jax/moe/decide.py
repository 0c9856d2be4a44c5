"""What happens between gate and dispatch: a plan may decide from the counts of this step where experts are computed.

Inputs: the gate's statistics, the layer's tables, what replicas were planned ahead. Outputs: the tables to send by, and
the replicas, those that come late behind the others. Inside `shard_map`. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax import lax

from moe_jax.after_gate import fetch_late, gather_counts
from moe_jax.collectives.ordering import gradients_in_turn, wait_for
from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.mesh.roles import Roles
from moe_jax.placement import PlanShape


def in_turn_with_late(x, weight, grad_sink, tables):
    """Return the three; sums of the first two's gradients come after the branch of late replicas' gradients."""
    weight = cast_varying(weight, varying_axes(x))
    (x, weight), grad_sink = gradients_in_turn((x, weight), grad_sink, tables.home_row[0])
    return x, weight, grad_sink


def late_after_tokens(tokens, replicas, tables):
    """Return (tokens, replicas); gradients of the late ones, the last, leave after those of dispatched tokens are home.

    Without it a compiler may put the branch of late gradients ahead of the exchanges that bring the tokens' home (jax
    0.12 does for `pairwise`).
    """
    late, tokens = gradients_in_turn(replicas[-1], tokens, tables.home_row[0])
    return tokens, (*replicas[:-1], late)


def make_decide(roles: Roles, plan: PlanShape | None) -> Callable:
    """Return decide(stats, bank, grad_sink, tables, replicas) -> (tables, replicas) of one layer, after its gate.

    `replicas` are those planned ahead: a tuple of (values {name: [m, ...]}, their grad_sink) for each transfer, in the
    order of their slots; those that come late are put behind them.
    """
    inside = tuple(axis for axis in roles.all if axis not in roles.expert)

    def as_planned(stats, bank, grad_sink, tables, replicas):
        return tables, replicas

    def by_rule(stats, bank, grad_sink, tables, replicas):
        with jax.named_scope("after_gate"):
            counts, holders = gather_counts(stats.counts, tables, roles.expert, inside)
            decision = plan.after_gate.decide(tables, counts, holders, lax.axis_index(roles.expert), plan)
            if plan.late is None:
                return decision.tables, replicas
            bank, grad_sink = cast_varying((bank, grad_sink), varying_axes(stats.counts))
            used = wait_for(decision.used, tables.home_row[0], stats)
            decision = dataclasses.replace(decision, used=used)
            late = fetch_late(bank, grad_sink, tables.home_row, decision, plan.late, roles.expert)
            tables = decision.tables
            tables = dataclasses.replace(tables, dest_slot=wait_for(tables.dest_slot, tables.home_row[0], late))
            return tables, (*replicas, late)

    return as_planned if plan is None or plan.after_gate is None else by_rule
