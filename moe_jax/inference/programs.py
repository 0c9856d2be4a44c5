"""The compiled programs of generation: prompts in one pass, then one token of every sequence at a time.

One `shard_map` encloses a program, collectives and choice of the token included. The modules, the MoE layer with its
schedules and the loop over units are those of training; only attention looks at a cache, and padding goes to no expert.
B sequences of all data-parallel devices, rows that only fill a batch included; b of one device; Hkv heads of keys and
values divide H; T rows of a sequence in the cache; U units of a segment.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.models import LanguageModel
from moe_jax.models.config import Segment
from moe_jax.models.model_group import ModelGroup, in_dtype, project
from moe_jax.models.transformer import abstract_transformer, add_shared, unit_graph
from moe_jax.moe import MoEConfig
from moe_jax.moe.build import make_moe
from moe_jax.moe.experts import ACTIVATIONS, weight_names
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import PADDING, RouterInputs
from moe_jax.moe.routing import Tables, destinations, local, record
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.varying import cast_varying, join_parts, own_part


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


LEAST_RESULTS = 1 << 13  # of sums over rows of a matrix, that each core of a GPU has some
MOST_CHOICES = 64  # T K; above, reading a matrix for each choice is taken to cost more than sorting the rows


def on_cpu(roles: Roles) -> bool:
    """Say whether a mesh is of CPU devices."""
    return roles.mesh.devices.flat[0].platform == "cpu"


# For one token of every sequence, sorting rows into buckets takes longer than reading the weights. Where a
# model-parallel group has all experts, or one device does, the layer below takes its place: T tokens of an MP group.
# Every choice reads its expert's matrices, in one kernel for each weight. All tokens times the matrices of each slot
# would read experts that nobody chose, 4 times the bytes for one token of Mixtral; and one expert after the other is a
# loop, whose turns a GPU starts one by one. Where choices are more than two for each slot, most matrices would be read
# repeatedly: the general layer reads each of them once. So it does for tokens that differ between the devices of the
# experts, of which a device would read its own experts for every choice of all. On CPUs it reads the matrices in use
# anyway.
def takes_few(tokens: int, moe: MoEConfig, roles: Roles) -> bool:
    """Say whether `run_few` is the shorter way for T = `tokens` tokens."""
    others = [axis for axis in roles.expert + roles.expert_shard if axis not in roles.model]
    if on_cpu(roles) or roles.size(tuple(others)) > 1:
        return False
    return tokens * moe.top_k <= min(MOST_CHOICES, 2 * roles.most_homes(moe.num_experts))


def run_few(moe: MoE, x, index, gate: dict, bank: dict, tables: Tables):
    """Run the layer on one device; return (y [T, M], choices int32 [T, K], -1 for padding).

    Each choice of a token is multiplied by the matrices of its expert where they lie; each device does so for the
    experts that it holds, and one sum joins the results.

    Args:
      x: [T, M]; index: int32 [T], `PADDING` for padding; bank: as `multiply_choices` takes it.
    """
    roles, slots = moe.roles, tables.home_row.shape[0]
    with jax.named_scope("gate"):
        inputs = RouterInputs(token_ids=index, tables=tables, padded=True)
        choice, _ = moe.router.choose(x, gate, inputs)
    with jax.named_scope("route"):
        device, slot = destinations(tables, choice, slots)
        here = lax.axis_index(roles.expert) if roles.size(roles.expert) > 1 else 0
        is_here = choice.keep_mask & (device == here)
        weights, row = jnp.where(is_here, choice.weights, 0), tables.home_row[jnp.where(is_here, slot, 0)]
    with jax.named_scope("experts"):
        part = multiply_choices(moe.activation, x, row, weights, bank)
    with jax.named_scope("combine"):
        axes = roles.expert + roles.expert_shard
        y = lax.psum(cast_varying(part, axes), axes)
        return y.astype(x.dtype), jnp.where(inputs.real[:, None], choice.expert_ids, -1)


def multiply_choices(activation: str, tokens, row, weights, bank: dict):
    """Return the sum [T, M] of the weighted results of every token's choices, in at least float32.

    Args:
      tokens: [T, M]; row: int32 [T, K], of the bank; weights: [T, K], 0 for choices whose experts are elsewhere.
      bank: {name: [Rb, ...]}.
    """
    acc_dtype = jnp.promote_types(tokens.dtype, jnp.float32)

    def times(lhs, name):
        """Return lhs [T K, ...] times a weight of each choice, which is cast as it is read."""
        weight = jnp.take(bank[name], row.reshape(-1), axis=0, mode="clip").astype(acc_dtype)
        # no dot: its matrices would be written down before they are multiplied
        return jnp.sum(lhs.astype(acc_dtype)[:, :, None] * weight, axis=1)

    *ins, last = weight_names(activation)
    lhs = jnp.repeat(tokens, row.shape[1], axis=0)
    pre = (times(lhs, name).astype(tokens.dtype).astype(acc_dtype) for name in ins)
    results = times(ACTIVATIONS[activation](*pre).astype(tokens.dtype), last).reshape(*row.shape, -1)
    weights = weights[..., None].astype(results.dtype)
    # 0 where a weight is, also if an expert overflows on what is not its
    return jnp.sum(jnp.where(weights != 0, weights * results, 0), axis=1)


class FewTokensGroup(ModelGroup):
    """An MP group that multiplies one row by matrices in place."""

    def times(self, spec, x, weight):
        if x.shape[0] * x.shape[1] > 1:
            return super().times(spec, x, weight)
        acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
        results = weight[0].shape[x.ndim - 2 :]  # dims of x behind [b, Sq] are the first of the weight
        # a sum whose few results alone would keep few cores busy is cut into parts, a power of two of them
        parts = 1
        while parts * math.prod(results) < LEAST_RESULTS and x.size % (2 * parts) == 0:
            parts *= 2
        matrix = weight[0].reshape(parts, x.size // parts, -1).astype(acc_dtype)
        out = jnp.sum(x.reshape(parts, -1, 1).astype(acc_dtype) * matrix, axis=1)
        out = jnp.sum(lax.optimization_barrier(out) if parts > 1 else out, axis=0).astype(x.dtype).reshape(results)
        first = spec.partition("->")[2].index("b")  # dims of the result before [b, Sq]
        return jnp.expand_dims(out, (first, first + 1))


def make_forward(model: LanguageModel, rows: int, length: int, cache_rows: int) -> Callable:
    """Return forward(params, tables, cache, ids, positions, real) -> (x, table, new cache, {segment: choices}).

    ids, positions int32 [b, Sq], real bool [b, Sq]; x [b, Sq, M]; table [V, M] gives logits; choices int32 [L, t', K]
    of the tokens that this device owns, -1 for padding, t' the next multiple of the MP group's devices over them.

    Args:
      rows: b; length: Sq.
      cache_rows: of whole prompts, which need no cache, T of the new one; 0 where there is one token for each sequence,
        at its position.
    """
    config, roles = model.config, model.roles
    graph = nnx.split(abstract_transformer(config, model.moe, model.vocab_size))[0]
    few = {}  # {segment: whether its layers are those of few tokens}
    for segment in model.expert_segments:
        few[segment] = not cache_rows and takes_few(rows, segment.moe, segment.roles(model.roles))
    in_place = any(few.values())
    group = (FewTokensGroup if in_place else ModelGroup)(roles.model, rows, False)
    loops = {}
    for segment in model.segments:
        layer = _make_layer(model, segment, rows * length, few[segment]) if segment.has_experts else None
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


def _make_layer(model: LanguageModel, segment: Segment, tokens: int, few: bool) -> Callable:
    """Return layer(x [t, M], real bool [t], gate, bank, tables) -> (y [t, M], choices of the tokens owned here).

    With `few` it is that of `run_few`.
    """
    roles = segment.roles(model.roles)
    whole = tokens + -tokens % roles.size(roles.model)  # the devices of an MP group share them evenly
    like = jax.ShapeDtypeStruct((whole, segment.config.model_dim), segment.config.dtype)
    moe = dataclasses.replace(make_moe(segment.moe, roles, like, segment.config.activation), records=True)

    def layer(x, real, gate, bank, tables):
        index = jnp.where(real, jnp.arange(tokens, dtype=jnp.int32), PADDING)
        if few:
            y, choices = run_few(moe, x, index, gate, bank, tables)
            choices = jnp.pad(choices, ((0, whole - tokens), (0, 0)), constant_values=-1)
            return y, own_part(choices, roles.model)
        x = jnp.pad(x, ((0, whole - tokens), (0, 0)))
        index = jnp.pad(index, (0, whole - tokens), constant_values=PADDING)
        y, stats, _ = moe(x, gate, RouterInputs(None, index, tables, padded=True), bank, {})
        return y[:tokens], stats.choices

    return layer


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


def make_step(
    model: LanguageModel, vocabulary: int, rows: int, length: int, cache_rows: int, cuts: tuple[bool, int, bool]
) -> Callable:
    """Return step(params, tables, State, live, temperature, top_p) -> (State, chosen); a cache is donated.

    It is compiled lazily, for any live, bool [B], which sequences go on, and any temperature and top_p, float32 [].
    chosen is (int32 [B], the token chosen for each sequence, equal on all devices; logits float [B, V], in at least
    float32, -inf where the vocabulary has no such token; {segment: int32 [L, B', K]}, experts of the tokens that went
    in, -1 for padding and for sequences that are not live, those of a device's rows after one another).

    Args:
      model: of `inference_configs`, its parameters whole on every device but for experts and MP parts (ZeRO stage 0).
      vocabulary: ids below it may be chosen.
      rows: b; length: Sq; cache_rows: of whole prompts, T of the new cache; else Sq is 1 and it is 0.
      cuts: `Sampling.compiled`.
    """
    roles, (greedy, top_k, by_top_p) = model.roles, cuts
    forward = make_forward(model, rows, length, cache_rows)

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
            known = jnp.arange(logits.shape[1], dtype=jnp.int32) < vocabulary
            logits = jnp.where(known[None], logits, -jnp.inf)
            scale, share = None if greedy else temperature, top_p if by_top_p else None
            ids = choose_tokens(logits, state.keys, last + 1, top_k, scale, share)
        state = State(cache, ids[:, None], jnp.where(live, last + 1, last), state.keys)
        return state, (join_parts(ids, roles.dense), logits, choices)

    heads = None if model.config.kv_lora_rank else roles.model or None
    of_rows, of_keys = P(roles.dense), P(None, roles.dense, heads)
    cache = {segment.name: {name: (of_keys, of_keys) for name in attentions_of(segment)} for segment in model.segments}
    after = State(cache, of_rows, of_rows, of_rows)
    before = dataclasses.replace(after, cache=None) if cache_rows else after
    choices = {segment.name: P(None, roles.dense + roles.model) for segment in model.expert_segments}
    in_specs = model.layout().params, model.tables_specs, before, P(roles.dense), P(), P()
    out_specs = after, (P(), P(roles.dense), choices)
    sharded = jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(sharded, donate_argnums=() if cache_rows else (2,))


def _logits(x, table, roles: Roles):
    """Return logits [b, V] of x [b, M] by the table [V, M], of which each device of an MP group multiplies a part."""
    split = roles.model if table.shape[0] % roles.size(roles.model) == 0 else ()
    part = in_dtype(own_part(table, split), x.dtype)
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    if x.shape[0] == 1 and not on_cpu(roles):  # multiplied where it lies, without a matmul
        product = jnp.sum(x[:, None].astype(acc_dtype) * part[0][None].astype(acc_dtype), axis=-1)
    else:
        product = project("bm,vm->bv", x, part, out=acc_dtype)
    return join_parts(product, split, dim=1)
