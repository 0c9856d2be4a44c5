"""A model on one device but for its loss: embedding, the layers one after the other, last norm. Inside `shard_map`.

Each segment of the model is a loop of its own, on the roles that its experts have: one that JAX differentiates, or the
program of a block-wise schedule (`prefetch.py`).
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
from jax.ad_checkpoint import checkpoint_name

from moe_jax.errors import UserError
from moe_jax.kernels.grouped import choose_implementation
from moe_jax.models.attention import document_positions
from moe_jax.models.config import Segment
from moe_jax.models.language_model import LanguageModel, Layout
from moe_jax.models.lora import adapters_of, base_of, gather_merged, joined
from moe_jax.models.model_group import ModelGroup, make_model_group
from moe_jax.models.prefetch import of_moe, run_stack
from moe_jax.models.residuals import checkpointed
from moe_jax.models.stages import StackConstants, Stages
from moe_jax.models.transformer import abstract_transformer, add_shared, unit_graph
from moe_jax.moe.bank import fetch_in_turn, fetch_replicas, open_grad_sink, reads_as_stored, with_row_sums
from moe_jax.moe.build import check_one_piece, make_moe
from moe_jax.moe.routers import PADDING, RouterInputs, build_router
from moe_jax.moe.routing import local
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.sharding import gather_tree, split_dims
from moe_jax.parallel.static_sizes import round_up
from moe_jax.parallel.varying import cast_varying, own_part
from moe_jax.planning.plan_shape import PlanShape, Shapes
from moe_jax.registry import ROUTERS


def make_trunk(model: LanguageModel, layout: Layout, batch_size: int, length: int, plan: Shapes | None) -> Callable:
    """Return trunk((dense, bank, sinks), batch, tables, key, first_row) -> (x, table, found, sinks).

    It is all of the model but the loss: x, the parts of [t, M], are the last norm's results for the tokens of the MP
    group that this device takes to the loss, t of them in the order of `ModelGroup.own_flat`, and table [V, M] gives
    their logits; found is {segment: (GateStats [L, ...], passes int32 [L])} of those that have experts. Two halves are
    two parts, and neither waits for the other. The sinks, {segment: (of its bank or None, of its units or None)}, come
    back for `start_sums`; units without one have their gradients as other arrays do.

    Args:
      batch_size: B; length: Sq.
      plan: {segment: sizes of the placements to come}; None is an even placement without replicas.

    Raises:
      UserError: a block-wise schedule where it cannot run.
    """
    config, roles, plan = model.config, model.roles, plan or {}
    group, loops = make_model_group(config, roles, batch_size, length), {}
    group = dataclasses.replace(group, padded=group.padded or model.padded)
    dtype, rows, tokens = jnp.dtype(config.dtype), group.rows, group.rows * length
    transformer = nnx.split(abstract_transformer(config, model.moe, model.vocab_size))[0]
    for segment in model.segments:
        own_plan, own_roles = plan.get(segment.name), segment.roles(roles)
        data = own_roles.size(own_roles.data)
        if own_plan is not None and own_plan.replica_slots and layout.dp_stage is not None and data > 1:
            raise UserError(
                f"train.expert_zero_stage ({layout.dp_stage}) splits experts over MeshConfig.data ({data}), and "
                "replicas are of whole ones; set it to 1, or PlannerConfig.name to a planner without replicas"
            )
        make = _make_block_wise_loop if segment.has_experts and segment.config.is_block_wise else _make_loop
        loops[segment] = make(segment, own_roles, layout, tokens, own_plan, group)

    def trunk(weights, batch, tables, key, first_row):
        dense, bank, sinks = weights
        device = lax.axis_index(roles.dense)
        token_ids = (first_row + device * rows) * length + jnp.arange(tokens, dtype=jnp.int32)
        if model.padded:
            token_ids = batch.token_ids.reshape(-1)
        elif group.padded:
            token_ids = jnp.where(token_ids < (first_row + batch_size) * length, token_ids, PADDING)
        tables = local(tables)
        for segment in model.expert_segments:
            read = _as_read(bank[segment.name], segment, segment.roles(roles), plan.get(segment.name), layout, dtype)
            bank = {**bank, segment.name: read}
        outer = {name: leaf for name, leaf in dense.items() if name != "units"}
        dims, wires = ({name: tree[name] for name in outer} for tree in (layout.gather, layout.wires))
        outer = gather_tree(outer, dims, roles.dense, roles.size(roles.dense), wires)

        if group.split:  # cast once: embedding and output head share the sum of their gradients over the group
            outer = cast_varying(outer, roles.model)
        outer["norm"] = cast_varying(outer["norm"], roles.dense)  # its gradients by part are summed over devices once

        units = nnx.merge(transformer, {**outer, "units": base_of(dense["units"])})
        positions = None if batch.documents is None else document_positions(batch.documents)
        x = units.embedding(batch.inputs, dtype, group, positions)
        x, found, passed = tuple(jnp.split(x, group.parts)), {}, {}
        choices = None if batch.choices is None else _to_replay(model, batch.choices)
        for segment, loop in loops.items():
            name, replayed = segment.name, None if choices is None else choices[segment.moe_layers]
            own_key = key if segment.has_experts and build_router(segment.moe).draws else None
            constants = StackConstants(bank.get(name), tables.get(name), token_ids, own_key, batch.documents, replayed)
            (x, passed[name]), own = loop((x, sinks[name]), dense["units"][name], constants)
            if segment.has_experts:
                found[segment] = own
        with jax.named_scope("loss"):
            if group.split or not group.axes:  # halves stay apart where a device takes its part of each
                x = tuple(part.reshape(-1, part.shape[-1]) for part in x)
            else:
                x = jnp.concatenate(x)
                x = (own_part(x.reshape(-1, x.shape[-1]), group.axes),)
            return tuple(map(units.norm, x)), units.embedding.head_table(), found, passed

    return trunk


def _to_replay(model: LanguageModel, choices) -> jax.Array:
    """Return `Batch.choices` of this device's sequences as int32 [L, t, K], or raise a UserError for a model."""
    for segment in model.expert_segments:
        if not ROUTERS[segment.moe.router].replays:
            raise UserError(
                f"Batch.choices cannot be replayed by MoEConfig.router = {segment.moe.router!r}; leave them out, "
                "or set MoEConfig.router = 'topk' or 'sigmoid_bias'"
            )
        if choices.shape[-1] != segment.moe.top_k:
            raise UserError(
                f"Batch.choices have {choices.shape[-1]} experts for each token, but layers of the model take "
                f"top_k = {segment.moe.top_k}; replay what was recorded of this model"
            )
        if segment.config.is_block_wise:
            name = "overlap" if segment.config.overlap == "halves" else "prefetch"
            raise UserError(
                f"Batch.choices cannot be replayed with ModelConfig.{name} = {getattr(segment.config, name)!r}; set "
                f"ModelConfig.{name} = 'none'"
            )
    return jnp.moveaxis(choices.reshape(-1, *choices.shape[2:]), 1, 0)


def _as_read(bank: dict, segment: Segment, roles: Roles, plan: PlanShape | None, layout: Layout, dtype) -> dict:
    """Return a segment's bank in the dtype in which its loop reads it."""
    moe, bank = segment.moe, lax.stop_gradient(bank)
    device = roles.mesh.devices.flat[0] if moe.grouped_matmul == "auto" else None
    dims = bank["w_in"].shape[1:]
    implementation = choose_implementation(moe.grouped_matmul, device, dtype, dims)
    if reads_as_stored(implementation, plan, layout.dp_stage == 3 and roles.size(roles.data) > 1):
        return bank
    return {name: leaf.astype(dtype) for name, leaf in bank.items()}


def _make_loop(
    segment: Segment, roles: Roles, layout: Layout, tokens: int, plan: PlanShape | None, group: ModelGroup
) -> Callable:
    """Return loop((x, sinks), units, constants) -> ((x, sinks), (GateStats, passes), or None without experts).

    x is a tuple of what the MP group keeps of each part: of all sequences, or of either half; the sinks are those of
    the segment.
    """
    config, graph, dp_stage = segment.config, unit_graph(segment), layout.dp_stage
    dims, wires = (tree["units"][segment.name] for tree in (layout.gather, layout.wires))
    parts = roles.size(roles.dense)
    whole_unit = functools.partial(gather_merged, dims=dims, axes=roles.dense, parts=parts, wires=wires)
    if segment.has_experts:
        like = jax.ShapeDtypeStruct((group.rows, tokens // group.rows, config.model_dim), config.dtype)
        moe = make_moe(segment.moe, roles, like, config.activation, plan, group.split)

    def loop(carry, units, constants):
        def own_unit(unit_params, sinks, index):
            bank_sink, unit_sinks = sinks
            if unit_sinks:  # of what is trained
                own = adapters_of(unit_params) if layout.adapters else unit_params
                own, unit_sinks = with_row_sums(own, unit_sinks, index)
                unit_params = joined(unit_params, own)
            return unit_params, (bank_sink, unit_sinks)

        def dense_body(carry, inputs):
            x, sinks = carry
            unit_params, sinks = own_unit(inputs[0], sinks, inputs[1])
            unit = nnx.merge(graph, whole_unit(unit_params))
            documents = constants.documents
            of_parts = [None] * group.parts if documents is None else jnp.split(documents, group.parts)
            both = zip(x, of_parts, strict=True)
            return (tuple(unit.attend(part, group.part(), own) for part, own in both), sinks), None

        def moe_body(carry, inputs):
            ((x,), sinks), (unit_params, index, tables, choices) = carry, inputs
            unit_params, sinks = own_unit(unit_params, sinks, index)
            grad_sink, in_bank = open_grad_sink(sinks[0], tables.home_row)
            bank, noise_key = constants.bank, None
            if constants.key is not None:
                noise_key = jax.random.fold_in(constants.key, segment.moe_layers.start + index)
            fetch = functools.partial(fetch_replicas, bank, plan=plan, axes=roles.expert)
            x, params, replicas = fetch_in_turn(x, unit_params, whole_unit, fetch, grad_sink, tables, plan)
            unit = nnx.merge(graph, params)
            x = checkpoint_name(unit.attend(x, group, constants.documents), "attended")
            with jax.named_scope("moe"):
                normed, shared = unit.enter_moe(x, group)
                if dp_stage in (2, 3):
                    bank, grad_sink, tables = _whole(segment.name, layout, roles, bank, grad_sink, tables)
                inputs = RouterInputs(noise_key, constants.token_ids, tables, choices, group.padded)
                y, stats, passes = moe(normed, unit.gate.router_params(), inputs, bank, grad_sink, replicas)
                y = add_shared(y, *shared)
            return ((x + y.reshape(x.shape),), (in_bank, sinks[1])), (stats, passes)

        body, inputs = dense_body, (units, jnp.arange(config.units, dtype=jnp.int32))
        if segment.has_experts:
            body, inputs = moe_body, (*inputs, constants.tables, constants.choices)
        body = checkpointed(body, config, roles.model)
        if config.stack == "scan":
            return lax.scan(body, carry, inputs)
        outputs = []
        for layer in range(config.units):
            carry, out = body(carry, jax.tree.map(lambda leaf, at=layer: leaf[at], inputs))
            outputs.append(out)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    return loop


def _whole(name: str, layout: Layout, roles: Roles, bank, grad_sink, tables):
    """Return bank, grad_sink and tables as one MoE layer of segment `name` computes with them.

    Experts' stage 2 scatters each layer's gradient over `data` as soon as it is computed, and stage 3 gathers each
    layer's parameters too; both along the hidden dim. Otherwise the bank is used as it is stored.
    """

    def whole(leaves, specs):
        return gather_tree(leaves, split_dims(specs, roles.data), roles.data, roles.size(roles.data))

    grad_sink = whole(grad_sink, layout.grad_sink[name])
    if layout.dp_stage == 2:
        return bank, grad_sink, tables
    weights = {n: v[tables.home_row] for n, v in bank.items()}
    compact = jnp.arange(tables.home_row.shape[0], dtype=jnp.int32)
    return whole(weights, layout.params["bank"][name]), grad_sink, dataclasses.replace(tables, home_row=compact)


def _make_block_wise_loop(
    segment: Segment, roles: Roles, layout: Layout, tokens: int, plan: PlanShape | None, group: ModelGroup
) -> Callable:
    """Return the same loop in the order of a block-wise schedule."""
    config, halves = segment.config, segment.config.overlap == "halves"
    check_one_piece(segment.moe, f"ModelConfig.{'overlap' if halves else 'prefetch'}", "none")
    if segment.moe.record_choices and halves and roles.model:
        raise UserError(
            "MoEConfig.record_choices (True) cannot say whose choices they are with ModelConfig.overlap = 'halves' and "
            f"MeshConfig.model = {roles.size(roles.model)}; set ModelConfig.overlap = 'none'"
        )
    group, tokens = group.part(), tokens // group.parts
    length = tokens // group.rows
    own_plan = plan
    if halves and plan is not None and plan.bucket_rows is not None:  # buckets half as long
        own_plan = dataclasses.replace(plan, bucket_rows=plan.bucket_rows.each(lambda rows: round_up(rows / 2, 8)))
    shares = {} if plan is None else {"trans_share": plan.trans_share, "agg_share": plan.agg_share}
    like = jax.ShapeDtypeStruct((group.rows, length, config.model_dim), config.dtype)
    moe = make_moe(segment.moe, roles, like, config.activation, own_plan, group.split)
    how = Stages(
        segment=segment,
        roles=roles,
        group=group,
        graph=unit_graph(segment),
        moe=moe,
        block_schedule=config.block_wise.build(
            config.moe_layers, recompute=config.recomputes, results_again=moe.reads_results, **shares
        ),
        ahead=None if plan is None else plan.ahead,
        late=None if plan is None else plan.late,
        dims=of_moe(layout.gather["units"][segment.name]),
        wires=of_moe(layout.wires["units"][segment.name]),
        split_bank=split_dims(layout.params["bank"][segment.name], roles.data),
        split_gradients=split_dims(layout.grad_sink[segment.name], roles.data),
        adapters=layout.adapters,
    )
    return functools.partial(run_stack, how)
