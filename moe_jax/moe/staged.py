"""The MoE layer cut into three stages, for programs that place transfers beside its experts.

`make_staged_moe` returns what `make_moe` does, in three functions: send (gate, route, dispatch), experts (of pass 0),
finish (combine, later passes). Nothing of the bank is differentiated here: gradients of home experts leave through
`grad_sink`, of replicas through `replica_grad_sink`; the values of both are never read.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from moe_jax.errors import UserError
from moe_jax.grouped_matmul import GroupedWeights
from moe_jax.mesh.roles import Roles
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import expert_ffn
from moe_jax.moe.layer import grouped_matmul_finder, in_turn_with_late, make_decide, make_schedule, run_gate
from moe_jax.placement import PlanShape
from moe_jax.schedules.staged import StagedSchedule


@dataclasses.dataclass(frozen=True)
class StagedMoE:
    """Three functions of one layer; called inside `shard_map`, one after the other.

    `weights` is a dict of what an expert's parameters come from: bank {name: [Rb, ...]}, grad_sink {name: [Hs, ...]},
    replicas and replica_grad_sinks, tuples with {name: [m, ...]} for each transfer, and the layer's tables.
    """

    schedule: StagedSchedule
    config: MoEConfig
    roles: Roles
    activation: str
    find_implementation: Callable
    decide: Callable
    late: bool

    def send(self, x, token_ids, w_gate, bank, grad_sink, tables, noise_key):
        """Gate and dispatch tokens [t, M]: returns (Sent, GateStats, passes, replicas that come late).

        The last are a tuple as `make_decide` returns it; their gradients leave through the cotangent of `grad_sink`.
        """
        late = ()

        def gate(x, token_ids):
            nonlocal grad_sink
            weight = w_gate
            if self.late:
                x, weight, grad_sink = in_turn_with_late(x, weight, grad_sink, tables)
            return run_gate(
                x, token_ids, w_gate=weight, config=self.config, noise_key=noise_key, model=self.roles.model
            )

        def place(stats):
            nonlocal late
            here, late = self.decide(stats, bank, grad_sink, tables, ())
            return here

        return *self.schedule.send(x, token_ids, gate, place), late

    def experts(self, rows, group_sizes, weights):
        """Apply the experts to rows [R, M] in group order."""
        operands = {name: _operands(name, weights) for name in weights["bank"]}
        with jax.named_scope("experts"):
            name = self.find_implementation(rows, operands)
            return expert_ffn(rows, group_sizes, operands, activation=self.activation, implementation=name)

    def finish(self, done, context, weights):
        """Return rows to their sources and run the later passes: [t, M]."""
        return self.schedule.finish(done, context, functools.partial(self.experts, weights=weights))


def _operands(name: str, weights: dict) -> tuple[GroupedWeights, ...]:
    """Return the operands of one weight: home slots in the bank, then the replica slots of each transfer."""
    home_sink = weights["grad_sink"][name] if weights["grad_sink"] else None
    slots = weights["tables"].home_row
    operands = [GroupedWeights(bank=weights["bank"][name], slots=slots, grad_sink=home_sink, constant=True)]
    for replicas, grad_sink in zip(weights["replicas"], weights["replica_grad_sinks"], strict=True):
        slots = jnp.arange(replicas[name].shape[0], dtype=jnp.int32)
        operands.append(GroupedWeights(bank=replicas[name], slots=slots, grad_sink=grad_sink[name], constant=True))
    return tuple(operands)


def make_staged_moe(
    config: MoEConfig, roles: Roles, tokens: int, activation: str, plan: PlanShape | None = None,
    split_tokens: bool = False,
) -> StagedMoE:  # fmt: skip
    """Return the layer in stages; arguments as in `make_moe`.

    Raises:
      UserError: for a schedule whose experts do not run in one piece.
    """
    schedule = make_schedule(config, roles, tokens, plan, split_tokens)
    if not isinstance(schedule, StagedSchedule):
        raise UserError(
            f"ModelConfig.prefetch needs a MoEConfig.schedule whose experts run in one piece, not {config.schedule!r} "
            "on this mesh; set MoEConfig.schedule to 's1', 's2' or 'deepspeed', or ModelConfig.prefetch = 'none'"
        )
    find = grouped_matmul_finder(config, roles)
    return StagedMoE(
        schedule, config, roles, activation, find, make_decide(roles, plan), plan is not None and plan.late is not None
    )
