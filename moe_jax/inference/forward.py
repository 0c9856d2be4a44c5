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
from moe_jax.inference.few_tokens import FewTokens, FewTokensGroup, alike, on_cpu, way_of
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

UNROLL = 16  # units in a turn of a GPU's loop over single tokens, where the loop's own small kernels count


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
    few = {} if fresh or decode != "gather" else {
        segment: way_of(rows, segment.moe.top_k, shapes[segment.name].slots, model.roles_of(segment))
        for segment in model.expert_segments
    }  # fmt: skip
    in_place = any(few.values()) and not on_cpu(model.roles)
    group = (FewTokensGroup if in_place else ModelGroup)(model.roles.model, rows, False)
    layers = {
        segment: _make_layer(
            segment, model.roles_of(segment), rows * length, shapes[segment.name], quantize, few.get(segment)
        )
        for segment in model.expert_segments
    }
    loops = {segment: _make_loop(segment, layers.get(segment), group, in_place) for segment in model.segments}

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


def _make_loop(segment: Segment, layer: Callable | None, group: ModelGroup, in_place: bool) -> Callable:
    """Return loop(x, units, bank, tables, cache or None, positions, real) -> (x, new, choices [L, t', K] or None).

    Without a cache the tokens are whole prompts. new: {attention: (k, v)}, each [U, b, Sq, Hkv, Dh]; in_place: few
    tokens on a GPU, where small kernels count.
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
                    at = positions[:, 0]
                    return attend_cached(Entry(*held[name]), q, k, v, at, in_place and at.shape[0] == 1)

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
        x, (new, choices) = lax.scan(body, x, (units, tables, pairs), unroll=UNROLL if in_place else 1)
        return x, new, choices

    return loop


def _make_layer(
    segment: Segment, roles: Roles, tokens: int, shape: PlanShape, quantize: str, way: str | None
) -> Callable:  # fmt: skip
    """Return layer(x [t, M], real bool [t], gate, bank, tables) -> (y [t, M], choices of the tokens owned here).

    Where tokens are few, so that there is a `way_of` them, choices are of all.
    """
    whole = whole_tokens(tokens, roles.size(roles.model))
    row_bytes = segment.config.model_dim * jnp.dtype(segment.config.dtype).itemsize
    config = settle_transport(segment.moe, roles, whole, row_bytes)
    moe: MoE = make_moe(config, roles, whole, segment.config.activation, shape)
    moe = dataclasses.replace(moe, router=RealTokens(moe.router))
    moe = with_int8(moe) if quantize == "int8" else moe
    of_few = FewTokens(moe, shape.slots, way) if way else None

    def layer(x, real, gate, bank, tables):
        index = jnp.where(real, jnp.arange(tokens, dtype=jnp.int32), -1)
        if of_few is not None:
            return of_few(x, index, gate, bank, tables)
        x = jnp.pad(x, ((0, whole - tokens), (0, 0)))
        index = jnp.pad(index, (0, whole - tokens), constant_values=-1)
        y, stats, _ = moe(x, index, gate, bank, {}, tables)
        return y[:tokens], stats.choices

    return layer


def logits_of(x, table, axes: tuple[str, ...], in_place: bool = False):
    """Return logits [b, V] of x [b, M], in at least float32; each device of an MP group has a part of the table.

    Args:
      table: [V, M]; axes: of the MP group; in_place: multiply the table where it lies, without a matmul.
    """
    parts = 1
    for axis in axes:
        parts *= lax.axis_size(axis)
    split = axes if table.shape[0] % parts == 0 else ()
    own = in_dtype(own_part(table, split), x.dtype)
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    if in_place:
        part = jnp.sum(x[:, None].astype(acc_dtype) * own.held[None].astype(acc_dtype), axis=-1)
    else:
        part = project("bm,vm->bv", x, own, out=acc_dtype)
    return join_parts(part, split, dim=1)
