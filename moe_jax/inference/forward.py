"""A model's forward over a cache of keys and values: prompts from position 0, or one more token of each sequence.

The modules, the MoE layer with its schedules and the loop over units are those of training; only attention looks at a
cache, and padding goes to no expert. Inside `shard_map`. A cache is {segment: {attention of its unit: (keys, values)}},
[U, b, Hkv, T, Dh] each; a token's keys stand in the row of its position, so prompts of different lengths need no shift:
padding behind a prompt is overwritten before anything may look at it. Sequences are split over the data-parallel
devices and heads over the model-parallel ones. Hkv heads of keys and values divide H; T rows of a sequence in the
cache; U units of a segment.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.cluster import read_cluster
from moe_jax.cluster.collectives import ALL_TO_ALLS as KINDS
from moe_jax.cluster.collectives import all_to_all_seconds
from moe_jax.errors import UserError
from moe_jax.inference import few_tokens
from moe_jax.inference.few_tokens import FewTokensGroup, Int8MoE, alike
from moe_jax.models import LanguageModel
from moe_jax.models.attention import attend
from moe_jax.models.config import Segment
from moe_jax.models.model_group import ModelGroup
from moe_jax.models.transformer import Unit, abstract_transformer, add_shared
from moe_jax.moe import MoEConfig
from moe_jax.moe.build import make_moe
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import Router, RouterInputs
from moe_jax.moe.routers.statistics import count_experts
from moe_jax.moe.routing import local
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.varying import cast_varying, own_part
from moe_jax.planning.plan_shape import PlanShape


class RealTokens:
    """Ask a router, then take the padding out of what it chose; all else is the router's own."""

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


@dataclasses.dataclass(frozen=True)
class Serving:
    """A model as it generates, and how its parameters lie.

    Attributes:
      model: of `inference_configs`, its parameters whole on every device but for experts and MP parts (ZeRO stage 0).
      vocabulary: ids below it may be chosen.
      specs: PartitionSpecs {'dense': ..., 'bank': ...}.
      shapes: {segment: slots and candidates of its placement}.
      quantize: how the bank is kept, 'none' or 'int8'.
      decode: of one token for each sequence: 'gather' them where they are few (`few_tokens.py`), or 'exchange'.
    """

    model: LanguageModel
    vocabulary: int
    specs: Any
    shapes: dict[str, PlanShape]
    quantize: str = "none"
    decode: str = "gather"


def attentions_of(segment: Segment) -> tuple[str, ...]:
    """Return the names of a unit's attentions, in their order."""
    names = ("dense_attention",) if segment.config.moe_every != 1 else ()
    return (*names, "attention") if segment.has_experts else names


def attend_cached(held: tuple, q, k, v, positions, in_place: bool = False):
    """Return softmax(q k^T / sqrt(Dh)) v over the tokens before `positions` and the new one: [b, 1, H, Dh].

    The new token's keys and values stand in for the rows of its position, which the cache does not hold yet.

    Args:
      held: keys and values of this unit, [b, Hkv, T, Dh]; q: [b, 1, H, Dh]; k, v: [b, 1, Hkv, Dh], of the new token.
      positions: int32 [b], where it stands, below T.
      in_place: multiply keys and values where they lie, without a matmul, which copies them first.
    """
    rows, _, heads, dim = q.shape
    shared = k.shape[2]  # consecutive H / Hkv queries share a head of keys
    acc_dtype = jnp.promote_types(q.dtype, jnp.float32)
    place = jnp.arange(held[0].shape[2], dtype=jnp.int32)[None] - positions[:, None]
    new = (place == 0)[:, None, :, None]
    keys, values = (jnp.where(new, jnp.swapaxes(n, 1, 2), old) for n, old in zip((k, v), held, strict=True))

    grouped = q[:, 0].reshape(rows, shared, heads // shared, dim)
    if in_place:
        grouped = grouped[:, :, :, None]
        scores = jnp.sum(grouped.astype(acc_dtype) * keys[:, :, None].astype(acc_dtype), axis=-1)
    else:
        scores = jnp.einsum("bhgd,bhtd->bhgt", grouped, keys, preferred_element_type=acc_dtype)
    scores = jnp.where((place <= 0)[:, None, None], scores / math.sqrt(dim), jnp.finfo(acc_dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if in_place:
        mixed = jnp.sum(weights[..., None].astype(acc_dtype) * values[:, :, None].astype(acc_dtype), axis=-2)
    else:
        mixed = jnp.einsum("bhgt,bhtd->bhgd", weights, values, preferred_element_type=acc_dtype)
    return mixed.astype(q.dtype).reshape(rows, 1, heads, dim)


UNROLL = 16  # units in a turn of a GPU's loop over single tokens, where the loop's own small kernels count


def whole_tokens(tokens: int, parts: int) -> int:
    """Return `tokens`, rounded up so that an MP group of `parts` devices can share them evenly."""
    return -(-tokens // parts) * parts


def make_forward(serving: Serving, rows: int, length: int, held: int) -> Callable:
    """Return forward(params, tables, cache, ids, positions, real) -> (x, table, cache, {segment: choices}).

    ids, positions int32 [b, Sq], real bool [b, Sq]; x [b, Sq, M]; table [V, M] gives logits; choices int32 [L, t', K]
    of the tokens that this device owns, -1 for padding, t' as `whole_tokens` says over the MP group.

    Args:
      rows: b; length: Sq.
      held: of whole prompts, which need no cache, the tokens that the new one has room for; 0 where there is one token
        for each sequence, at its position.
    """
    model, config, roles = serving.model, serving.model.config, serving.model.roles
    graph = nnx.split(abstract_transformer(config, model.moe, model.vocab_size))[0]
    ways = {}  # of segments whose tokens are gathered
    if not held and serving.decode == "gather":
        for segment in model.expert_segments:
            slots = serving.shapes[segment.name].slots
            ways[segment] = few_tokens.way_of(rows, segment.moe.top_k, slots, model.roles_of(segment))
    in_place = any(ways.values()) and not few_tokens.on_cpu(roles)
    group = (FewTokensGroup if in_place else ModelGroup)(roles.model, rows, False)
    loops = {}
    for segment in model.segments:
        layer = _make_layer(serving, segment, rows * length, ways.get(segment)) if segment.has_experts else None
        loops[segment] = _make_loop(segment, layer, group, in_place)

    def forward(params, tables, cache, ids, positions, real):
        tables, dense = local(tables), params["dense"]
        whole = nnx.merge(graph, dense)
        x = whole.embedding(ids, jnp.dtype(config.dtype), group, positions)
        found, kept = {}, {}
        for segment, loop in loops.items():
            units = dense["units"][segment.name]
            own = [tree.get(segment.name) for tree in (params["bank"], tables)]
            own[1] = alike(own[1], model.roles_of(segment)) if ways.get(segment) else own[1]
            before = None if held else cache[segment.name]
            x, new, choices = loop(x, units, *own, before, positions, real)
            kept[segment.name] = {}
            for name, pair in new.items():  # [U, b, Sq, Hkv, Dh] each
                if held:
                    room = ((0, 0),) * 3 + ((0, held - length), (0, 0))
                    stored = [jnp.pad(jnp.swapaxes(array, 2, 3), room) for array in pair]
                else:
                    at = slice(None), jnp.arange(rows), slice(None), positions[:, 0]
                    rest = zip(before[name], pair, strict=True)
                    stored = [old.at[at].set(jnp.swapaxes(array[:, :, 0], 0, 1)) for old, array in rest]
                kept[segment.name][name] = tuple(stored)
            if ways.get(segment):
                spare = whole_tokens(rows, roles.size(roles.model)) - rows
                choices = jnp.pad(choices, ((0, 0), (0, spare), (0, 0)), constant_values=-1)
                choices = own_part(choices, roles.model, dim=1)
            if choices is not None:
                found[segment.name] = cast_varying(choices, roles.all)
        with jax.named_scope("logits"):
            return whole.norm(x), whole.embedding.head_table(), kept, found

    return forward


def _make_loop(segment: Segment, layer: Callable | None, group: ModelGroup, in_place: bool) -> Callable:
    """Return loop(x, units, bank, tables, cache or None, positions, real) -> (x, new, choices [L, t', K] or None).

    Without a cache the tokens are whole prompts. new: {attention: (k, v)}, each [U, b, Sq, Hkv, Dh]; in_place: few
    tokens on a GPU, where small kernels count.
    """
    config = segment.config
    graph = nnx.split(nnx.eval_shape(lambda: Unit(segment, nnx.Rngs(0))))[0]

    def loop(x, units, bank, tables, cache, positions, real):
        def body(x, inputs):
            params, here, held = inputs
            unit, new = nnx.merge(graph, params), {}

            def mix(name, q, k, v):
                new[name] = k, v
                if held is None:
                    return attend(q, k, v, True, config.attention)
                at = positions[:, 0]
                return attend_cached(held[name], q, k, v, at, in_place and at.shape[0] == 1)

            mixes = {name: functools.partial(mix, name) for name in attentions_of(segment)}
            x = unit.attend(x, group, None, positions, mixes)
            if layer is None:
                return x, (new, None)
            with jax.named_scope("moe"):
                normed, beside = unit.enter_moe(x, group)
                y, choices = layer(normed, real.reshape(-1), unit.gate.router_params(), bank, here)
                y = add_shared(y, *beside)
            return x + y.reshape(x.shape), (new, choices)

        # The loop only reads the cache and hands out what is new: written inside, all of it would be copied every turn.
        x, (new, choices) = lax.scan(body, x, (units, tables, cache), unroll=UNROLL if in_place else 1)
        return x, new, choices

    return loop


def _make_layer(serving: Serving, segment: Segment, tokens: int, way: str | None) -> Callable:
    """Return layer(x [t, M], real bool [t], gate, bank, tables) -> (y [t, M], choices of the tokens owned here).

    With a `way` of `way_of`, where tokens are few, choices are of all.
    """
    roles = serving.model.roles_of(segment)
    whole = whole_tokens(tokens, roles.size(roles.model))
    row_bytes = segment.config.model_dim * jnp.dtype(segment.config.dtype).itemsize
    config = settle_transport(segment.moe, roles, whole, row_bytes)
    like = jax.ShapeDtypeStruct((whole, segment.config.model_dim), segment.config.dtype)
    moe: MoE = make_moe(config, roles, like, segment.config.activation, serving.shapes[segment.name])
    moe = dataclasses.replace(moe, router=RealTokens(moe.router))
    if serving.quantize == "int8":
        moe = Int8MoE(**{field.name: getattr(moe, field.name) for field in dataclasses.fields(moe)})

    def layer(x, real, gate, bank, tables):
        index = jnp.where(real, jnp.arange(tokens, dtype=jnp.int32), -1)
        if way:
            return few_tokens.run_layer(moe, way, x, index, gate, bank, tables)
        x = jnp.pad(x, ((0, whole - tokens), (0, 0)))
        index = jnp.pad(index, (0, whole - tokens), constant_values=-1)
        y, stats, _ = moe(x, gate, RouterInputs(None, index, tables), bank, {})
        return y[:tokens], stats.choices

    return layer


_LOG = logging.getLogger(__name__)


def settle_transport(config: MoEConfig, roles: Roles, tokens: int, row_bytes: int) -> MoEConfig:
    """Return the config with another transport than 'auto'; every other one stays.

    A UserError for 'auto' without a cluster file, or with one that lacks a latency, step or bandwidth.

    Args:
      tokens: of an MP group; row_bytes: of one row of M elements.
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
    cluster = read_cluster(config.cluster).sized(None, near)
    sent = -(-tokens // roles.size(roles.model)) * config.top_k * row_bytes * shards
    seconds = all_to_all_seconds(cluster, devices, slicing, shards, sent)
    if config.schedule not in ("s1", "s2"):  # which have it
        seconds.pop("coordinated", None)
    chosen = min(seconds, key=seconds.__getitem__)
    listed = ", ".join(f"{kind} {value:.3g} s" for kind, value in seconds.items())
    _LOG.warning("transport 'auto' is %r for %d tokens of a group: %s", chosen, tokens, listed)
    return dataclasses.replace(config, transport=chosen)
