"""The layers of a model one after the other: a loop that JAX differentiates, or the program of a block-wise schedule.

Inputs: x, the parts of the residual stream as the MP group keeps it, the units' parameters, this device's part of the
bank, grad_sinks and tables. Outputs: x, the gates' statistics and the passes of every layer. Inside `shard_map`. Each
segment of the model is a loop of its own, on the roles that its experts have.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.collectives.bucket_rows import round_up
from moe_jax.collectives.gather import gather_tree
from moe_jax.collectives.sparse_all_gather import Transfer
from moe_jax.collectives.varying import cast_varying
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles
from moe_jax.models.config import ModelConfig
from moe_jax.models.counts import half_work
from moe_jax.models.language_model import LanguageModel, Layout
from moe_jax.models.model_group import ModelGroup
from moe_jax.models.prefetch import Constants, Prefetcher
from moe_jax.models.scan_residuals import keep_what_is_dear, named
from moe_jax.models.segments import Segment, part_of
from moe_jax.models.shared_experts import add_shared
from moe_jax.models.stages import Stages
from moe_jax.models.transformer import Unit
from moe_jax.moe.layer import make_moe
from moe_jax.moe.replicas import fetch_in_turn
from moe_jax.placement import PlanShape
from moe_jax.routers import build_router
from moe_jax.schedules import schedule_record, schedules


def make_layers(
    model: LanguageModel, layout: Layout, tokens: int, training: bool, plan, make_bank_store: Callable,
    group: ModelGroup,
) -> Callable:  # fmt: skip
    """Return layers(x, units, bank, grad_sink, tables, token_ids, key, replay, documents) -> (x, found).

    x is a tuple of what `ModelGroup` keeps of each part: of all sequences, or of either half. found is {segment:
    (GateStats, passes)}.

    GateStats are [L, ...] and passes int32 [L] of each segment that has experts. Where the model has several segments,
    units, bank, grad_sink, tables and `plan` are dictionaries with each one's, see `segments.py`. `replay` is int32
    [L, t, K], choices of before of all MoE layers to be taken again, or None; `documents` is int32 [b, Sq], or None.

    Args:
      model, layout: the model, and the layout of its parameters.
      tokens: t of this device's MP group.
      training: with gate noise, if the gate has any.
      plan: sizes of the placements to come; None is an even placement without replicas.
      make_bank_store: function (layout, roles) of a segment -> what one MoE layer computes with, see `loss.py`.
      group: the MP group, which decides whether x is whole or split over tokens.

    Raises:
      UserError: a block-wise schedule where it cannot run.
    """
    loops = {}
    for segment in model.segments:
        own, roles = model.layout_of(layout, segment), model.roles_of(segment)
        if segment.has_experts:
            own_plan, bank_store = model.own_part(plan, segment), make_bank_store(own, roles)
            loops[segment] = _make_moe_loop(segment, roles, own, tokens, training, own_plan, bank_store, group)
        else:
            loops[segment] = _make_dense_loop(segment, roles, own, group)

    def layers(x, units, bank, grad_sink, tables, token_ids, key, replay=None, documents=None):
        found = {}
        for segment, loop in loops.items():
            own_units = part_of(units, segment, model.segments)
            if segment.has_experts:
                parts = (model.own_part(tree, segment) for tree in (bank, grad_sink, tables))
                replayed = _own_choices(replay, segment)
                x, *found[segment] = loop(x, own_units, *parts, token_ids, key, replayed, documents)
            else:
                x = loop(x, own_units, documents)
        return x, found

    return layers


def _own_choices(replay, segment: Segment):
    """Return the choices of a segment's layers, of those [L, t, K] of all."""
    if replay is None:
        return None
    if replay.shape[-1] != segment.moe.top_k:
        raise UserError(
            f"Batch.choices have {replay.shape[-1]} experts for each token, but layers of the model take top_k = "
            f"{segment.moe.top_k}; replay what was recorded of this model"
        )
    return replay[segment.first_layer : segment.first_layer + segment.config.moe_layers]


def _make_dense_loop(segment: Segment, roles: Roles, layout: Layout, group: ModelGroup) -> Callable:
    """Return loop(x, units, documents) -> x over units without experts."""
    config = segment.config
    graph = nnx.split(nnx.eval_shape(lambda: Unit(config, segment.moe, nnx.Rngs(0))))[0]
    parts, gather, wires = roles.size(roles.dense), layout.gather["units"], layout.wires["units"]

    def loop(x, units, documents=None):
        def body(x, unit_params):
            unit = nnx.merge(graph, gather_tree(unit_params, gather, roles.dense, parts, wires))
            of_parts = [None] * group.parts if documents is None else jnp.split(documents, group.parts)
            both = zip(x, of_parts, strict=True)
            return tuple(unit.attend(part, group.part(), documents=own) for part, own in both), None

        body = body_of(body, config, roles)
        if config.stack == "scan":
            return lax.scan(body, x, units)[0]
        for layer in range(segment.units):
            x, _ = body(x, jax.tree.map(lambda leaf, at=layer: leaf[at], units))
        return x

    return loop


def _make_moe_loop(
    segment: Segment, roles: Roles, layout: Layout, tokens: int, training: bool, plan: PlanShape | None,
    bank_store: Callable, group: ModelGroup,
) -> Callable:  # fmt: skip
    """Return loop(x, units, bank, grad_sink, tables, token_ids, key, replay, documents) -> (x, GateStats, passes)."""
    config = segment.config
    graph = nnx.split(nnx.eval_shape(lambda: Unit(config, segment.moe, nnx.Rngs(0))))[0]
    parts, gather, wires = roles.size(roles.dense), layout.gather["units"], layout.wires["units"]
    noisy = training and build_router(segment.moe).draws

    if config.block_wise.is_block_wise:
        return _make_prefetcher(segment, roles, layout, graph, tokens, noisy, plan, group)
    moe = make_moe(segment.moe, roles, tokens, config.activation, plan, group.split, tokens // group.rows)
    first, last = segment.first_layer, segment.first_layer + config.moe_layers

    def whole_unit(params):
        return gather_tree(params, gather, roles.dense, parts, wires)

    def loop(x, units, bank, grad_sink, tables, token_ids, key, replay=None, documents=None):
        (x,) = x

        def body(x, inputs):
            unit_params, layer_grad_sink, layer_tables, layer, choices = inputs
            noise_key = jax.random.fold_in(key, layer) if noisy else None
            x, params, layer_grad_sink, replicas = fetch_in_turn(
                x, unit_params, whole_unit, bank, layer_grad_sink, layer_tables, plan, roles.expert
            )
            unit = nnx.merge(graph, params)
            x = named(unit.attend(x, group, documents=documents), "attended")
            with jax.named_scope("moe"):
                normed, beside = unit.enter_moe(x, group)
                weights, gathered_grad_sink, here = bank_store(bank, layer_grad_sink, layer_tables)
                y, stats, passes = moe(
                    normed, token_ids, unit.gate.router_params(), weights, gathered_grad_sink, here, noise_key,
                    replicas, choices,
                )  # fmt: skip
                y = add_shared(y, *beside)
            return x + y.reshape(x.shape), (stats, passes)

        body = body_of(body, config, roles)
        inputs = (units, grad_sink, tables, jnp.arange(first, last, dtype=jnp.int32), replay)
        if config.stack == "scan":
            x, (stats, passes) = lax.scan(body, x, inputs)
            return (x,), stats, passes
        outputs = []
        for layer in range(config.moe_layers):
            x, out = body(x, jax.tree.map(lambda leaf, at=layer: leaf[at], inputs))
            outputs.append(out)
        return (x,), *jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    return loop


def policy_of(remat: str):
    """Return the policy of `jax.checkpoint` that `ModelConfig.remat` names, None for 'block'."""
    if remat == "block":
        return None
    return getattr(jax.checkpoint_policies, "dots_with_no_batch_dims_saveable" if remat == "dots" else remat)


def checkpointed(function, remat: str):
    """Wrap a function in the activation checkpointing policy that `ModelConfig.remat` names."""
    if remat == "none":
        return function
    return jax.checkpoint(function, policy=policy_of(remat), prevent_cse=False)


def body_of(function, config: ModelConfig, roles: Roles):
    """Return a layer as the body of a loop that JAX differentiates: what it keeps for its backward is chosen."""
    if config.remat == "none" and config.stack == "scan":
        return keep_what_is_dear(function, roles.model)
    return checkpointed(function, config.remat)


def _make_prefetcher(segment, roles, layout, graph, tokens, noisy, plan, group):
    config = segment.config
    name, value = ("overlap", config.overlap) if config.block_wise.halves else ("prefetch", config.prefetch)
    if layout.dp_stage is not None:
        raise UserError(
            f"ModelConfig.{name} ({value!r}) has nothing to move under MoEConfig.schedule = "
            f"{segment.moe.schedule!r}; set ModelConfig.{name} = 'none'"
        )
    if not schedule_record(segment.moe.schedule).one_piece:
        records = map(schedule_record, schedules())
        possible = [record.name for record in records if record.one_piece and record.moves_tokens]
        raise UserError(
            f"ModelConfig.{name} needs a MoEConfig.schedule whose experts run in one piece, not "
            f"{segment.moe.schedule!r}; set MoEConfig.schedule to one of {', '.join(possible)}, or "
            f"ModelConfig.{name} = 'none'"
        )
    if segment.moe.record_choices and config.block_wise.halves and roles.model:
        raise UserError(
            "MoEConfig.record_choices (True) cannot say whose choices they are with ModelConfig.overlap = 'halves' and "
            f"MeshConfig.model = {roles.size(roles.model)}; set ModelConfig.overlap = 'none'"
        )
    group = group.part()
    tokens //= 2 if config.block_wise.halves else 1
    length = tokens // group.rows
    own = tokens // roles.size(roles.model)
    hides = config.block_wise.halves and roles.mesh.devices.flat[0].platform != "cpu"  # there windows run in turn
    beside = half_work(config, segment.moe, own, length) if hides else None
    parts = roles.size(roles.dense)
    dims, wires = (of_moe(tree["units"]) for tree in (layout.gather, layout.wires))
    recompute = config.recomputes
    own_plan = _half_of(plan) if config.block_wise.halves else plan
    shares = {} if plan is None else {"trans_share": plan.trans_share, "agg_share": plan.agg_share}
    schedule = config.block_wise.build(config.moe_layers, recompute=recompute, **shares)

    def attend(mix, gate, x, documents):
        return nnx.merge(graph, {**mix, **gate}).attend(x, group, documents=documents)

    def enter_moe(mix, gate, x):
        return nnx.merge(graph, {**mix, **gate}).enter_moe(x, group)

    def prepare(mix, gate):
        trees = zip((mix, gate), dims, wires, strict=True)
        return tuple(gather_tree(tree, dim, roles.dense, parts, wire) for tree, dim, wire in trees)

    prefetcher = Prefetcher(
        schedule=schedule,
        stages=Stages(
            attend=attend,
            enter_moe=enter_moe,
            moe=make_moe(segment.moe, roles, tokens, config.activation, own_plan, group.split, length, beside),
            checkpoint=lambda function: body_of(function, config, roles),
            # the schedule's window `recompute` runs these stages again, so no checkpoint does
            moe_checkpoint=lambda function: function if recompute else body_of(function, config, roles),
        ),
        transfer=None if plan is None or plan.ahead is None else Transfer(plan.ahead, roles.expert),
        late=None if plan is None else plan.late,
        prepare=prepare,
        scan=config.stack == "scan",
        recompute=recompute,
        noisy=noisy,
        first_layer=segment.first_layer,
    )

    def loop(x, units, bank, grad_sink, tables, token_ids, key, replay=None, documents=None):
        if replay is not None:
            raise UserError(
                f"Batch.choices cannot be replayed with ModelConfig.{name} = {value!r}; set ModelConfig.{name} = 'none'"
            )
        mix, gate = of_moe(units)
        bank = cast_varying(bank, roles.all)  # as rows vary: a cast inside a stage would be saved for its backward
        return prefetcher(x, (mix, gate), grad_sink, Constants(bank, tables, token_ids, key, documents))

    return loop


def _half_of(plan: PlanShape | None) -> PlanShape | None:
    """Return the plan as half of a device's sequences meet it: buckets half as long."""
    if plan is None or plan.bucket_rows is None:
        return plan
    return dataclasses.replace(plan, bucket_rows=plan.bucket_rows.each(lambda rows: round_up(rows / 2, 8)))


def of_moe(units: dict) -> tuple[dict, dict]:
    """Return a unit's leaves by name: (of what precedes the MoE layer, of the layer: its gate and shared experts)."""
    inside = {name: leaf for name, leaf in units.items() if name in ("gate", "shared")}
    return {name: leaf for name, leaf in units.items() if name not in inside}, inside
