"""The compiled programs of generation: prompts in one pass, then one token of every sequence at a time; and scores.

One `shard_map` encloses a program, collectives and choice of the token included. A program is compiled for sizes that
are rounded up, so that few of them serve all requests. B sequences of all data-parallel devices, rows that only fill a
batch included; b of one device.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.inference import few_tokens
from moe_jax.inference.forward import Serving, attentions_of, make_forward, whole_tokens
from moe_jax.models import LanguageModel
from moe_jax.models.cross_entropy import chunked_cross_entropy
from moe_jax.models.model_group import in_dtype, project
from moe_jax.moe.routing import record
from moe_jax.parallel.varying import join_parts, own_part


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
        """What a program is compiled for: greedy, top_k, whether top_p cuts."""
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


def choose_tokens(logits, keys, positions, compiled: tuple[bool, int, bool], temperature, top_p):
    """Return int32 [b], the tokens that follow at `positions` int32 [b].

    Args:
      logits: float [b, V], -inf where a token may not come; keys: uint32 [b, 3] of `prompt_keys`.
      compiled: of a `Sampling`; temperature, top_p: float32 [], its own.
    """
    greedy, top_k, cuts = compiled
    if greedy:
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
    if not top_k and not cuts:
        return jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    best, token_ids = jax.lax.top_k(scaled, min(top_k or size, size))
    noisy = jnp.take_along_axis(noisy, token_ids, axis=-1)
    if cuts:
        probs = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        noisy = jnp.where(before < top_p.astype(probs.dtype), noisy, -jnp.inf)
    picked = jnp.argmax(noisy, axis=-1)[:, None]
    return jnp.take_along_axis(token_ids, picked, axis=-1)[:, 0].astype(jnp.int32)


LEAST_LENGTH = 16  # of a prompt or cache: shorter ones share a program


@record
class State:
    """Of B sequences between two tokens, and before the first.

    Attributes:
      cache: of all tokens but those in `ids`; None before the first.
      ids: int32 [B, Sq], the last token of each, or padded prompts before the first.
      positions: int32 [B], where the last one stands.
      live: bool [B], whether another token is to come; left: int32 [B], how many at most.
      keys: uint32 [B, 3], of `prompt_keys`.
    """

    cache: dict | None
    ids: jax.Array
    positions: jax.Array
    live: jax.Array
    left: jax.Array
    keys: jax.Array


def bucket(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least both."""
    return 1 << (max(number, least) - 1).bit_length()


def state_specs(model: LanguageModel) -> State:
    """Return the PartitionSpec of every array of a `State` with a cache."""
    rows, held = P(model.roles.dense), P(None, model.roles.dense, model.roles.model or None)
    cache = {own.name: {name: (held, held) for name in attentions_of(own)} for own in model.segments}
    return State(cache, rows, rows, rows, rows, rows)


def make_step(serving: Serving, rows: int, length: int, held: int, compiled: tuple) -> Callable:
    """Return step(params, tables, State, knobs) -> (State, chosen), compiled lazily; a cache is donated.

    knobs are inputs that no program is compiled for: (temperature, top_p float32 [], end_ids int32 [n], -1 where
    unused). chosen is (int32 [B], the token chosen for each sequence, -1 where it had ended, equal on all devices;
    logits float [B, V], in at least float32, -inf where the vocabulary has no such token; {segment: int32 [L, B', K]},
    experts of the tokens that went in, -1 for padding, those of a device's rows after one another).

    Args:
      rows: b; length: Sq; held: of whole prompts the tokens that the cache has room for; else Sq is 1 and it is 0.
      compiled: of the `Sampling`.
    """
    model, roles = serving.model, serving.model.roles
    forward = make_forward(serving, rows, length, held)

    def body(params, tables, state, knobs):
        temperature, top_p, end_ids = knobs
        ids, last, real = state.ids, state.positions, state.live[:, None]
        positions = last[:, None]
        if held:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], ids.shape)
            real = real & (positions <= last[:, None])
            ids = jnp.where(real, ids, 0)
        x, table, cache, choices = forward(params, tables, state.cache, ids, positions, real)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0] if held else x[:, 0]
        # each device of an MP group has a part of the table [V, M]
        split = roles.model if table.shape[0] % roles.size(roles.model) == 0 else ()
        own = in_dtype(own_part(table, split), x.dtype)
        acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
        if rows == 1 and not few_tokens.on_cpu(roles):  # multiplied where it lies, without a matmul
            part = jnp.sum(x[:, None].astype(acc_dtype) * own[0][None].astype(acc_dtype), axis=-1)
        else:
            part = project("bm,vm->bv", x, own, out=acc_dtype)
        logits = join_parts(part, split, dim=1)
        with jax.named_scope("sampling"):
            known = jnp.arange(logits.shape[1], dtype=jnp.int32) < serving.vocabulary
            logits = jnp.where(known[None], logits, -jnp.inf)
            ids = choose_tokens(logits, state.keys, last + 1, compiled, temperature, top_p)
            ended = jnp.any(ids[:, None] == end_ids[None], axis=1)
            left = state.left - state.live
            live = state.live & ~ended & (left > 0)
            said = join_parts(jnp.where(state.live, ids, -1), roles.dense)
        ids, positions = jnp.where(live, ids, 0), jnp.where(live, last + 1, last)
        return State(cache, ids[:, None], positions, live, left, state.keys), (said, logits, choices)

    after = state_specs(model)
    before = dataclasses.replace(after, cache=None) if held else after
    choices = {segment.name: P(None, roles.dense + roles.model) for segment in model.expert_segments}
    in_specs = serving.specs, model.tables_specs, before, (P(), P(), P())
    out_specs = after, (P(), P(roles.dense), choices)
    sharded = jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(sharded, donate_argnums=() if held else (2,))


def make_score(serving: Serving, rows: int, length: int) -> Callable:
    """Return score(params, tables, inputs [B, Sq], targets [B, Sq], lengths [B]) -> float [], the sum of losses."""
    model, roles = serving.model, serving.model.roles
    forward = make_forward(serving, rows, length, held=length)

    def body(params, tables, inputs, targets, lengths):
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], inputs.shape)
        real = positions < lengths[:, None]
        x, table, *_ = forward(params, tables, None, inputs, positions, real)
        spare = whole_tokens(rows * length, roles.size(roles.model)) - rows * length

        def own(array):  # tokens that fill up the last device's part are zero, and not real
            flat = array.reshape((rows * length,) + array.shape[2:])
            return own_part(jnp.pad(flat, ((0, spare),) + ((0, 0),) * (flat.ndim - 1)), roles.model)

        x, targets, real = own(x), own(targets), own(real)
        weights = real.astype(x.dtype)
        total = chunked_cross_entropy((x,), table, (targets,), (weights,), model.config.loss_chunk)
        return lax.psum(total, roles.all)

    specs = P(roles.dense)
    in_specs = serving.specs, model.tables_specs, specs, specs, specs
    return jax.jit(jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=P()))
