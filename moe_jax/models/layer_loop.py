"""The layers of a model one after the other: a loop that JAX differentiates, or the program of a block-wise schedule.

Inputs: x, the parts of the residual stream as the MP group keeps it, the units' parameters, this device's part of the
bank, grad_sinks and tables. Outputs: x, the gates' statistics and the passes of every layer. Inside `shard_map`. Each
segment of the model is a loop of its own, on the roles that its experts have.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.errors import UserError
from moe_jax.models.config import ModelConfig, Segment
from moe_jax.models.counts import half_work
from moe_jax.models.language_model import LanguageModel, Layout
from moe_jax.models.model_group import ModelGroup
from moe_jax.models.prefetch import run_stack
from moe_jax.models.residuals import named, save_expensive_residuals
from moe_jax.models.stages import Stages
from moe_jax.models.transformer import Unit, add_shared
from moe_jax.moe.bank import fetch_in_turn, fetch_replicas
from moe_jax.moe.build import make_moe
from moe_jax.moe.routers import RouterInputs, build_router, find
from moe_jax.moe.schedule import schedule_record, schedules
from moe_jax.parallel.bucket_rows import round_up
from moe_jax.parallel.gather import gather_tree
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.sparse_all_gather import Transfer
from moe_jax.parallel.varying import cast_varying
from moe_jax.planning.plan_shape import PlanShape


def make_layers(model: LanguageModel, layout: Layout, tokens: int, plan, group: ModelGroup) -> Callable:
    """Return layers(x, units, grad_sink, constants) -> (x, {segment: (GateStats [L, ...], passes int32 [L])}).

    x is a tuple of what `ModelGroup` keeps of each part: of all sequences, or of either half. Found are the statistics
    of each segment that has experts. Units, grad_sink, `plan` and the `Constants`' bank and tables are {segment: that}.

    Args:
      model, layout: the model, and the layout of its parameters.
      tokens: t of this device's MP group.
      plan: sizes of the placements to come; None is an even placement without replicas.
      group: the MP group, which decides whether x is whole or split over tokens.

    Raises:
      UserError: a block-wise schedule where it cannot run.
    """
    loops = {}
    for segment in model.segments:
        own, roles = model.layout_of(layout, segment), model.roles_of(segment)
        if not segment.has_experts:
            loops[segment] = _make_dense_loop(segment, roles, own, group)
            continue
        own_plan = None if plan is None else plan[segment.name]
        make = _make_block_wise_loop if segment.config.is_block_wise else _make_moe_loop
        loops[segment] = make(segment, roles, own, tokens, own_plan, group)

    def layers(x, units, grad_sink, constants):
        found = {}
        for segment, loop in loops.items():
            own_units = units[segment.name]
            if not segment.has_experts:
                x = loop(x, own_units, constants.documents)
                continue
            choices = constants.choices
            if choices is not None and not find(segment.moe.router).replays:
                raise UserError(
                    f"Batch.choices cannot be replayed by MoEConfig.router = {segment.moe.router!r}; leave them out, "
                    "or set MoEConfig.router = 'topk' or 'sigmoid_bias'"
                )
            if choices is not None and choices.shape[-1] != segment.moe.top_k:
                raise UserError(
                    f"Batch.choices have {choices.shape[-1]} experts for each token, but layers of the model take "
                    f"top_k = {segment.moe.top_k}; replay what was recorded of this model"
                )
            own = dataclasses.replace(
                constants,
                bank=constants.bank[segment.name],
                tables=constants.tables[segment.name],
                key=constants.key if build_router(segment.moe).draws else None,
                choices=None if choices is None else choices[_layers_of(segment)],
            )
            x, *found[segment] = loop(x, own_units, grad_sink[segment.name], own)
        return x, found

    return layers


def _layers_of(segment: Segment) -> slice:
    """Return which of all MoE layers are this segment's."""
    return slice(segment.first_layer, segment.first_layer + segment.config.moe_layers)


def _graph_of(segment: Segment):
    """Return the modules of a unit without their parameters."""
    return nnx.split(nnx.eval_shape(lambda: Unit(segment, nnx.Rngs(0))))[0]


def _run(body: Callable, x, inputs, config: ModelConfig):
    """Return (x, what body(x, inputs of a layer) returns beside it, stacked): a scan, or all layers written out."""
    if config.stack == "scan":
        return lax.scan(body, x, inputs)
    outputs = []
    for layer in range(config.units):
        x, out = body(x, jax.tree.map(lambda leaf, at=layer: leaf[at], inputs))
        outputs.append(out)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def _make_dense_loop(segment: Segment, roles: Roles, layout: Layout, group: ModelGroup) -> Callable:
    """Return loop(x, units, documents) -> x over units without experts."""
    graph = _graph_of(segment)
    parts, gather, wires = roles.size(roles.dense), layout.gather["units"], layout.wires["units"]

    def loop(x, units, documents):
        def body(x, unit_params):
            unit = nnx.merge(graph, gather_tree(unit_params, gather, roles.dense, parts, wires))
            of_parts = [None] * group.parts if documents is None else jnp.split(documents, group.parts)
            both = zip(x, of_parts, strict=True)
            return tuple(unit.attend(part, group.part(), own) for part, own in both), None

        return _run(body_of(body, segment.config, roles), x, units, segment.config)[0]

    return loop


def _make_moe_loop(
    segment: Segment, roles: Roles, layout: Layout, tokens: int, plan: PlanShape | None, group: ModelGroup
) -> Callable:
    """Return loop(x, units, grad_sink, constants) -> (x, GateStats, passes)."""
    config, graph = segment.config, _graph_of(segment)
    parts, gather, wires = roles.size(roles.dense), layout.gather["units"], layout.wires["units"]
    x = jax.ShapeDtypeStruct((group.rows, tokens // group.rows, config.model_dim), config.dtype)
    moe = make_moe(segment.moe, roles, x, config.activation, plan, group.split)

    whole_unit = functools.partial(gather_tree, dims=gather, axes=roles.dense, parts=parts, wires=wires)

    def loop(x, units, grad_sink, constants):
        (x,), bank = x, constants.bank
        fetch = functools.partial(fetch_replicas, bank, plan=plan, axes=roles.expert)

        def body(x, inputs):
            unit_params, layer_grad_sink, layer_tables, layer, choices = inputs
            noise_key = None if constants.key is None else jax.random.fold_in(constants.key, layer)
            x, params, layer_grad_sink, replicas = fetch_in_turn(
                x, unit_params, whole_unit, fetch, layer_grad_sink, layer_tables, plan
            )
            unit = nnx.merge(graph, params)
            x = named(unit.attend(x, group, constants.documents), "attended")
            with jax.named_scope("moe"):
                normed, beside = unit.enter_moe(x, group)
                weights, gathered_grad_sink, here = _stored(layout, roles, bank, layer_grad_sink, layer_tables)
                inputs = RouterInputs(noise_key, constants.token_ids, here, choices)
                y, stats, passes = moe(normed, unit.gate.router_params(), inputs, weights, gathered_grad_sink, replicas)
                y = add_shared(y, *beside)
            return x + y.reshape(x.shape), (stats, passes)

        at = _layers_of(segment)
        inputs = (
            units, grad_sink, constants.tables, jnp.arange(at.start, at.stop, dtype=jnp.int32), constants.choices
        )  # fmt: skip
        x, (stats, passes) = _run(body_of(body, config, roles), x, inputs, config)
        return (x,), stats, passes

    return loop


def _stored(layout: Layout, roles: Roles, bank, layer_grad_sink, tables):
    """Return bank, grad_sink and tables as one MoE layer of a segment computes with them.

    Under every schedule but `dp` the bank is used as it is stored. Under `dp`, stage 2 scatters each layer's gradient
    as soon as it is computed, and stage 3 gathers each layer's parameters too; both along the hidden dim.
    """

    def whole(name, value, specs):
        dim = 1 if name == "w_out" else 2
        if len(specs[name]) <= dim or specs[name][dim] is None:
            return value
        return lax.all_gather(value, roles.data, axis=dim, tiled=True)

    if layout.dp_stage not in (2, 3):
        return bank, layer_grad_sink, tables
    gathered_grad_sink = {n: whole(n, v, layout.grad_sink) for n, v in layer_grad_sink.items()}
    if layout.dp_stage == 2:
        return bank, gathered_grad_sink, tables
    weights = {n: v[tables.home_row] for n, v in bank.items()}
    weights = {n: whole(n, v, layout.params["bank"]) for n, v in weights.items()}
    compact = jnp.arange(tables.home_row.shape[0], dtype=jnp.int32)
    return weights, gathered_grad_sink, dataclasses.replace(tables, home_row=compact)


def body_of(function, config: ModelConfig, roles: Roles):
    """Return a layer as the body of a loop that JAX differentiates: what it keeps for its backward is chosen."""
    if config.remat == "none":
        return save_expensive_residuals(function, roles.model) if config.stack == "scan" else function
    policies = {"block": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    policy = policies[config.remat] if config.remat in policies else getattr(jax.checkpoint_policies, config.remat)
    return jax.checkpoint(function, policy=policy, prevent_cse=False)


def _make_block_wise_loop(segment, roles, layout, tokens, plan, group):
    config, graph = segment.config, _graph_of(segment)
    name, value = ("overlap", config.overlap) if config.overlap == "halves" else ("prefetch", config.prefetch)
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
    if segment.moe.record_choices and config.overlap == "halves" and roles.model:
        raise UserError(
            "MoEConfig.record_choices (True) cannot say whose choices they are with ModelConfig.overlap = 'halves' and "
            f"MeshConfig.model = {roles.size(roles.model)}; set ModelConfig.overlap = 'none'"
        )
    group = group.part()
    tokens //= 2 if config.overlap == "halves" else 1
    length = tokens // group.rows
    own = tokens // roles.size(roles.model)
    hides = config.overlap == "halves" and roles.mesh.devices.flat[0].platform != "cpu"  # there windows run in turn
    beside = half_work(config, segment.moe, own, length) if hides else None
    parts = roles.size(roles.dense)
    dims, wires = (of_moe(tree["units"]) for tree in (layout.gather, layout.wires))
    recompute = config.recomputes
    own_plan = plan
    if config.overlap == "halves" and plan is not None and plan.bucket_rows is not None:  # buckets half as long
        own_plan = dataclasses.replace(plan, bucket_rows=plan.bucket_rows.each(lambda rows: round_up(rows / 2, 8)))
    shares = {} if plan is None else {"trans_share": plan.trans_share, "agg_share": plan.agg_share}
    schedule = config.block_wise.build(config.moe_layers, recompute=recompute, **shares)

    def attend(mix, gate, x, documents):
        return nnx.merge(graph, {**mix, **gate}).attend(x, group, documents)

    def enter_moe(mix, gate, x):
        return nnx.merge(graph, {**mix, **gate}).enter_moe(x, group)

    def prepare(mix, gate):
        trees = zip((mix, gate), dims, wires, strict=True)
        return tuple(gather_tree(tree, dim, roles.dense, parts, wire) for tree, dim, wire in trees)

    x = jax.ShapeDtypeStruct((group.rows, length, config.model_dim), config.dtype)
    how = Stages(
        attend=attend,
        enter_moe=enter_moe,
        moe=make_moe(segment.moe, roles, x, config.activation, own_plan, group.split, beside),
        checkpoint=functools.partial(body_of, config=config, roles=roles),
        recompute=recompute,
        schedule=schedule,
        transfer=None if plan is None or plan.ahead is None else Transfer(plan.ahead, roles.expert),
        late=None if plan is None else plan.late,
        prepare=prepare,
        scan=config.stack == "scan",
        first_layer=segment.first_layer,
    )

    def loop(x, units, grad_sink, constants):
        if constants.choices is not None:
            raise UserError(
                f"Batch.choices cannot be replayed with ModelConfig.{name} = {value!r}; set ModelConfig.{name} = 'none'"
            )
        # as rows vary: a cast inside a stage would be saved for its backward
        constants = dataclasses.replace(constants, bank=cast_varying(constants.bank, roles.all))
        return run_stack(how, x, of_moe(units), grad_sink, constants)

    return loop


def of_moe(units: dict) -> tuple[dict, dict]:
    """Return a unit's leaves by name: (of what precedes the MoE layer, of the layer: its gate and shared experts)."""
    inside = {name: leaf for name, leaf in units.items() if name in ("gate", "shared")}
    return {name: leaf for name, leaf in units.items() if name not in inside}, inside
