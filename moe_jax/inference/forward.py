"""A model's forward over a cache: prompts from position 0, or one more token of each sequence.

Inputs: the parameters of the training model, tables, a cache, token ids [b, Sq] with positions and whether they are
real. Outputs: activations [b, Sq, M] after the last norm, the cache, and the experts that every token took. Inside
`shard_map`. The modules, the MoE layer with its schedules and the loop over units are those of training; only attention
looks at a cache, and padding goes to no expert.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.collectives.replicated import join_parts, own_part
from moe_jax.collectives.varying import cast_varying
from moe_jax.dispatch import local
from moe_jax.inference.cache import Entry, attend_cached, store_prompts, store_tokens
from moe_jax.inference.few_tokens import FewTokens, FewTokensGroup, alike, are_few
from moe_jax.inference.int8 import with_int8
from moe_jax.inference.real_tokens import RealTokens
from moe_jax.inference.transport import settle_transport
from moe_jax.mesh.roles import Roles
from moe_jax.models import LanguageModel
from moe_jax.models.attention import attend
from moe_jax.models.model_group import ModelGroup
from moe_jax.models.param_dtype_gradients import in_dtype, project
from moe_jax.models.segments import Segment, part_of
from moe_jax.models.shared_experts import add_shared
from moe_jax.models.transformer import Transformer, Unit
from moe_jax.moe.layer import MoE, make_moe
from moe_jax.placement import PlanShape


def whole_tokens(tokens: int, parts: int) -> int:
    """Return `tokens`, rounded up so that an MP group of `parts` devices can share them evenly."""
    return -(-tokens // parts) * parts


def make_forward(
    model: LanguageModel, rows: int, length: int, fresh: bool, shapes: dict[str, PlanShape], quantize: str = "none",
    decode: str = "exchange",
) -> Callable:  # fmt: skip
    """Return forward(dense, bank, tables, cache, ids, positions, real) -> (x, table, cache, {segment: choices}).

    Of whole prompts `cache` is int T, the tokens that the cache to be made has room for.
    ids, positions int32 [b, Sq], real bool [b, Sq]; x [b, Sq, M]; table [V, M] gives logits; choices int32 [L, t', K]
    of the tokens that this device owns, -1 for padding, t' as `whole_tokens` says over the MP group.

    Args:
      model: of `inference_configs`, its parameters whole on every device but for experts and MP parts (ZeRO stage 0).
      rows: b; length: Sq.
      fresh: the tokens are whole prompts; else one token for each sequence, at its position.
      shapes: {segment: slots and candidates of its placement}; quantize: how the bank is kept, 'none' or 'int8'.
      decode: of one token for each sequence: 'gather' them where they are few (`few_tokens.py`), or 'exchange'.
    """
    config = model.config
    graph = nnx.split(nnx.eval_shape(lambda: Transformer(config, model.moe, model.vocab_size, nnx.Rngs(0))))[0]
    single = not fresh and decode == "gather"
    few = {
        segment: single and are_few(rows * length, segment.moe.top_k, model.roles_of(segment))
        for segment in model.expert_segments
    }
    group = (FewTokensGroup if any(few.values()) else ModelGroup)(model.roles.model, rows, False)
    layers = {
        segment: _make_layer(segment, model.roles_of(segment), rows * length, shapes[segment.name], quantize, of_few)
        for segment, of_few in few.items()
    }
    loops = {segment: _make_loop(segment, layers.get(segment), group) for segment in model.segments}

    group_parts = model.roles.size(model.roles.model)

    def forward(dense, bank, tables, cache, ids, positions, real):
        tables = local(tables)
        whole = nnx.merge(graph, dense)
        x = whole.embedding(ids, jnp.dtype(config.dtype), group, positions)
        found, kept = {}, {}
        for segment, loop in loops.items():
            units = part_of(dense["units"], segment, model.segments)
            own = [model.own_part(tree, segment) if segment.has_experts else None for tree in (bank, tables)]
            own[1] = alike(own[1], model.roles_of(segment)) if few.get(segment) else own[1]
            held = None if fresh else cache[segment.name]
            x, new, choices = loop(x, units, *own, held, positions, real)
            kept[segment.name] = store_prompts(new, cache) if fresh else store_tokens(held, new, positions[:, 0])
            if few.get(segment):
                spare = whole_tokens(rows, group_parts) - rows
                choices = jnp.pad(choices, ((0, 0), (0, spare), (0, 0)), constant_values=-1)
                choices = own_part(choices, model.roles.model, dim=1)
            if choices is not None:
                found[segment.name] = cast_varying(choices, model.roles.all)
        with jax.named_scope("logits"):
            return whole.norm(x), whole.embedding.head_table(), kept, found

    return forward


def _make_loop(segment: Segment, layer: Callable | None, group: ModelGroup) -> Callable:
    """Return loop(x, units, bank, tables, cache or None, positions, real) -> (x, new, choices [L, t', K] or None).

    Without a cache the tokens are whole prompts. new: {attention: (k, v)}, each [U, b, Sq, Hkv, Dh].
    """
    config = segment.config
    graph = nnx.split(nnx.eval_shape(lambda: Unit(config, segment.moe, nnx.Rngs(0))))[0]

    def loop(x, units, bank, tables, cache, positions, real):
        def body(x, inputs):
            params, here, held = inputs
            unit, new = nnx.merge(graph, params), {}

            def run(name, x):
                def mix(q, k, v):
                    new[name] = k, v
                    if held is None:
                        return attend(q, k, v, True, config.attention)
                    return attend_cached(Entry(*held[name]), q, k, v, positions[:, 0])

                return getattr(unit, name)(x, group, positions, mix)

            x = unit.attend(x, group, run)
            if layer is None:
                return x, (new, None)
            with jax.named_scope("moe"):
                normed, beside = unit.enter_moe(x, group)
                y, choices = layer(normed, real.reshape(-1), unit.gate.router_params(), bank, here)
                y = add_shared(y, *beside)
            return x + y.reshape(x.shape), (new, choices)

        pairs = None if cache is None else {name: (entry.keys, entry.values) for name, entry in cache.items()}
        x, (new, choices) = lax.scan(body, x, (units, tables, pairs))
        return x, new, choices

    return loop


def _make_layer(
    segment: Segment, roles: Roles, tokens: int, shape: PlanShape, quantize: str, few: bool
) -> Callable:  # fmt: skip
    """Return layer(x [t, M], real bool [t], gate, bank, tables) -> (y [t, M], choices of the tokens owned here).

    Where tokens are few, choices are of all of them.
    """
    whole = whole_tokens(tokens, roles.size(roles.model))
    row_bytes = segment.config.model_dim * jnp.dtype(segment.config.dtype).itemsize
    config = settle_transport(segment.moe, roles, whole, row_bytes)
    moe: MoE = make_moe(config, roles, whole, segment.config.activation, shape)
    moe = dataclasses.replace(moe, router=RealTokens(moe.router))
    moe = with_int8(moe) if quantize == "int8" else moe
    of_few = FewTokens(moe, shape.slots)

    def layer(x, real, gate, bank, tables):
        index = jnp.where(real, jnp.arange(tokens, dtype=jnp.int32), -1)
        if few:
            return of_few(x, index, gate, bank, tables)
        x = jnp.pad(x, ((0, whole - tokens), (0, 0)))
        index = jnp.pad(index, (0, whole - tokens), constant_values=-1)
        y, stats, _ = moe(x, index, gate, bank, {}, tables)
        return y[:tokens], stats.choices

    return layer


def logits_of(x, table, axes: tuple[str, ...]):
    """Return logits [b, V] of x [b, M], in at least float32; each device of an MP group has a part of the table.

    Args:
      table: [V, M]; axes: of the MP group.
    """
    parts = 1
    for axis in axes:
        parts *= lax.axis_size(axis)
    split = axes if table.shape[0] % parts == 0 else ()
    own = in_dtype(own_part(table, split), x.dtype)
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    return join_parts(project("bm,vm->bv", x, own, out=acc_dtype), split, dim=1)
