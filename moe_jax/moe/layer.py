"""The MoE layer, top to bottom: what happens to this device's tokens between entering and leaving it.

Inputs: tokens [t, M] of this device, the gate's weight, the bank and the layer's tables. Outputs: tokens [t, M], the
gate's statistics, the passes taken. Inside `shard_map`. `make_moe` builds a `MoE`; called, it is the whole layer, and
its methods are the same layer in stages, for programs that place something else beside a stage (`models/stages.py`).
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.cluster.layer_work import HalfWork
from moe_jax.collectives.bucket_rows import BucketRows
from moe_jax.collectives.ordering import wait_for
from moe_jax.dispatch import from_lines, to_lines
from moe_jax.errors import UserError
from moe_jax.float8 import E4M3, check_blocks
from moe_jax.grouped_matmul import GroupedWeights, choose_implementation, implementations
from moe_jax.mesh.roles import Roles
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.decide import in_turn_with_late, late_after_tokens, make_decide
from moe_jax.moe.experts import expert_ffn, weight_names
from moe_jax.placement import PlanShape
from moe_jax.routers import Choices, GateStats, Router, RouterInputs, RouterPlace, build_router, share_statistics
from moe_jax.schedules import LayerSizes, ScheduleOptions, build_schedule, schedule_record
from moe_jax.schedules.contract import Chooser, Routed, Schedule
from moe_jax.schedules.float8_dispatch import Float8Chooser, check_float8_dispatch
from moe_jax.schedules.passes import add_later_passes


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Where the parameters of a layer's experts come from, and where their gradients go.

    Attributes:
      bank: {name: [Rb, ...]}; grad_sink: {name: [Hs, ...]}, or {} where nothing is differentiated.
      home_row: int32 [Hs], the bank row of each home slot.
      replicas: a tuple of (values {name: [m, ...]}, their grad_sink) for each transfer, in the order of their slots.
      constant: bank and replicas have no gradient but through the grad_sinks.
    """

    bank: dict
    grad_sink: dict
    home_row: jax.Array
    replicas: tuple
    constant: bool = False

    def operands(self, name: str) -> tuple[GroupedWeights, ...]:
        """Return the operands of one weight: home slots in the bank, then the replica slots of each transfer."""
        sources = [(self.bank, self.home_row, self.grad_sink)]
        for values, grad_sink in self.replicas:
            sources.append((values, jnp.arange(values[name].shape[0], dtype=jnp.int32), grad_sink))
        return tuple(
            GroupedWeights(
                bank=values[name],
                slots=slots,
                grad_sink=grad_sink[name] if self.grad_sink else None,
                constant=self.constant,
            )
            for values, slots, grad_sink in sources
        )


@dataclasses.dataclass(frozen=True)
class MoE:
    """One layer on one device; `make_moe` builds it.

    Attributes:
      config, roles, activation: as `make_moe` takes them.
      router: which experts each token takes.
      chooser: the schedule, or a choice of several by the bytes of a row.
      decide: what `make_decide` returns; late: it may fetch replicas after the gate.
      find_implementation: what `grouped_matmul_finder` returns.
    """

    config: MoEConfig
    roles: Roles
    activation: str
    router: Router
    chooser: Chooser
    decide: Callable
    late: bool
    find_implementation: Callable

    def __call__(self, x, token_ids, gate, bank, grad_sink, tables, noise_key=None, replicas=(), replay=None):
        """Run the layer on tokens x [t, M].

        Args:
          x: float [t, M]; token_ids: int32 [t].
          gate: w_gate [M, E], or {'w_gate': [M, E], ...} for a router that keeps more.
          bank: {name: [Rb, ...]}; grad_sink: {name: [Hs, ...]}; tables: `Tables` of this layer.
          noise_key: PRNG key, or None for no noise.
          replicas: what `fetch_replicas` returned.
          replay: int32 [t, K], choices of before to be taken again, or None.

        Returns:
          (y [t, M], GateStats, passes int32 []).
        """
        schedule = self.schedule_of(x)
        routed, stats, grad_sink, replicas = self.route(
            x, token_ids, gate, bank, grad_sink, tables, noise_key, replicas, replay
        )
        experts = functools.partial(self.experts, weights=ExpertWeights(bank, grad_sink, tables.home_row, replicas))
        y = schedule.run_pass(routed, 0, experts)  # dispatch, experts, combine
        y = self.finish(y, routed, stats, experts)
        # sums of statistics over devices come after the layer's own collectives
        stats = jax.tree.map(lambda leaf: wait_for(leaf, routed.passes, y), stats)
        return y, stats, wait_for(routed.passes, routed.passes, y)

    def route(self, x, token_ids, gate, bank, grad_sink, tables, noise_key=None, replicas=(), replay=None):
        """Run what precedes the dispatch: enter, gate, decide, route; arguments as in a call.

        Returns:
          (Routed, GateStats, grad_sink, replicas): replicas that come after the gate stand behind those given, and
          their gradients leave through the cotangent of that grad_sink.
        """
        schedule = self.schedule_of(x)
        tokens, ids, replay = self.enter(schedule, x, token_ids, replay)
        gated = tokens
        if self.late:
            gated, gate, grad_sink = in_turn_with_late(gated, gate, grad_sink, tables)
        with jax.named_scope("gate"):
            params = gate if isinstance(gate, dict) else {"w_gate": gate}
            choice, stats = self.router.choose(gated, params, RouterInputs(noise_key, ids, tables, replay))
            if self.config.record_choices:
                stats = dataclasses.replace(stats, choices=choice.expert_ids)
            stats = share_statistics(stats, choice, gated, self.roles.model)
        tables, replicas = self.decide(stats, bank, grad_sink, tables, replicas)
        if self.late:
            tokens, replicas = late_after_tokens(tokens, replicas, tables)
        rows, lines = to_lines(tokens, choice)
        routed = schedule.route(rows, choice, tables)
        routed = routed if lines is None else dataclasses.replace(routed, lines=lines)
        return routed, stats, grad_sink, replicas

    def enter(self, schedule: Schedule, x, token_ids, replay):
        """Return (tokens, their ids, their choices of before or None) that this device gates."""
        if replay is None:
            return *schedule.enter(x, token_ids), None
        if not self.router.replays:
            raise UserError(
                f"Batch.choices cannot be replayed by MoEConfig.router = {self.config.router!r}; leave them out, or "
                "set MoEConfig.router = 'topk' or 'sigmoid_bias'"
            )
        tokens, both = schedule.enter(x, jnp.concatenate([token_ids[:, None], replay], axis=1))
        return tokens, both[:, 0], both[:, 1:]

    def experts(self, rows, group_sizes, weights: ExpertWeights):
        """Apply the experts to rows [R, M] in group order."""
        with jax.named_scope("experts"):
            operands = {name: weights.operands(name) for name in weights.bank}
            name = self.find_implementation(rows, operands)
            return expert_ffn(rows, group_sizes, operands, activation=self.activation, implementation=name)

    def finish(self, y, routed: Routed, stats: GateStats, experts: Callable):
        """Run what follows the combine of pass 0, whose result is y: later passes, leave; returns [t, M]."""
        schedule = self.schedule_of(y)

        def one_pass(index):
            return schedule.run_pass(routed, index, experts)

        y = add_later_passes(y, one_pass, routed.passes, schedule.most_passes, before=lax.stop_gradient(stats))
        return schedule.leave(from_lines(schedule.collect(y), routed.lines))

    def schedule_of(self, rows) -> Schedule:
        """Return the schedule for rows [..., M] like these."""
        dim = rows.shape[-1]
        return self.chooser.for_rows(dim * rows.dtype.itemsize, self.config.sent_bytes(dim))


def make_moe(
    config: MoEConfig, roles: Roles, tokens: int, activation: str, plan: PlanShape | None = None,
    split_tokens: bool = False, length: int = 0, beside: HalfWork | None = None,
) -> MoE:  # fmt: skip
    """Return the layer as a function of this device's tokens; see `MoE`.

    Args:
      config: the layer.
      roles: the mesh whose axes its collectives use.
      tokens: t, tokens of this device's MP group.
      activation: 'gelu' or 'swiglu'.
      plan: sizes of the placements to come; None is an even one without replicas.
      split_tokens: x and y are this device's part [t / N_MP, M] of the MP group's tokens, instead of replicated.
      length: Sq, tokens of a sequence; 0 where that is not known.
      beside: as in `ScheduleOptions`.

    Raises:
      UserError: as `make_schedule` and `check_router` do, or an unknown grouped matmul.
    """
    router = build_router(config, router_place(config, roles, plan, length))
    router.check_tokens(tokens)
    return MoE(
        config=config,
        roles=roles,
        activation=activation,
        router=router,
        chooser=make_schedule(config, roles, tokens, plan, split_tokens, beside),
        decide=make_decide(roles, plan),
        late=plan is not None and plan.late is not None,
        find_implementation=grouped_matmul_finder(config, roles),
    )


def grouped_matmul_finder(config: MoEConfig, roles: Roles) -> Callable:
    """Return function(rows [R, M], weights {name: operands}) -> name of the layer's grouped matmul.

    Raises:
      UserError: an unknown name.
    """
    wanted = config.grouped_matmul
    if wanted != "auto" and wanted not in implementations():
        raise UserError(
            f"MoEConfig.grouped_matmul ({wanted!r}) is unknown; choose 'auto' or one of {', '.join(implementations())}"
        )

    def find(rows, weights) -> str:
        # named: without looking at the devices, for the mesh may be abstract
        device = roles.mesh.devices.flat[0] if wanted == "auto" else None
        dims = weights["w_in"][0].bank.shape[1:]
        return choose_implementation(wanted, device, rows.dtype, dims, config.expert_dtype == E4M3)

    return find


def make_schedule(
    config: MoEConfig, roles: Roles, tokens: int, plan: PlanShape | None = None, split_tokens: bool = False,
    beside: HalfWork | None = None,
) -> Chooser:  # fmt: skip
    """Return the schedule that a config names, for `tokens` tokens of an MP group; the mesh may be abstract.

    Raises:
      UserError: an unknown name, or a mesh on which that schedule, transport or group count is not possible.
    """
    options = schedule_options(config, split_tokens, beside)
    chooser = build_schedule(config.schedule, roles, layer_sizes(config, roles, tokens, plan), options)
    return Float8Chooser(chooser) if config.dispatch_dtype == E4M3 else chooser


def schedule_options(config: MoEConfig, split_tokens: bool = False, beside: HalfWork | None = None) -> ScheduleOptions:
    """Return what a config chooses within its schedule; the others as in `ScheduleOptions`."""
    return ScheduleOptions(
        transport=config.transport,
        pairwise_groups=config.pairwise_groups,
        gather=config.gather,
        cluster=config.cluster,
        split_tokens=split_tokens,
        beside=beside,
    )


def layer_sizes(config: MoEConfig, roles: Roles, tokens: int, plan: PlanShape | None = None) -> LayerSizes:
    """Return the static sizes of one layer on a device whose MP group holds `tokens` tokens."""
    devices = roles.size(roles.expert)
    if config.num_experts % devices:
        raise UserError(
            f"MoEConfig.num_experts ({config.num_experts}) must be divisible by the expert axis ({devices}); set "
            f"MeshConfig.expert to a divisor of {config.num_experts}"
        )
    choices = build_router(config, router_place(config, roles, plan)).choices(tokens)
    sizes = LayerSizes(
        tokens=choices.lines,
        top_k=choices.top_k,
        num_experts=config.num_experts,
        groups=config.num_experts // devices if plan is None else plan.slots,
        capacity=choices.capacity,
        bucket_slack=config.bucket_slack,
        overflow_chance=config.overflow_chance,
        sources=roles.num_devices,
        min_capacity=config.min_capacity,
        later_passes=config.later_passes,
    )
    planned = None if plan is None else plan.bucket_rows
    planned = crossing_rows(choices, sizes, roles) if planned is None else planned
    return dataclasses.replace(sizes, planned_rows=planned)


def crossing_rows(choices: Choices, sizes: LayerSizes, roles: Roles) -> BucketRows | None:
    """Return the rows of buckets where a router bounds how many choices leave the node; None where it does not.

    Args:
      choices: of an MP group's tokens; sizes: of the layer, which say how rows follow from their mean.
    """
    members, near = roles.size(roles.expert), roles.members_per_node
    if choices.crossing is None or near == members:
        return None
    pairs = roles.num_devices * members
    inside = sizes.rows_of((choices.lines * choices.top_k - choices.crossing) / near, pairs)
    return BucketRows(own=inside, node=inside, far=sizes.rows_of(choices.crossing / (members - near), pairs))


def router_place(config: MoEConfig, roles: Roles, plan: PlanShape | None = None, length: int = 0) -> RouterPlace:
    """Return where the router of a layer runs; length: of a sequence, 0 where that is not known."""
    schedule = schedule_record(config.schedule).on_mesh(roles.size(roles.model), roles.size(roles.expert_shard))
    return RouterPlace(
        roles=roles,
        slots=config.num_experts // roles.size(roles.expert) if plan is None else plan.slots,
        splits_tokens=not schedule.may_gate_group(),
        decides_late=plan is not None and plan.after_gate is not None,
        length=length,
    )


def check_router(config: MoEConfig, roles: Roles, tokens: int, length: int, decides_late: bool) -> None:
    """Refuse a mesh, schedule, planner or number of tokens that the router cannot serve, before there is a plan.

    Args:
      tokens, length: as in `make_moe`; decides_late: whether the planner sends tokens elsewhere after the gate.

    Raises:
      UserError: one of them.
    """
    place = router_place(config, roles, length=length)
    build_router(config, dataclasses.replace(place, decides_late=decides_late)).check_tokens(tokens)


def check_hidden_dim(name: str, hidden_dim: int, roles: Roles) -> None:
    """Raise a UserError unless the experts' hidden dim splits over the shards of an expert."""
    shards = roles.size(roles.expert_shard)
    if hidden_dim % shards:
        raise UserError(
            f"{name} ({hidden_dim}) must be divisible by MeshConfig.expert_shard ({shards}); set "
            f"MeshConfig.expert_shard to a divisor of {hidden_dim}"
        )


def check_float8(config: MoEConfig, model_dim: int, hidden_dim: int, roles: Roles) -> None:
    """Raise a UserError where `expert_dtype` or `dispatch_dtype` ask for float8 and sizes or schedule forbid it."""
    if config.dispatch_dtype == E4M3:
        check_float8_dispatch(config.schedule)
        check_blocks("MoEConfig.dispatch_dtype", "the model dim", model_dim)
    if config.expert_dtype == E4M3:
        check_blocks("MoEConfig.expert_dtype", "the model dim", model_dim)
        part = hidden_dim // roles.size(roles.expert_shard)
        check_blocks("MoEConfig.expert_dtype", "the experts' hidden dim on a device", part)


def init_expert(key, model_dim: int, hidden_dim: int, activation: str, dtype, output_scale: float = 1.0) -> dict:
    """Return the weights of one expert, {name: [M, F] or [F, M]}; normal, scaled by 1 / sqrt(fan in)."""
    weights = {}
    for index, name in enumerate(weight_names(activation)):
        shape = (hidden_dim, model_dim) if name == "w_out" else (model_dim, hidden_dim)
        scale = shape[0] ** -0.5 * (output_scale if name == "w_out" else 1.0)
        weights[name] = (scale * jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)).astype(dtype)
    return weights


def init_bank(key, layers: int, experts: int, devices: int, **sizes) -> dict:
    """Return the bank {name: [D Rb, ...]} of an even placement; expert (l, e) depends on fold_in(layer, expert) alone.

    Args:
      key: PRNG key.
      layers: L; experts: E; devices: D; sizes: as in `init_expert`.
    """
    held = experts // devices
    device, layer, place = np.meshgrid(np.arange(devices), np.arange(layers), np.arange(held), indexing="ij")
    layer_ids = jnp.asarray(layer.reshape(-1))
    expert_ids = jnp.asarray((device * held + place).reshape(-1))

    def one(layer_id, expert_id):
        return init_expert(jax.random.fold_in(jax.random.fold_in(key, layer_id), expert_id), **sizes)

    return jax.vmap(one)(layer_ids, expert_ids)
