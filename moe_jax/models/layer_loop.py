"""The layers of a model one after the other: a loop that JAX differentiates, or the program of a block-wise schedule.

Inputs: x as the MP group keeps its residual stream, the units' parameters, this device's part of the bank, grad_sinks
and tables. Outputs: x, the gates' statistics and the passes of every layer. Inside `shard_map`.
Letters: docs/notation.md.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.collectives.gather import gather_tree
from moe_jax.collectives.sparse_all_gather import Transfer
from moe_jax.collectives.varying import cast_varying
from moe_jax.errors import UserError
from moe_jax.models.language_model import LanguageModel, Layout
from moe_jax.models.model_group import ModelGroup
from moe_jax.models.prefetch import Constants, Prefetcher
from moe_jax.models.shared_experts import add_shared
from moe_jax.models.stages import Stages
from moe_jax.models.transformer import Unit
from moe_jax.moe.layer import make_moe
from moe_jax.moe.replicas import fetch_in_turn
from moe_jax.placement import PlanShape
from moe_jax.routers import build_router
from moe_jax.schedules import schedule_record, schedules


def make_layer_loop(
    model: LanguageModel, layout: Layout, tokens: int, training: bool, plan: PlanShape | None, bank_store: Callable,
    group: ModelGroup,
) -> Callable:  # fmt: skip
    """Return loop(x, units, bank, grad_sink, tables, token_ids, key, replay) -> (x, GateStats, passes int32 [L]).

    GateStats are [L, ...]; `replay` is int32 [L, t, K], choices of before to be taken again, or None.

    Args:
      model, layout: the model, and the layout of its parameters.
      tokens: t of this device's MP group.
      training: with gate noise, if the gate has any.
      plan: sizes of the placements to come; None is an even placement without replicas.
      bank_store: what one MoE layer computes with, see `loss.py`.
      group: the MP group, which decides whether x is whole or split over tokens.

    Raises:
      UserError: a block-wise schedule where it cannot run.
    """
    config, roles = model.config, model.roles
    graph = nnx.split(nnx.eval_shape(lambda: Unit(config, model.moe, nnx.Rngs(0))))[0]
    parts, gather = roles.size(roles.dense), layout.gather["units"]
    noisy = training and build_router(model.moe).draws

    if config.prefetch != "none":
        return _make_prefetcher(model, layout, graph, tokens, noisy, plan, group)
    moe = make_moe(model.moe, roles, tokens, config.activation, plan, group.split, tokens // group.rows)

    def whole_unit(params):
        return gather_tree(params, gather, roles.dense, parts)

    def loop(x, units, bank, grad_sink, tables, token_ids, key, replay=None):
        def body(x, inputs):
            unit_params, layer_grad_sink, layer_tables, layer, choices = inputs
            noise_key = jax.random.fold_in(key, layer) if noisy else None
            x, params, layer_grad_sink, replicas = fetch_in_turn(
                x, unit_params, whole_unit, bank, layer_grad_sink, layer_tables, plan, roles.expert
            )
            unit = nnx.merge(graph, params)
            x = unit.attend(x, group)
            with jax.named_scope("moe"):
                normed, beside = unit.enter_moe(x, group)
                weights, gathered_grad_sink, here = bank_store(bank, layer_grad_sink, layer_tables)
                y, stats, passes = moe(
                    normed, token_ids, unit.gate.router_params(), weights, gathered_grad_sink, here, noise_key,
                    replicas, choices,
                )  # fmt: skip
                y = add_shared(y, *beside)
            return x + y.reshape(x.shape), (stats, passes)

        body = checkpointed(body, config.remat)
        inputs = (units, grad_sink, tables, jnp.arange(config.moe_layers, dtype=jnp.int32), replay)
        if config.stack == "scan":
            x, (stats, passes) = lax.scan(body, x, inputs)
            return x, stats, passes
        outputs = []
        for layer in range(config.moe_layers):
            x, out = body(x, jax.tree.map(lambda leaf, at=layer: leaf[at], inputs))
            outputs.append(out)
        return x, *jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

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


def _make_prefetcher(model, layout, graph, tokens, noisy, plan, group):
    config, roles = model.config, model.roles
    if layout.dp_stage is not None:
        raise UserError(
            f"ModelConfig.prefetch ({config.prefetch!r}) has nothing to move under MoEConfig.schedule = "
            f"{model.moe.schedule!r}; set ModelConfig.prefetch = 'none'"
        )
    if not schedule_record(model.moe.schedule).one_piece:
        records = map(schedule_record, schedules())
        possible = [record.name for record in records if record.one_piece and record.moves_tokens]
        raise UserError(
            f"ModelConfig.prefetch needs a MoEConfig.schedule whose experts run in one piece, not "
            f"{model.moe.schedule!r}; set MoEConfig.schedule to one of {', '.join(possible)}, or ModelConfig.prefetch "
            "= 'none'"
        )
    gather, parts = layout.gather["units"], roles.size(roles.dense)
    recompute = config.remat in ("block", "nothing_saveable")
    shares = {} if plan is None else {"trans_share": plan.trans_share, "agg_share": plan.agg_share}
    schedule = config.block_wise.build(config.moe_layers, recompute=recompute, **shares)

    def attend(mix, gate, x):
        return nnx.merge(graph, {**mix, **gate}).attend(x, group)

    def enter_moe(mix, gate, x):
        return nnx.merge(graph, {**mix, **gate}).enter_moe(x, group)

    def prepare(mix, gate):
        before, inside = of_moe(gather)
        return gather_tree(mix, before, roles.dense, parts), gather_tree(gate, inside, roles.dense, parts)

    prefetcher = Prefetcher(
        schedule=schedule,
        stages=Stages(
            attend=attend,
            enter_moe=enter_moe,
            moe=make_moe(model.moe, roles, tokens, config.activation, plan, group.split, tokens // group.rows),
            checkpoint=lambda function: checkpointed(function, config.remat),
            # the schedule's window `recompute` runs these stages again, so no checkpoint does
            moe_checkpoint=lambda function: checkpointed(function, "none" if recompute else config.remat),
        ),
        transfer=None if plan is None or plan.ahead is None else Transfer(plan.ahead, roles.expert),
        late=None if plan is None else plan.late,
        prepare=prepare,
        scan=config.stack == "scan",
        recompute=recompute,
        noisy=noisy,
    )

    def loop(x, units, bank, grad_sink, tables, token_ids, key, replay=None):
        if replay is not None:
            raise UserError(
                f"Batch.choices cannot be replayed with ModelConfig.prefetch = {config.prefetch!r}; set "
                "ModelConfig.prefetch = 'none'"
            )
        mix, gate = of_moe(units)
        bank = cast_varying(bank, roles.all)  # as rows vary: a cast inside a stage would be saved for its backward
        return prefetcher(x, (mix, gate), grad_sink, Constants(bank, tables, token_ids, key))

    return loop


def of_moe(units: dict) -> tuple[dict, dict]:
    """Return a unit's leaves by name: (of what precedes the MoE layer, of the layer: its gate and shared experts)."""
    inside = {name: leaf for name, leaf in units.items() if name in ("gate", "shared")}
    return {name: leaf for name, leaf in units.items() if name not in inside}, inside
