"""A model's forward over a cache of keys and values: prompts from position 0, or one more token of each sequence.

The modules, the MoE layer with its schedules and the loop over units are those of training; only attention looks at a
cache, and padding goes to no expert. Inside `shard_map`. A cache is {segment: {attention of its unit: Entry}}; a
token's keys stand in the row of its position, so prompts of different lengths need no shift: padding behind a prompt is
overwritten before anything may look at it. Sequences are split over the data-parallel devices and heads over the
model-parallel ones. Hkv heads of keys and values divide H; T rows of a sequence in the cache.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.cluster import read_named_cluster
from moe_jax.cluster.collectives import ALL_TO_ALLS as KINDS
from moe_jax.cluster.collectives import all_to_all_seconds
from moe_jax.errors import UserError
from moe_jax.inference.few_tokens import FewTokens, FewTokensGroup, alike, on_cpu, way_of, with_int8
from moe_jax.models import LanguageModel
from moe_jax.models.attention import attend
from moe_jax.models.model_group import ModelGroup, in_dtype, project
from moe_jax.models.segments import Segment
from moe_jax.models.transformer import Transformer, Unit, add_shared
from moe_jax.moe import MoEConfig
from moe_jax.moe.build import make_moe
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import Router, RouterInputs
from moe_jax.moe.routers.statistics import count_experts
from moe_jax.moe.routing import record
from moe_jax.moe.tables import local
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.replicated import join_parts, own_part
from moe_jax.parallel.varying import cast_varying
from moe_jax.planning.plan_shape import PlanShape


class RealTokens:
    """Ask `router`, then take the padding out of what it chose; all else is the router's own."""

    def __init__(self, router: Router):
        self._router = router

    def __getattr__(self, name):
        return getattr(self._router, name)

    def choose(self, x, params, inputs: RouterInputs):
        """Return (Choice, GateStats); `inputs.token_ids` int32 [t] must be there. Choices leave with the statistics."""
        choice, stats = self._router.choose(x, params, inputs)
        real = (inputs.token_ids >= 0)[:, None]
        expert_ids = jnp.where(real, choice.expert_ids, -1)
        choice = dataclasses.replace(
            choice,
            expert_ids=expert_ids,
            weights=jnp.where(real, choice.weights, 0),
            keep_mask=choice.keep_mask & real,
        )
        counts = count_experts(expert_ids, stats.counts.shape[0])
        return choice, dataclasses.replace(stats, counts=counts, choices=expert_ids)


@record
class Entry:
    """Of one attention in all units of a segment: keys and values [U, b, Hkv, T, Dh]."""

    keys: jax.Array
    values: jax.Array


def attentions_of(segment: Segment) -> tuple[str, ...]:
    """Return the names of a unit's attentions, in their order."""
    names = ("dense_attention",) if segment.config.moe_every != 1 else ()
    return (*names, "attention") if segment.has_experts else names


def cache_specs(model: LanguageModel) -> dict:
    """Return the PartitionSpec of every array of a cache."""
    roles = model.roles
    spec = P(None, roles.dense, roles.model or None)
    return {segment.name: {name: Entry(spec, spec) for name in attentions_of(segment)} for segment in model.segments}


def store_prompts(new: dict, held: int) -> dict:
    """Return a segment's cache with room for `held` tokens; new: {attention: (k, v)}, each [U, b, Sq, Hkv, Dh]."""

    def one(array):
        by_head = jnp.swapaxes(array, 2, 3)
        return jnp.pad(by_head, ((0, 0), (0, 0), (0, 0), (0, held - by_head.shape[3]), (0, 0)))

    return {name: Entry(*map(one, pair)) for name, pair in new.items()}


def store_tokens(cache: dict, new: dict, positions) -> dict:
    """Return a segment's cache with one more token of each sequence; new: (k, v) [U, b, 1, Hkv, Dh] each.

    Args:
      positions: int32 [b], below T.
    """
    row = jnp.arange(positions.shape[0])

    def one(held, array):
        return held.at[:, row, :, positions].set(jnp.swapaxes(array[:, :, 0], 0, 1))

    return {name: Entry(one(cache[name].keys, k), one(cache[name].values, v)) for name, (k, v) in new.items()}


def attend_cached(entry: Entry, q, k, v, positions, in_place: bool = False):
    """Return softmax(q k^T / sqrt(Dh)) v over the tokens before `positions` and the new one: [b, 1, H, Dh].

    The new token's keys and values stand in for the rows of its position, which the cache does not hold yet.

    Args:
      entry: of this unit, [b, Hkv, T, Dh]; q: [b, 1, H, Dh], consecutive H / Hkv of which share a head of keys.
      k, v: [b, 1, Hkv, Dh], of the new token; positions: int32 [b], where it stands, below T.
      in_place: multiply keys and values where they lie, without a matmul, which copies them first.
    """
    rows, _, heads, dim = q.shape
    shared = k.shape[2]
    acc_dtype = jnp.promote_types(q.dtype, jnp.float32)
    place = jnp.arange(entry.keys.shape[2], dtype=jnp.int32)[None] - positions[:, None]
    new = (place == 0)[:, None, :, None]
    keys = jnp.where(new, jnp.swapaxes(k, 1, 2), entry.keys)
    values = jnp.where(new, jnp.swapaxes(v, 1, 2), entry.values)

    def times(spec, a, b, summed):
        if not in_place:
            return jnp.einsum(spec, a, b, preferred_element_type=acc_dtype)
        return jnp.sum(a.astype(acc_dtype) * b[:, :, None].astype(acc_dtype), axis=summed)

    grouped = q[:, 0].reshape(rows, shared, heads // shared, dim)
    row = grouped[:, :, :, None] if in_place else grouped
    scores = times("bhgd,bhtd->bhgt", row, keys, -1) / math.sqrt(dim)
    scores = jnp.where((place <= 0)[:, None, None], scores, jnp.finfo(acc_dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    row = weights[..., None] if in_place else weights
    mixed = times("bhgt,bhtd->bhgd", row, values, -2)
    return mixed.astype(q.dtype).reshape(rows, 1, heads, dim)


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
            units = dense["units"][segment.name]
            own = [tree.get(segment.name) for tree in (bank, tables)]
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
        # The loop only reads the cache and hands out what is new: written inside, all of it would be copied every turn.
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
        y, stats, _ = moe(x, gate, RouterInputs(None, index, tables), bank, {})
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


_LOG = logging.getLogger(__name__)
COORDINATED = ("s1", "s2")  # schedules that have it


def settle_transport(config: MoEConfig, roles: Roles, tokens: int, row_bytes: int) -> MoEConfig:
    """Return the config with another transport than 'auto'; every other one stays.

    Args:
      tokens: of an MP group; row_bytes: of one row of M elements.

    Raises:
      UserError: 'auto' without a cluster file, or one that lacks a latency, step or bandwidth.
    """
    if config.transport != "auto":
        return config
    if not config.cluster:
        raise UserError(
            "MoEConfig.transport ('auto') chooses by a cluster's latencies and bandwidths; set MoEConfig.cluster to "
            f"its file, such as configs/cluster/h200.gin, or name one of {', '.join(KINDS)}"
        )
    shards, devices = roles.size(roles.expert_shard), roles.size(roles.expert + roles.expert_shard)
    # the part of the MP group in which the coordinated exchange has its second and third collective
    slicing = shards * roles.size(tuple(axis for axis in roles.expert if axis in roles.model))
    near = min(roles.config.devices_per_node, devices)
    if devices % near or near % slicing:
        return dataclasses.replace(config, transport="all_to_all")
    cluster = read_named_cluster(config.cluster).sized(None, near)
    sent = -(-tokens // roles.size(roles.model)) * config.top_k * row_bytes * shards
    seconds = {
        kind: value
        for kind, value in all_to_all_seconds(cluster, devices, slicing, shards, sent).items()
        if kind != "coordinated" or config.schedule in COORDINATED
    }
    chosen = min(seconds, key=lambda kind: seconds[kind])
    listed = ", ".join(f"{kind} {value:.3g} s" for kind, value in seconds.items())
    _LOG.warning("transport 'auto' is %r for %d tokens of a group: %s", chosen, tokens, listed)
    return dataclasses.replace(config, transport=chosen)
