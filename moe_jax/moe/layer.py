"""The MoE layer: gate, dispatch, experts, combine, put together.

`make_moe` is the functional core, for use inside `shard_map`: this device's tokens [t, M] in, tokens out. `MoELayer` is
the same as a Flax module for a user's own model: global tokens [..., M] in, tokens, loss and loads out; it contains the
`shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.after_gate import fetch_late, gather_counts
from moe_jax.collectives.ordering import gradients_in_turn, wait_for
from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.dispatch import even_tables, local
from moe_jax.errors import UserError
from moe_jax.grouped_matmul import GroupedWeights, default_implementation, implementations
from moe_jax.mesh.roles import Roles
from moe_jax.mesh.sharding import expert_specs
from moe_jax.moe.bank import open_grad_sink, with_grad_sink
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import expert_ffn, weight_names
from moe_jax.placement import PlanShape
from moe_jax.routers import balance_loss, choose_experts, share_statistics, z_loss
from moe_jax.schedules import LayerSizes, ScheduleOptions, build_schedule
from moe_jax.schedules.contract import Schedule


def layer_sizes(config: MoEConfig, roles: Roles, tokens: int, plan: PlanShape | None = None) -> LayerSizes:
    """Return the static sizes of one layer on a device whose MP group holds `tokens` tokens."""
    devices = roles.size(roles.expert)
    if config.num_experts % devices:
        raise UserError(
            f"MoEConfig.num_experts ({config.num_experts}) must be divisible by the expert axis ({devices}); set "
            f"MeshConfig.expert to a divisor of {config.num_experts}"
        )
    return LayerSizes(
        tokens=tokens,
        top_k=config.top_k,
        num_experts=config.num_experts,
        groups=config.num_experts // devices if plan is None else plan.slots,
        capacity=None if config.dropless else config.capacity(tokens),
        bucket_slack=config.bucket_slack,
        planned_rows=None if plan is None else plan.bucket_rows,
        min_capacity=config.min_capacity,
    )


def check_hidden_dim(name: str, hidden_dim: int, roles: Roles) -> None:
    """Raise a UserError unless the experts' hidden dim splits over the shards of an expert."""
    shards = roles.size(roles.expert_shard)
    if hidden_dim % shards:
        raise UserError(
            f"{name} ({hidden_dim}) must be divisible by MeshConfig.expert_shard ({shards}); set "
            f"MeshConfig.expert_shard to a divisor of {hidden_dim}"
        )


def make_moe(
    config: MoEConfig, roles: Roles, tokens: int, activation: str, plan: PlanShape | None = None,
    split_tokens: bool = False,
):  # fmt: skip
    """Return the layer as a function of this device's tokens.

    Args:
      config: the layer.
      roles: the mesh whose axes its collectives use.
      tokens: t, tokens of this device's MP group.
      activation: 'gelu' or 'swiglu'.
      plan: sizes of the placements to come; None is an even one without replicas.
      split_tokens: x and y are this device's part [t / N_MP, M] of the MP group's tokens, instead of replicated.

    Returns:
      apply(x [t, M], token_ids int32 [t], w_gate [M, E], bank, grad_sink, tables, noise_key, replicas) -> (y [t, M],
      GateStats, passes), with bank {name: [Rb, ...]}, grad_sink {name: [Hs, ...]} and `Tables` of this layer, a PRNG
      key or None, and what `fetch_replicas` returned.
    """
    schedule = make_schedule(config, roles, tokens, plan, split_tokens)
    decide = make_decide(roles, plan)
    find_implementation = grouped_matmul_finder(config, roles)
    late = plan is not None and plan.late is not None

    def apply(x, token_ids, w_gate, bank, grad_sink, tables, noise_key=None, replicas=()):
        def gate(x, token_ids):
            nonlocal grad_sink
            weight = w_gate
            if late:
                x, weight, grad_sink = in_turn_with_late(x, weight, grad_sink, tables)
            return run_gate(x, token_ids, w_gate=weight, config=config, noise_key=noise_key, model=roles.model)

        def placed(stats):
            here, replicas_here = decide(stats, bank, grad_sink, tables, replicas)
            weights = {name: _operands(bank[name], here, grad_sink, replicas_here, name) for name in bank}

            def experts(rows, group_sizes):
                name = find_implementation(rows, weights)
                return expert_ffn(rows, group_sizes, weights, activation=activation, implementation=name)

            return experts, here

        y, stats, passes = schedule(x, token_ids, gate, placed)
        # sums of statistics over devices come after the layer's own collectives
        return y, jax.tree.map(lambda leaf: wait_for(leaf, passes, y), stats), wait_for(passes, passes, y)

    return apply


def in_turn_with_late(x, weight, grad_sink, tables):
    """Return the three; sums of the first two's gradients come after the branch of late replicas' gradients."""
    weight = cast_varying(weight, varying_axes(x))
    (x, weight), grad_sink = gradients_in_turn((x, weight), grad_sink, tables.home_row[0])
    return x, weight, grad_sink


def make_decide(roles: Roles, plan: PlanShape | None):
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
        if wanted != "auto":
            return wanted  # without looking at the devices: the mesh may be abstract
        device = roles.mesh.devices.flat[0]
        return default_implementation(device, rows.dtype, weights["w_in"][0].bank.shape[1:])

    return find


def make_schedule(
    config: MoEConfig, roles: Roles, tokens: int, plan: PlanShape | None = None, split_tokens: bool = False
) -> Schedule:
    """Return the schedule that a config names, for `tokens` tokens of an MP group; the mesh may be abstract.

    Raises:
      UserError: an unknown name, or a mesh on which that schedule, transport or group count is not possible.
    """
    options = schedule_options(config, split_tokens)
    return build_schedule(config.schedule, roles, layer_sizes(config, roles, tokens, plan), options)


def schedule_options(config: MoEConfig, split_tokens: bool = False) -> ScheduleOptions:
    """Return what a config chooses within its schedule; split_tokens: of a model that is sequence-parallel."""
    return ScheduleOptions(
        transport=config.transport,
        pairwise_groups=config.pairwise_groups,
        gather=config.gather,
        cluster=config.cluster,
        split_tokens=split_tokens,
    )


def _operands(bank, tables, grad_sink, replicas, name):
    """Return the operands of one weight: home slots in the bank, then the replica slots of each transfer."""
    operands = [GroupedWeights(bank=bank, slots=tables.home_row, grad_sink=grad_sink[name] if grad_sink else None)]
    for values, replica_grad_sink in replicas:
        slots = jnp.arange(values[name].shape[0], dtype=jnp.int32)
        gradients = replica_grad_sink[name] if grad_sink else None
        operands.append(GroupedWeights(bank=values[name], slots=slots, grad_sink=gradients))
    return tuple(operands)


def run_gate(x, token_ids, *, w_gate, config, noise_key, model):
    """Return the tokens' choices, and the gate's statistics as `share_statistics` returns them."""
    choice, stats = choose_experts(x, w_gate, config, noise_key=noise_key, token_ids=token_ids)
    return choice, share_statistics(stats, choice, x, model)


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


class MoELayer(nnx.Module):
    """A mixture of experts as a drop-in for a feed-forward layer, on one device or on a mesh.

    Calling it with tokens [..., M] returns (tokens [..., M], loss, loads): the same shape, the weighted auxiliary and
    z-loss to add to your loss (float []), and how many tokens each source device sent to each expert (int32 [D, E]).
    The leading dims together must divide over all devices of the mesh.

    Attributes:
      w_gate: [M, E] parameter.
      bank: {name: [E, ...]} parameters, experts in order, sharded over the mesh's expert axis.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        model_dim: int,
        hidden_dim: int,
        roles: Roles,
        rngs: nnx.Rngs,
        activation: str = "gelu",
        dtype=jnp.float32,
    ):
        """Initialise the layer.

        Args:
          config: gate, capacity and schedule.
          model_dim: M; hidden_dim: F.
          roles: the mesh, from `moe_jax.mesh.build_mesh`.
          rngs: Flax random streams; `params` is used.
          activation: 'gelu' or 'swiglu'.
          dtype: of the parameters.

        Raises:
          UserError: if E does not divide over the expert axis, or hidden_dim over the shards of an expert.
        """
        devices = roles.size(roles.expert)
        layer_sizes(config, roles, 1)
        check_hidden_dim("hidden_dim", hidden_dim, roles)
        bank = init_bank(
            rngs.params(),
            1,
            config.num_experts,
            devices,
            model_dim=model_dim,
            hidden_dim=hidden_dim,
            activation=activation,
            dtype=dtype,
        )
        self.config, self.roles, self.activation = config, roles, activation
        scale = model_dim**-0.5
        self.w_gate = nnx.Param(scale * jax.random.normal(rngs.params(), (model_dim, config.num_experts), dtype))
        specs = expert_specs({name: value.shape for name, value in bank.items()}, roles, 0, None)[0]
        placed = {name: jax.device_put(value, roles.sharding(*specs[name])) for name, value in bank.items()}
        self.bank = nnx.Dict({name: nnx.Param(value) for name, value in placed.items()})

    def __call__(self, x, *, noise_key=None):
        """Apply the layer to tokens [..., M]; see the class for what comes back.

        Raises:
          UserError: tokens of another width than M, or a number of them that does not divide over the devices.
        """
        width = self.w_gate.shape[0]
        if x.ndim == 0 or x.shape[-1] != width:
            raise UserError(
                f"the MoE layer takes tokens [..., {width}] (its model_dim) and got an array of shape {x.shape}; pass "
                f"such tokens, or build the layer with model_dim = {x.shape[-1] if x.ndim else width}"
            )
        tokens = x.reshape(-1, width)
        roles, config = self.roles, self.config
        shards = roles.size(roles.dense)
        if not tokens.shape[0] or tokens.shape[0] % shards:
            raise UserError(
                f"the MoE layer got {tokens.shape[0]} tokens, which do not divide over {shards} devices; pad the batch "
                f"to a multiple of {shards}"
            )
        bank, grad_sink = with_grad_sink({name: self.bank[name][...] for name in self.bank})
        token_ids = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        apply = _make_global_moe(config, roles, tokens.shape[0], self.activation)
        y, loss, loads = apply(tokens, token_ids, self.w_gate[...], bank, grad_sink, noise_key)
        return y.reshape(x.shape), loss, loads


@functools.lru_cache(maxsize=32)
def _make_global_moe(config: MoEConfig, roles: Roles, tokens: int, activation: str):
    """Return `make_moe` on global arrays [N, M], with losses; jitted, because eagerly each operation compiles alone."""
    apply = make_moe(config, roles, tokens // roles.size(roles.dense), activation)
    tables = even_tables(1, config.num_experts, roles.size(roles.expert))
    inside = tuple(axis for axis in roles.all if axis not in roles.expert)

    def body(x, token_ids, w_gate, bank, grad_sink, noise_key, tables):
        tables = local(tables)  # of one layer
        grad_sink = {name: open_grad_sink(value, tables.home_row)[0] for name, value in grad_sink.items()}
        layer = jax.tree.map(lambda array: array[0], tables)
        y, stats, _ = apply(x, token_ids, w_gate, bank, grad_sink, layer, noise_key)
        probability, squared = lax.psum((stats.probability, stats.squared_logsumexp), roles.dense)
        per_source = lax.psum(stats.counts, inside) if inside else stats.counts
        balance = balance_loss(lax.psum(stats.counts, roles.all), probability, tokens, config.top_k)
        loss = config.aux_loss_weight * balance + config.z_loss_weight * z_loss(squared, tokens)
        return y, loss, per_source[None]

    rows, by_expert = P(roles.dense), P(roles.expert)
    shapes = {name: (1, 1, 1) for name in weight_names(activation)}
    bank = expert_specs(shapes, roles, 0, None)[0]
    sharded = jax.shard_map(
        body,
        mesh=roles.mesh,
        in_specs=(rows, rows, P(), bank, bank, P(), by_expert),
        out_specs=(rows, P(), by_expert),
    )
    return jax.jit(lambda *arguments: sharded(*arguments, tables))
