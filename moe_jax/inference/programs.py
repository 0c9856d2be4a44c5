"""The compiled programs of generation: prompts in one pass, then one token of every sequence at a time; and scores.

One `shard_map` encloses a program, collectives and choice of the token included. The modules, the MoE layer with its
schedules and the loop over units are those of training; only attention looks at a cache, and padding goes to no expert.
B sequences of all data-parallel devices, rows that only fill a batch included; b of one device; Hkv heads of keys and
values divide H; T rows of a sequence in the cache; U units of a segment.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.cluster import cluster_named
from moe_jax.cluster.layer_seconds import transport_seconds
from moe_jax.errors import UserError
from moe_jax.inference import few_tokens
from moe_jax.inference.few_tokens import FewTokensGroup, Int8MoE
from moe_jax.models import LanguageModel
from moe_jax.models.config import Segment
from moe_jax.models.cross_entropy import chunked_cross_entropy
from moe_jax.models.model_group import ModelGroup, in_dtype, project
from moe_jax.models.transformer import abstract_transformer, add_shared, unit_graph
from moe_jax.moe import MoEConfig
from moe_jax.moe.build import make_moe
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import PADDING, RouterInputs
from moe_jax.moe.routing import local, record
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.varying import cast_varying, join_parts, own_part
from moe_jax.planning.plan_shape import PlanShape


@dataclasses.dataclass(frozen=True)
class Serving:
    """A model as it generates, and how its parameters lie."""

    # of `inference_configs`, its parameters whole on every device but for experts and MP parts (ZeRO stage 0)
    model: LanguageModel
    vocabulary: int  # ids below it may be chosen
    specs: Any  # PartitionSpecs {'dense': ..., 'bank': ...}
    shapes: dict[str, PlanShape]  # {segment: slots and candidates of its placement}
    quantize: str = "none"  # how the bank is kept, or 'int8'


def attentions_of(segment: Segment) -> tuple[str, ...]:
    """Return the names of a unit's attentions, in their order."""
    names = ("dense_attention",) if segment.config.moe_every != 1 else ()
    return (*names, "attention") if segment.has_experts else names


# {segment: {attention of its unit: (keys, values)}}, [U, b, Hkv, T, Dh] each, sequences split over the data-parallel
# devices and heads over the model-parallel ones. Of latent attention it holds latents and rotated keys of one head that
# all devices have. A token's keys stand in the row of its position, so prompts of different lengths need no shift:
# padding behind a prompt is overwritten before anything may look at it.
Cache = dict[str, dict[str, tuple[jax.Array, jax.Array]]]
UNROLL = 16  # units in a turn of a GPU's loop over single tokens, where the loop's own small kernels count


def make_forward(serving: Serving, rows: int, length: int, cache_rows: int) -> Callable:
    """Return forward(params, tables, cache, ids, positions, real) -> (x, table, new cache, {segment: choices}).

    ids, positions int32 [b, Sq], real bool [b, Sq]; x [b, Sq, M]; table [V, M] gives logits; choices int32 [L, t', K]
    of the tokens that this device owns, -1 for padding, t' the next multiple of the MP group's devices over them.

    Args:
      rows: b; length: Sq.
      cache_rows: of whole prompts, which need no cache, T of the new one; 0 where there is one token for each sequence,
        at its position.
    """
    model, config, roles = serving.model, serving.model.config, serving.model.roles
    graph = nnx.split(abstract_transformer(config, model.moe, model.vocab_size))[0]
    few = {}  # {segment: whether its layers are those of few tokens}
    for segment in model.expert_segments:
        plan, its_roles = serving.shapes[segment.name], segment.roles(model.roles)
        few[segment] = not cache_rows and few_tokens.serves(rows, segment.moe.top_k, plan, its_roles)
    in_place = any(few.values())
    group = (FewTokensGroup if in_place else ModelGroup)(roles.model, rows, False)
    loops = {}
    for segment in model.segments:
        layer = _make_layer(serving, segment, rows * length, few[segment]) if segment.has_experts else None
        loops[segment] = _make_loop(segment, layer, group, in_place)

    def store(positions, new, cached):
        """Return the cache of keys or values with new ones [U, b, Sq, Hkv, Dh]; whole prompts make one."""
        if cache_rows:
            return jnp.pad(jnp.swapaxes(new, 2, 3), ((0, 0),) * 3 + ((0, cache_rows - length), (0, 0)))
        at = slice(None), jnp.arange(rows), slice(None), positions[:, 0]
        return cached.at[at].set(jnp.swapaxes(new[:, :, 0], 0, 1))

    def forward(params, tables, cache, ids, positions, real):
        tables, dense = local(tables), params["dense"]
        whole = nnx.merge(graph, dense)
        x = whole.embedding(ids, jnp.dtype(config.dtype), group, positions)
        new_cache: Cache = {}
        all_choices = {}
        for segment, loop in loops.items():
            name = segment.name
            cached = None if cache_rows else cache[name]
            inputs = dense["units"][name], params["bank"].get(name), tables.get(name), cached
            x, new, choices = loop(x, *inputs, positions, real)
            new_cache[name] = jax.tree.map(functools.partial(store, positions), new, cached or new)
            if choices is not None:
                all_choices[name] = cast_varying(choices, roles.all)
        with jax.named_scope("logits"):
            return whole.norm(x), whole.embedding.head_table(), new_cache, all_choices

    return forward


def _make_loop(segment: Segment, layer: Callable | None, group: ModelGroup, in_place: bool) -> Callable:
    """Return loop(x, units, bank, tables, cache or None, positions, real) -> (x, new, choices [L, t', K] or None).

    Without a cache the tokens are whole prompts. new: {attention: (k, v)}, each [U, b, Sq, Hkv, Dh]; in_place: single
    tokens on a GPU, where small kernels count.
    """
    graph = unit_graph(segment)

    def loop(x, units, bank, tables, cache, positions, real):
        def body(x, inputs):
            params, here, cached = inputs
            unit, new = nnx.merge(graph, params), {}

            def mix(name, kept, among, over):
                new[name] = kept
                if cached is None:
                    return among()
                at = positions[:, 0]
                return over(cached[name], at, in_place and at.shape[0] == 1)

            mixes = {name: functools.partial(mix, name) for name in attentions_of(segment)}
            x = unit.attend(x, group, None, positions, mixes)
            if layer is None:
                return x, (new, None)
            with jax.named_scope("moe"):
                normed, shared = unit.enter_moe(x, group)
                y, choices = layer(normed, real.reshape(-1), unit.gate.router_params(), bank, here)
                y = add_shared(y, *shared)
            return x + y.reshape(x.shape), (new, choices)

        # The loop only reads the cache and hands out what is new: written inside, all of it would be copied every turn.
        x, (new, choices) = lax.scan(body, x, (units, tables, cache), unroll=UNROLL if in_place else 1)
        return x, new, choices

    return loop


def _make_layer(serving: Serving, segment: Segment, tokens: int, few: bool) -> Callable:
    """Return layer(x [t, M], real bool [t], gate, bank, tables) -> (y [t, M], choices of the tokens owned here).

    With `few` it is that of `few_tokens.py`.
    """
    roles = segment.roles(serving.model.roles)
    whole = tokens + -tokens % roles.size(roles.model)  # the devices of an MP group share them evenly
    row_bytes = segment.config.model_dim * jnp.dtype(segment.config.dtype).itemsize
    config = settle_transport(segment.moe, roles, whole, row_bytes)
    like = jax.ShapeDtypeStruct((whole, segment.config.model_dim), segment.config.dtype)
    of_training = make_moe(config, roles, like, segment.config.activation, serving.shapes[segment.name])
    moe = (Int8MoE if serving.quantize == "int8" else MoE)(**{**vars(of_training), "records": True})

    def layer(x, real, gate, bank, tables):
        index = jnp.where(real, jnp.arange(tokens, dtype=jnp.int32), PADDING)
        if few:
            y, choices = few_tokens.run_layer(moe, x, index, gate, bank, tables)
            choices = jnp.pad(choices, ((0, whole - tokens), (0, 0)), constant_values=-1)
            return y, own_part(choices, roles.model)
        x = jnp.pad(x, ((0, whole - tokens), (0, 0)))
        index = jnp.pad(index, (0, whole - tokens), constant_values=PADDING)
        y, stats, _ = moe(x, gate, RouterInputs(None, index, tables, padded=True), bank, {})
        return y[:tokens], stats.choices

    return layer


_LOG = logging.getLogger(__name__)


def settle_transport(config: MoEConfig, roles: Roles, tokens: int, row_bytes: int) -> MoEConfig:
    """Return the config with another transport than 'auto'; every other one stays.

    A UserError for 'auto' by a cluster that lacks a latency, step or bandwidth.

    Args:
      tokens: of an MP group; row_bytes: of one row of M elements.
    """
    if config.transport != "auto":
        return config
    cluster = cluster_named(config.cluster, roles.device_kind)
    shards, devices = roles.size(roles.expert_shard), roles.size(roles.expert + roles.expert_shard)
    # the part of the MP group in which the coordinated exchange has its second and third collective
    slicing = shards * roles.size(tuple(axis for axis in roles.expert if axis in roles.model))
    near = min(roles.config.devices_per_node, devices)
    if devices % near or near % slicing:
        return dataclasses.replace(config, transport="all_to_all")
    cluster = cluster.sized(None, near)
    sent = -(-tokens // roles.size(roles.model)) * config.top_k * row_bytes * shards
    seconds = transport_seconds(cluster, devices, slicing, shards, sent)
    if config.schedule not in ("s1", "s2"):  # which have it
        seconds.pop("coordinated", None)
    chosen = min(seconds, key=seconds.__getitem__)
    listed = ", ".join(f"{kind} {value:.3g} s" for kind, value in seconds.items())
    _LOG.warning("transport 'auto' is %r for %d tokens of a group: %s", chosen, tokens, listed)
    return dataclasses.replace(config, transport=chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    Attributes:
      temperature: logits are divided by it; 0 takes the most probable token (greedy).
      top_k: only the k most probable tokens may be drawn; 0 is all.
      top_p: only the fewest tokens whose probabilities sum to at least this; 1 is all. After top_k.
      seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature ({self.temperature}) must be 0 (greedy) or positive; 1 leaves logits alone")
        if self.top_k < 0:
            raise UserError(f"top_k ({self.top_k}) must be at least 0; 0 lets every token be drawn")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p ({self.top_p}) must lie above 0 and at most at 1; 1 lets every token be drawn")
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"seed ({self.seed}) must lie between 0 and {(1 << 32) - 1}")

    @property
    def compiled(self) -> tuple[bool, int, bool]:
        """What a program is compiled for: (greedy, top_k, whether top_p cuts)."""
        return (True, 0, False) if self.temperature == 0 else (False, self.top_k, self.top_p < 1)


def prompt_keys(prompts: Sequence[Sequence[int]], seed: int) -> np.ndarray:
    """Return uint32 [B, 3], from which each prompt's draws follow: seed, hash of its ids, equal ones before it."""
    seen: dict[bytes, int] = {}
    keys = []
    for prompt in prompts:
        data = np.asarray(prompt, np.int32).tobytes()
        keys.append((seed, zlib.crc32(data), seen.get(data, 0)))
        seen[data] = seen.get(data, 0) + 1
    return np.asarray(keys, np.uint32).reshape(-1, 3)


def choose_tokens(logits, keys, positions, top_k: int, temperature, top_p):
    """Return int32 [b], the tokens that follow at `positions` int32 [b].

    Args:
      logits: float [b, V], -inf where a token may not come; keys: uint32 [b, 3] of `prompt_keys`.
      top_k, temperature, top_p: as `Sampling` has them, the last two float32 []; temperature None where the most
        probable token is taken, top_p None where it cuts nothing.
    """
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    size = logits.shape[1]

    def noise(key, position):
        folded = jax.random.key(key[0])
        for value in (key[1], key[2], position.astype(jnp.uint32)):
            folded = jax.random.fold_in(folded, value)
        return jax.random.gumbel(folded, (size,), jnp.float32)

    # Noise is drawn for every token of the vocabulary and added to the scaled logits (the largest sum is a draw from
    # their softmax), so it belongs to a token whatever top-k and top-p leave, and depends neither on the mesh nor on
    # what else is generated.
    scaled = logits / temperature.astype(logits.dtype)
    noisy = scaled + jax.vmap(noise)(keys, positions).astype(logits.dtype)
    if not top_k and top_p is None:
        return jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    best, token_ids = jax.lax.top_k(scaled, min(top_k or size, size))
    noisy = jnp.take_along_axis(noisy, token_ids, axis=-1)
    if top_p is not None:
        probs = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        noisy = jnp.where(before < top_p.astype(probs.dtype), noisy, -jnp.inf)
    picked = jnp.argmax(noisy, axis=-1)[:, None]
    return jnp.take_along_axis(token_ids, picked, axis=-1)[:, 0].astype(jnp.int32)


# A program is compiled for sizes that are rounded up, so that few of them serve all requests.
LEAST_LENGTH = 16  # of a prompt or cache


@record
class State:
    """Of B sequences between two tokens, and before the first."""

    cache: Cache | None  # of all tokens but those in `ids`; None before the first
    ids: jax.Array  # int32 [B, Sq], the last token of each, or padded prompts before the first
    positions: jax.Array  # int32 [B], where the last one stands
    keys: jax.Array  # uint32 [B, 3], of `prompt_keys`


def bucket(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least both."""
    return 1 << (max(number, least) - 1).bit_length()


def state_specs(model: LanguageModel) -> State:
    """Return the PartitionSpec of every array of a `State` with a cache."""
    heads = None if model.config.kv_lora_rank else model.roles.model or None
    rows, keys = P(model.roles.dense), P(None, model.roles.dense, heads)
    cache = {segment.name: {name: (keys, keys) for name in attentions_of(segment)} for segment in model.segments}
    return State(cache, rows, rows, rows)


def make_step(
    serving: Serving, rows: int, length: int, cache_rows: int, greedy: bool, top_k: int, cuts: bool
) -> Callable:
    """Return step(params, tables, State, live, temperature, top_p) -> (State, chosen); a cache is donated.

    It is compiled lazily, for any live, bool [B], which sequences go on, and any temperature and top_p, float32 [].
    chosen is (int32 [B], the token chosen for each sequence, equal on all devices; logits float [B, V], in at least
    float32, -inf where the vocabulary has no such token; {segment: int32 [L, B', K]}, experts of the tokens that went
    in, -1 for padding and for sequences that are not live, those of a device's rows after one another).

    Args:
      rows: b; length: Sq; cache_rows: of whole prompts, T of the new cache; else Sq is 1 and it is 0.
      greedy, top_k, cuts: `Sampling.compiled`.
    """
    model, roles = serving.model, serving.model.roles
    forward = make_forward(serving, rows, length, cache_rows)

    def body(params, tables, state, live, temperature, top_p):
        ids, last, real = state.ids, state.positions, live[:, None]
        positions = last[:, None]
        if cache_rows:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], ids.shape)
            real = real & (positions <= last[:, None])
            ids = jnp.where(real, ids, 0)
        x, table, cache, choices = forward(params, tables, state.cache, ids, positions, real)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0] if cache_rows else x[:, 0]
        logits = _logits(x, table, roles)
        with jax.named_scope("sampling"):
            known = jnp.arange(logits.shape[1], dtype=jnp.int32) < serving.vocabulary
            logits = jnp.where(known[None], logits, -jnp.inf)
            scale, share = None if greedy else temperature, top_p if cuts else None
            ids = choose_tokens(logits, state.keys, last + 1, top_k, scale, share)
        state = State(cache, ids[:, None], jnp.where(live, last + 1, last), state.keys)
        return state, (join_parts(ids, roles.dense), logits, choices)

    after = state_specs(model)
    before = dataclasses.replace(after, cache=None) if cache_rows else after
    choices = {segment.name: P(None, roles.dense + roles.model) for segment in model.expert_segments}
    in_specs = serving.specs, model.tables_specs, before, P(roles.dense), P(), P()
    out_specs = after, (P(), P(roles.dense), choices)
    sharded = jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(sharded, donate_argnums=() if cache_rows else (2,))


def _logits(x, table, roles: Roles):
    """Return logits [b, V] of x [b, M] by the table [V, M], of which each device of an MP group multiplies a part."""
    split = roles.model if table.shape[0] % roles.size(roles.model) == 0 else ()
    part = in_dtype(own_part(table, split), x.dtype)
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    if x.shape[0] == 1 and not few_tokens.on_cpu(roles):  # multiplied where it lies, without a matmul
        product = jnp.sum(x[:, None].astype(acc_dtype) * part[0][None].astype(acc_dtype), axis=-1)
    else:
        product = project("bm,vm->bv", x, part, out=acc_dtype)
    return join_parts(product, split, dim=1)


def make_score(serving: Serving, rows: int, length: int) -> Callable:
    """Return score(params, tables, ids int32 [B, Sq], last int32 [B]) -> float [], the sum of losses.

    Those of the ids 1 to `last` of each sequence, given the ones before.
    """
    model, roles = serving.model, serving.model.roles
    forward = make_forward(serving, rows, length - 1, cache_rows=length - 1)

    def body(params, tables, ids, last):
        inputs, targets = ids[:, :-1], ids[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(length - 1, dtype=jnp.int32)[None], inputs.shape)
        real = positions < last[:, None]
        x, table, *_ = forward(params, tables, None, inputs, positions, real)
        spare = (0, -targets.size % roles.size(roles.model))

        def part(array):  # tokens that fill up the last device's part are zero, and not real
            flat = array.reshape((targets.size,) + array.shape[2:])
            return own_part(jnp.pad(flat, (spare,) + ((0, 0),) * (flat.ndim - 1)), roles.model)

        weights = part(real).astype(x.dtype)
        total = chunked_cross_entropy((part(x),), table, (part(targets),), (weights,), model.config.loss_chunk)
        return lax.psum(total, roles.all)

    in_specs = serving.specs, model.tables_specs, P(roles.dense), P(roles.dense)
    return jax.jit(jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=P()))
