"""The compiled programs of generation: prompts in one pass, then one token of every sequence at a time; and scores.

Inputs: parameters, tables, prompts or a `State`. Outputs: the next `State`, and of the token that was chosen its id,
its logits and the experts that the tokens before it took. One `shard_map` encloses a program, collectives and choice of
the token included. A program is compiled for sizes that are rounded up, so that few of them serve all requests.
Letters: docs/notation.md; B sequences of all data-parallel devices, rows that only fill a batch included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.collectives.replicated import join_parts, own_part
from moe_jax.dispatch.route import record
from moe_jax.inference.cache import cache_specs
from moe_jax.inference.few_tokens import on_cpu
from moe_jax.inference.forward import logits_of, make_forward, whole_tokens
from moe_jax.inference.sampling import choose_tokens
from moe_jax.models import LanguageModel
from moe_jax.models.cross_entropy import chunked_cross_entropy
from moe_jax.models.segments import joined
from moe_jax.placement import PlanShape

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


def _chosen_specs(model: LanguageModel) -> Chosen:
    roles = model.roles
    choices = P(None, roles.dense + roles.model)
    return Chosen(P(), P(roles.dense), {segment.name: choices for segment in model.expert_segments})


def tables_specs(model: LanguageModel):
    """Return the PartitionSpec of the tables; of several segments with experts {segment: that}."""
    return joined({segment.name: P(model.roles_of(segment).expert) for segment in model.expert_segments})


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
        state = State(cache, state.ids, state.positions, state.live, state.left, state.keys)
        return next_token(state, x[:, 0], table, choices, knobs)

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
        flat = (array.reshape((rows * length,) + array.shape[2:]) for array in (x, targets, real))
        x, targets, real = (own_part(array, roles.model) for array in _padded(flat, roles.size(roles.model)))
        weights = real.astype(x.dtype)
        total = chunked_cross_entropy((x,), table, (targets,), (weights,), model.config.loss_chunk)
        return lax.psum(total, roles.all)

    specs = P(roles.dense)
    in_specs = parameters.specs, tables_specs(model), specs, specs, specs
    return jax.jit(jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=P()))


def _padded(arrays, parts: int):
    """Yield arrays [t, ...] as [t', ...], t' a multiple of `parts`; what is added is zero."""
    for array in arrays:
        spare = whole_tokens(array.shape[0], parts) - array.shape[0]
        yield jnp.pad(array, ((0, spare),) + ((0, 0),) * (array.ndim - 1))


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
        after = State(
            cache=state.cache,
            ids=jnp.where(live, ids, state.ids),
            positions=jnp.where(live, positions, state.positions),
            live=live,
            left=left,
            keys=state.keys,
        )
        return after, Chosen(said, logits, choices)

    return next_token


def _compiled(model: LanguageModel, body: Callable, in_specs: tuple, donate: tuple[int, ...] = ()) -> Callable:
    out_specs = state_specs(model), _chosen_specs(model)
    sharded = jax.shard_map(body, mesh=model.roles.mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(sharded, donate_argnums=donate)


def by_sequence(choices, parts: int, rows: int, length: int):
    """Return one segment's choices [L, B', K] as [L, B, Sq, K], NumPy arrays.

    Args:
      parts: data-parallel devices; rows: b; length: Sq.
    """
    layers, _, top_k = choices.shape
    own = choices.reshape(layers, parts, -1, top_k)[:, :, : rows * length]
    return own.reshape(layers, parts * rows, length, top_k)
