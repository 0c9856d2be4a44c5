"""The MoE layer, top to bottom: what happens to this device's tokens between entering and leaving it.

    tokens -> enter -> gate -> (after the gate: where experts are) -> route -> pass: dispatch, experts, combine -> leave

Inside `shard_map`. `MoE` is the layer, `ExpertParallel` how plain expert parallelism moves its rows; the other
schedules (`schedules/`) move them in other orders. `make_moe` (build.py) makes a `MoE` of a config. `models/stages.py`
and `models/prefetch.py` call the methods of both one by one, to place something else next to a stage.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.kernels.grouped import choose_implementation
from moe_jax.moe.after_gate import decide, fetch_late
from moe_jax.moe.bank import ExpertWeights
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import expert_ffn
from moe_jax.moe.passes import add_later_passes
from moe_jax.moe.permute import permute_rows, permute_tokens, unpermute_rows, unpermute_tokens
from moe_jax.moe.routers import GateStats, Router, RouterInputs, share_statistics
from moe_jax.moe.routing import destinations, pack, passes_of, regroup, route
from moe_jax.moe.schedule import LayerSizes, Routed, Schedule, Sent, register, send_as_float8
from moe_jax.parallel.exchange import ExpertGroup
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import wait_for
from moe_jax.planning.plan_shape import PlanShape


@dataclasses.dataclass(frozen=True)
class MoE:
    """One layer on one device; `make_moe` builds it.

    Attributes:
      config, roles, activation, plan: as `make_moe` takes them.
      router: which experts each token takes; schedule: how rows move.
      records: whether every token's choices leave with the statistics.
    """

    config: MoEConfig
    roles: Roles
    activation: str
    plan: PlanShape | None
    router: Router
    schedule: Schedule
    records: bool = False

    @property
    def reads_results(self) -> bool:
        """Whether the layer's backward reads what the experts computed; where it does not, none of it is made again."""
        return self.schedule.needs_results or self.config.residual == "learned"  # so does the gradient of w_mix

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
        routed, stats, replicas = self.before_dispatch(x, gate, inputs, bank, grad_sink, replicas)
        weights = ExpertWeights(bank, grad_sink, inputs.tables.home_row, replicas)
        experts = functools.partial(self.experts, weights=weights)
        y = self.schedule.run_pass(routed, 0, experts)  # dispatch, experts, combine
        y = self.finish(y, routed, stats, experts)
        # sums of statistics over devices come after the layer's own collectives
        return y, *wait_for((stats, routed.passes), y)

    def before_dispatch(self, x, gate, inputs: RouterInputs, bank, grad_sink, replicas=()):
        """Run what precedes the dispatch: enter, gate, decide, route; arguments as in a call.

        Returns:
          (Routed, GateStats, replicas): replicas that come after the gate stand behind those given.
        """
        tables = inputs.tables
        if inputs.replay is None:
            tokens, ids = self.schedule.enter(x, inputs.token_ids)
            inputs = dataclasses.replace(inputs, token_ids=ids)
        else:
            both = jnp.concatenate([inputs.token_ids[:, None], inputs.replay], axis=1)
            tokens, both = self.schedule.enter(x, both)
            inputs = dataclasses.replace(inputs, token_ids=both[:, 0], replay=both[:, 1:])
        with jax.named_scope("gate"):
            params = gate if isinstance(gate, dict) else {"w_gate": gate}
            choice, stats = self.router.choose(tokens, params, inputs)
            if self.records:
                ids = choice.expert_ids
                ids = ids if inputs.real is None else jnp.where(inputs.real[:, None], ids, -1)
                stats = dataclasses.replace(stats, choices=ids)
            stats = share_statistics(stats, choice, tokens, self.roles.model, inputs.real)
        if self.plan is not None and self.plan.after_gate is not None:
            decided = decide(self.plan, self.roles, stats.counts, tables)
            tables = decided[0]
            if self.plan.late is not None:
                # Replicas are fetched in a branch. Their gradients leave after those of dispatched tokens are
                # home. Without it a compiler may put their branch ahead of the exchanges that bring these home (jax
                # 0.12 does for `pairwise`).
                routing = tokens, choice, stats, tables
                routing, fetched = fetch_late(routing, self.plan.late, self.roles.expert, decided, bank, grad_sink)
                tokens, choice, stats, tables = routing
                replicas = (*replicas, fetched)
        return self.schedule.route(tokens, choice, tables), stats, replicas

    def experts(self, rows, group_sizes, row_weights=None, *, weights: ExpertWeights):
        """Apply the experts to rows [R, M] in group order; group_sizes int32 [G], row_weights as `expert_ffn` takes."""
        wanted = self.config.grouped_matmul
        with jax.named_scope("experts"):
            operands = {name: weights.operands(name) for name in weights.bank}
            # an abstract mesh has no devices to ask; an implementation that is named needs none
            device = self.roles.mesh.devices.flat[0] if wanted == "auto" else None
            dims = operands["w_in"][0].bank.shape[1:]
            chosen = choose_implementation(wanted, device, rows.dtype, dims)
            how = {"activation": self.activation, "implementation": chosen}
            return expert_ffn(rows, group_sizes, operands, row_weights, **how)

    def finish(self, y, routed: Routed, stats: GateStats, experts: Callable):
        """Run what follows the combine of pass 0, whose result is y: later passes, leave; returns [t, M]."""
        schedule = self.schedule
        one_pass = functools.partial(schedule.run_pass, routed, experts=experts)
        y = add_later_passes(y, one_pass, routed.passes, schedule.run_passes, before=lax.stop_gradient(stats))
        return schedule.leave(y)


@register("s1")
class ExpertParallel(Schedule):
    """Plain expert parallelism: rows travel in one exchange to the devices of their experts, and in another one back.

    Under MP each device takes its own part of the group's tokens, before the gate, and an all-gather makes them whole
    at the end; under ESP rows go to all shards of their expert. Its drop groups are the N / N_MP tokens of one device.
    Source: GShard (Lepikhin et al. 2020); with MP and ESP Parm's first schedule, section III-B.

    Attributes:
      travelling: where the rows of one exchange stand; `layout`, unless a subclass sends others.
    """

    one_piece = True

    def __init__(self, roles: Roles, sizes: LayerSizes, group: ExpertGroup | None = None):
        """Build it; group: among whom rows travel, the EP and ESP devices by default."""
        super().__init__(roles, sizes)
        self.travelling = self.layout
        self.group = group or ExpertGroup(roles, sizes.config.transport)

    def member(self):
        """Return int32 [], the EP member by whose place the buckets of this device are laid out."""
        roles = self.roles
        return lax.axis_index(roles.expert) if roles.size(roles.expert) > 1 else jnp.int32(0)

    def route(self, tokens, choice, tables):
        groups, me = self.sizes.groups, self.member()
        with jax.named_scope("route"):
            device, expert = destinations(tables, choice, groups)
            routing = route(choice, device, expert, self.roles.size(self.roles.expert), groups)
            passes = self.passes_needed(passes_of(routing, self.layout, groups, me))
        return Routed(tokens, choice.weights, routing, passes)

    def run_pass(self, routed, index, experts):
        rows, sent = self.pack(routed, index)
        done = self.compute(self.send(rows, sent), sent, experts)
        return self.unpack(self.send_back(done, sent), sent, routed.weights)

    def pack(self, routed: Routed, index):
        """Put the rows of pass `index` into buckets and exchange their counts; return (rows [R, M], `Sent`)."""
        sizes, me = self.sizes, self.member()
        with jax.named_scope("dispatch"):
            parcel = pack(routed.routing, index, self.layout, sizes.config.top_k, sizes.groups, me)
            arriving = self.group.send_counts(parcel.counts)
            return permute_tokens(routed.tokens, parcel), Sent(parcel, regroup(arriving, self.layout, me))

    def send(self, rows, sent: Sent):
        """Exchange packed rows [R, M], as float8 where that is asked for; of `sent` only sizes and parcels are read."""
        with jax.named_scope("dispatch"):
            if self.sizes.sent_bytes:
                return send_as_float8(self.exchange, rows, sent)
            return self.exchange(rows, sent)

    def exchange(self, rows, sent: Sent):
        """Exchange rows [R, ...] of any dtype as they are: [Ns R, ...]."""
        return self.group.send(rows, self.travelling)

    def compute(self, received, sent: Sent, experts: Callable):
        """Apply the experts to received rows [Ns R, M], which leave in the order in which they came."""
        with jax.named_scope("dispatch"):
            rows = permute_rows(received, sent.grouping)
        done = experts(rows, sent.grouping.group_sizes)
        with jax.named_scope("combine"):
            return unpermute_rows(done, sent.grouping)

    def send_back(self, rows, sent: Sent):
        """Exchange computed rows [Ns R, M] the other way: [R, M], summed over the shards of an expert."""
        with jax.named_scope("combine"):
            return self.group.send_back(rows, self.travelling)

    def unpack(self, returned, sent: Sent, weights):
        """Return the sum [t, M] of each token's returned rows [R, M], weighted by weights [t, K] of its choices."""
        with jax.named_scope("combine"):
            return unpermute_tokens(returned, weights, sent.parcel)
