"""The MoE layer, top to bottom: what happens to this device's tokens between entering and leaving it.

    tokens -> gate -> (after the gate: where experts are) -> route -> dispatch -> experts -> combine -> tokens

Inside `shard_map`. Which rows leave in which order is a schedule's: `schedules/expert_parallel.py` is plain expert
parallelism. `make_moe` (build.py) makes a `MoE` of a config; called, it is the whole layer. `models/stages.py` calls
its methods one by one, to place something else beside a stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.kernels.float8_blocks import E4M3
from moe_jax.kernels.matmul import choose_implementation
from moe_jax.moe.after_gate import decide
from moe_jax.moe.bank import ExpertWeights
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import expert_ffn
from moe_jax.moe.routers import GateStats, Router, RouterInputs, share_statistics
from moe_jax.moe.schedules.contract import Routed, Schedule
from moe_jax.moe.schedules.passes import add_later_passes
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import gradients_in_turn, wait_for
from moe_jax.parallel.varying import cast_varying, varying_axes
from moe_jax.planning.plan_shape import PlanShape


@dataclasses.dataclass(frozen=True)
class MoE:
    """One layer on one device; `make_moe` builds it.

    Attributes:
      config, roles, activation, plan: as `make_moe` takes them.
      router: which experts each token takes; schedule: how rows move.
    """

    config: MoEConfig
    roles: Roles
    activation: str
    plan: PlanShape | None
    router: Router
    schedule: Schedule

    @property
    def late(self) -> bool:
        """Whether replicas may be fetched after the gate, in a branch of the program."""
        return self.plan is not None and self.plan.late is not None

    def __call__(self, x, gate, inputs: RouterInputs, bank, grad_sink, replicas=()):
        """Run the layer on tokens x [t, M].

        Args:
          x: float [t, M].
          gate: w_gate [M, E], or {'w_gate': [M, E], ...} for a router that keeps more.
          inputs: token_ids int32 [t], tables of this layer, noise_key (None for no noise), replay int32 [t, K] or None.
          bank: {name: [Rb, ...]}; grad_sink: {name: [Hs, ...]}.
          replicas: what `fetch_replicas` returned.

        Returns:
          (y [t, M], GateStats, passes int32 []).
        """
        routed, stats, grad_sink, replicas = self.route(x, gate, inputs, bank, grad_sink, replicas)
        weights = ExpertWeights(bank, grad_sink, inputs.tables.home_row, replicas)

        def experts(rows, group_sizes):
            return self.experts(rows, group_sizes, weights)

        y = self.schedule.run_pass(routed, 0, experts)  # dispatch, experts, combine
        y = self.finish(y, routed, stats, experts)
        # sums of statistics over devices come after the layer's own collectives
        stats = jax.tree.map(lambda leaf: wait_for(leaf, routed.passes, y), stats)
        return y, stats, wait_for(routed.passes, routed.passes, y)

    def route(self, x, gate, inputs: RouterInputs, bank, grad_sink, replicas=()):
        """Run what precedes the dispatch: enter, gate, decide, route; arguments as in a call.

        Returns:
          (Routed, GateStats, grad_sink, replicas): replicas that come after the gate stand behind those given, and
          their gradients leave through the cotangent of that grad_sink.
        """
        tables, ids, replay = inputs.tables, inputs.token_ids, inputs.replay
        count = tables.home_row[0]
        if replay is None:
            tokens, ids = self.schedule.enter(x, ids)
        elif self.router.replays:
            tokens, both = self.schedule.enter(x, jnp.concatenate([ids[:, None], replay], axis=1))
            ids, replay = both[:, 0], both[:, 1:]
        else:
            raise UserError(
                f"Batch.choices cannot be replayed by MoEConfig.router = {self.config.router!r}; leave them out, or "
                "set MoEConfig.router = 'topk' or 'sigmoid_bias'"
            )
        inputs = dataclasses.replace(inputs, token_ids=ids, replay=replay)
        gated = tokens
        if self.late:
            # sums of the gradients of tokens and gate come after the branch of late replicas' gradients
            both = gated, cast_varying(gate, varying_axes(gated))
            (gated, gate), grad_sink = gradients_in_turn(both, grad_sink, count)
        with jax.named_scope("gate"):
            params = gate if isinstance(gate, dict) else {"w_gate": gate}
            choice, stats = self.router.choose(gated, params, inputs)
            if self.config.record_choices:
                stats = dataclasses.replace(stats, choices=choice.expert_ids)
            stats = share_statistics(stats, choice, gated, self.roles.model)
        tables, replicas = decide(self.plan, self.roles, stats, bank, grad_sink, tables, replicas)
        if self.late:
            # Gradients of the late replicas, the last, leave after those of dispatched tokens are home. Without it a
            # compiler may put their branch ahead of the exchanges that bring these home (jax 0.12 does for `pairwise`).
            late, tokens = gradients_in_turn(replicas[-1], tokens, count)
            replicas = (*replicas[:-1], late)
        return self.schedule.route(tokens, choice, tables), stats, grad_sink, replicas

    def experts(self, rows, group_sizes, weights: ExpertWeights):
        """Apply the experts to rows [R, M] in group order."""
        name = self.config.grouped_matmul
        with jax.named_scope("experts"):
            operands = {name: weights.operands(name) for name in weights.bank}
            # named: without looking at the devices, for the mesh may be abstract
            device = self.roles.mesh.devices.flat[0] if name == "auto" else None
            dims = operands["w_in"][0].bank.shape[1:]
            name = choose_implementation(name, device, rows.dtype, dims, self.config.expert_dtype == E4M3)
            return expert_ffn(rows, group_sizes, operands, activation=self.activation, implementation=name)

    def finish(self, y, routed: Routed, stats: GateStats, experts: Callable):
        """Run what follows the combine of pass 0, whose result is y: later passes, leave; returns [t, M]."""
        schedule = self.schedule

        def one_pass(index):
            return schedule.run_pass(routed, index, experts)

        y = add_later_passes(y, one_pass, routed.passes, schedule.run_passes, before=lax.stop_gradient(stats))
        return schedule.leave(y)
