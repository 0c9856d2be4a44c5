"""The compiled programs of generation: prompts in one pass, then one token of every sequence at a time; and scores.

One `shard_map` encloses a program, collectives and choice of the token included. A program is compiled for sizes that
are rounded up, so that few of them serve all requests. B sequences of all data-parallel devices, rows that only fill a
batch included.

A draw depends on the seed, the prompt, how many equal prompts precede it, and the token's position; neither on the mesh
nor on what else is generated. Noise is drawn for every token of the vocabulary and added to the scaled logits (the
largest sum is a draw from their softmax), so it belongs to a token whatever top-k and top-p leave.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.inference.few_tokens import on_cpu
from moe_jax.inference.forward import cache_specs, logits_of, make_forward, whole_tokens
from moe_jax.models import LanguageModel
from moe_jax.models.cross_entropy import chunked_cross_entropy
from moe_jax.moe.routing import record
from moe_jax.parallel.replicated import join_parts, own_part
from moe_jax.planning.plan_shape import PlanShape


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
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def compiled(self) -> tuple[bool, int, bool]:
        """What a program is compiled for: greedy, top_k, whether top_p cuts."""
        return (True, 0, False) if self.greedy else (False, self.top_k, self.top_p < 1)


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
    """Return int32 [b], the tokens that follow.

    Args:
      logits: float [b, V], -inf where a token may not come.
      keys: uint32 [b, 3] of `prompt_keys`; positions: int32 [b], of the tokens to be chosen.
      compiled: of a `Sampling`; temperature, top_p: float32 [], its own.
    """
    greedy, top_k, cuts = compiled
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits / temperature.astype(logits.dtype)
    noisy = scaled + jax.vmap(_noise, in_axes=(0, 0, None))(keys, positions, logits.shape[1:]).astype(logits.dtype)
    size = logits.shape[1]
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


def _noise(key, position, shape):
    """Return Gumbel noise of one sequence's token at one position."""
    seed, prompt, number = key
    folded = jax.random.key(seed)
    for value in (prompt, number, position.astype(jnp.uint32)):
        folded = jax.random.fold_in(folded, value)
    return jax.random.gumbel(folded, shape, jnp.float32)


LEAST_LENGTH = 16  # of a prompt or cache: shorter ones share a program


@record
class State:
    """Of B sequences between two tokens.

    Attributes:
      cache: of all tokens but the last one.
      ids: int32 [B], the last token of each; positions: int32 [B], where it stands.
      live: bool [B], whether another token is to come; left: int32 [B], how many at most.
      keys: uint32 [B, 3], of `prompt_keys`.
    """

    cache: dict
    ids: jax.Array
    positions: jax.Array
    live: jax.Array
    left: jax.Array
    keys: jax.Array


@record
class Chosen:
    """What one program call found.

    Attributes:
      ids: int32 [B], the token chosen for each sequence, -1 where it had ended; equal on all devices.
      logits: float [B, V], in at least float32, -inf where the vocabulary has no such token.
      choices: {segment: int32 [L, B', K]}, experts of the tokens that went in, -1 for padding; see `by_sequence`.
    """

    ids: jax.Array
    logits: jax.Array
    choices: dict


@record
class Knobs:
    """Inputs that no program is compiled for: temperature, top_p float32 []; end_ids int32 [n], -1 where unused."""

    temperature: jax.Array
    top_p: jax.Array
    end_ids: jax.Array


@dataclasses.dataclass(frozen=True)
class Parameters:
    """How the parameters lie, as programs are built for them.

    Attributes:
      specs: PartitionSpecs {'dense': ..., 'bank': ...}.
      shapes: {segment: `Residence.shape`}, its slots and candidates.
      quantize: how the bank is kept, 'none' or 'int8'.
      decode: how single tokens meet their experts, 'gather' or 'exchange'; see `make_forward`.
    """

    specs: Any
    shapes: dict[str, PlanShape]
    quantize: str = "none"
    decode: str = "gather"


def bucket(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least both."""
    return 1 << (max(number, least) - 1).bit_length()


def state_specs(model: LanguageModel) -> State:
    """Return the PartitionSpec of every array of a `State`."""
    rows = P(model.roles.dense)
    return State(cache_specs(model), rows, rows, rows, rows, rows)


def tables_specs(model: LanguageModel):
    """Return {segment: PartitionSpec} of the tables."""
    return {segment.name: P(model.roles_of(segment).expert) for segment in model.expert_segments}


def make_prefill(
    model: LanguageModel, parameters: Parameters, vocabulary: int, rows: int, length: int, held: int, compiled: tuple
) -> Callable:
    """Return prefill(params, tables, prompts [B, Sq], lengths, left, keys, Knobs) -> (State, Chosen), compiled lazily.

    Args:
      parameters: how they lie on the mesh.
      vocabulary: ids below it may be chosen.
      rows: b; length: Sq, of the padded prompts; held: T, tokens that the cache has room for.
      compiled: of the `Sampling`.
    """
    roles = model.roles
    forward = make_forward(model, rows, length, True, parameters.shapes, parameters.quantize)
    next_token = _make_next(model, vocabulary, compiled)

    def body(params, tables, prompts, lengths, left, keys, knobs):
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], prompts.shape)
        real = positions < lengths[:, None]
        x, table, cache, choices = forward(
            params["dense"], params["bank"], tables, held, jnp.where(real, prompts, 0), positions, real
        )
        last = jnp.maximum(lengths - 1, 0)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        state = State(cache, prompts[:, 0], last, left > 0, left, keys)
        return next_token(state, x, table, choices, knobs)

    specs = P(roles.dense)
    in_specs = parameters.specs, tables_specs(model), specs, specs, specs, specs, Knobs(P(), P(), P())
    return _compiled(model, body, in_specs)


def make_decode(model: LanguageModel, parameters: Parameters, vocabulary: int, rows: int, compiled: tuple) -> Callable:
    """Return decode(params, tables, State, Knobs) -> (State, Chosen), compiled lazily; the state is donated.

    Args:
      as for `make_prefill`.
    """
    forward = make_forward(model, rows, 1, False, parameters.shapes, parameters.quantize, parameters.decode)
    next_token = _make_next(model, vocabulary, compiled)

    def body(params, tables, state, knobs):
        x, table, cache, choices = forward(
            params["dense"], params["bank"], tables, state.cache, state.ids[:, None], state.positions[:, None],
            state.live[:, None],
        )  # fmt: skip
        return next_token(dataclasses.replace(state, cache=cache), x[:, 0], table, choices, knobs)

    in_specs = parameters.specs, tables_specs(model), state_specs(model), Knobs(P(), P(), P())
    return _compiled(model, body, in_specs, donate=(2,))


def make_score(model: LanguageModel, parameters: Parameters, rows: int, length: int) -> Callable:
    """Return score(params, tables, inputs [B, Sq], targets [B, Sq], lengths [B]) -> float [], the sum of token losses.

    Args:
      as for `make_prefill`; no token is chosen and no cache is kept.
    """
    roles = model.roles
    forward = make_forward(model, rows, length, True, parameters.shapes, parameters.quantize)

    def body(params, tables, inputs, targets, lengths):
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], inputs.shape)
        real = positions < lengths[:, None]
        x, table, *_ = forward(params["dense"], params["bank"], tables, length, inputs, positions, real)
        spare = whole_tokens(rows * length, roles.size(roles.model)) - rows * length

        def own(array):  # tokens that fill up the last device's part are zero, and not real
            flat = array.reshape((rows * length,) + array.shape[2:])
            return own_part(jnp.pad(flat, ((0, spare),) + ((0, 0),) * (flat.ndim - 1)), roles.model)

        x, targets, real = own(x), own(targets), own(real)
        weights = real.astype(x.dtype)
        total = chunked_cross_entropy((x,), table, (targets,), (weights,), model.config.loss_chunk)
        return lax.psum(total, roles.all)

    specs = P(roles.dense)
    in_specs = parameters.specs, tables_specs(model), specs, specs, specs
    return jax.jit(jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=P()))


def _make_next(model: LanguageModel, vocabulary: int, compiled: tuple) -> Callable:
    """Return next_token(state, x [b, M], table, choices, knobs) -> (State, Chosen)."""
    roles = model.roles

    def next_token(state: State, x, table, choices, knobs: Knobs):
        logits = logits_of(x, table, roles.model, x.shape[0] == 1 and not on_cpu(roles))
        with jax.named_scope("sampling"):
            known = jnp.arange(logits.shape[1], dtype=jnp.int32) < vocabulary
            logits = jnp.where(known[None], logits, -jnp.inf)
            positions = state.positions + 1
            ids = choose_tokens(logits, state.keys, positions, compiled, knobs.temperature, knobs.top_p)
            ended = jnp.any(ids[:, None] == knobs.end_ids[None], axis=1)
            left = state.left - state.live
            live = state.live & ~ended & (left > 0)
            said = join_parts(jnp.where(state.live, ids, -1), roles.dense)
        ids, positions = jnp.where(live, ids, state.ids), jnp.where(live, positions, state.positions)
        after = dataclasses.replace(state, ids=ids, positions=positions, live=live, left=left)
        return after, Chosen(said, logits, choices)

    return next_token


def _compiled(model: LanguageModel, body: Callable, in_specs: tuple, donate: tuple[int, ...] = ()) -> Callable:
    roles = model.roles
    choices = {segment.name: P(None, roles.dense + roles.model) for segment in model.expert_segments}
    out_specs = state_specs(model), Chosen(P(), P(roles.dense), choices)
    sharded = jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(sharded, donate_argnums=donate)


def by_sequence(choices, parts: int, rows: int, length: int):
    """Return one segment's choices [L, B', K] as [L, B, Sq, K], NumPy arrays.

    Args:
      parts: data-parallel devices; rows: b; length: Sq.
    """
    layers, _, top_k = choices.shape
    own = choices.reshape(layers, parts, -1, top_k)[:, :, : rows * length]
    return own.reshape(layers, parts * rows, length, top_k)
