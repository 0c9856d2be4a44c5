"""Tokens with different numbers of experts: a line for each choice, and the sum of its lines for each token.

Inputs: tokens [t, M] and the token of each choice, int32 [A]. Outputs: lines [A, M], which travel as tokens with one
expert each; and back. Both ways and their gradients are gathers: lines are sorted by token, and summed turn by turn, as
many turns as the token with the most choices has.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.sorted_search import first_places
from moe_jax.collectives.varying import match_varying
from moe_jax.dispatch.permute import take_rows
from moe_jax.dispatch.route import Choice, record


@record
class Lines:
    """Which lines a token's choices became; None stands for one line per token.

    Attributes:
      token_of: int32 [A], the token of each line; tokens: int32 [t, 0], which carries t and no bytes.
    """

    token_of: jax.Array
    tokens: jax.Array


def to_lines(x, choice: Choice):
    """Return (a line for each choice [A, M], `Lines`); tokens as they are, and None, where each has one line anyway."""
    if choice.token_of is None:
        return x, None
    return lines_of_tokens(x, choice.token_of), Lines(choice.token_of, jnp.zeros((x.shape[0], 0), jnp.int32))


def from_lines(y, lines: Lines | None):
    """Undo `to_lines` for what experts made of the lines: the sum of each token's, [t, M]."""
    return y if lines is None else tokens_of_lines(y, lines.token_of, lines.tokens.shape[0])


def lines_of_tokens(x, token_of):
    """Return [A, M], the token of each choice; x [t, M], token_of int32 [A]."""
    return _lines_of_tokens(*match_varying(x, token_of))


def tokens_of_lines(lines, token_of, tokens: int):
    """Return [t, M], the sum of each token's lines [A, M]; zeros for a token without one."""
    return _tokens_of_lines(tokens, *match_varying(lines, token_of))


def _sum_lines(lines, token_of, tokens: int):
    """Sum in at least float32, in the order of the lines."""
    acc_dtype = jnp.promote_types(lines.dtype, jnp.float32)
    order = jnp.argsort(token_of, stable=True).astype(jnp.int32)
    edges = first_places(token_of[order], jnp.arange(tokens + 1, dtype=token_of.dtype))
    start, count = edges[:-1], edges[1:] - edges[:-1]

    def turn(carry):
        at, total = carry
        line = jnp.where(at < count, order[jnp.minimum(start + at, order.shape[0] - 1)], lines.shape[0])
        return at + 1, total + take_rows(lines, line).astype(acc_dtype)

    first, zeros, most = match_varying(
        jnp.int32(0), jnp.zeros((tokens, lines.shape[1]), acc_dtype), jnp.max(count), lines
    )[:3]
    _, total = lax.while_loop(lambda carry: carry[0] < most, turn, (first, zeros))
    return total.astype(lines.dtype)


@jax.custom_vjp
def _lines_of_tokens(x, token_of):
    return take_rows(x, token_of)


def _lines_of_tokens_fwd(x, token_of):
    return take_rows(x, token_of), (token_of, jnp.zeros((x.shape[0], 0), x.dtype))  # carries t and no bytes


def _lines_of_tokens_bwd(residuals, d_lines):
    token_of, like = residuals
    return _sum_lines(d_lines, token_of, like.shape[0]), None


_lines_of_tokens.defvjp(_lines_of_tokens_fwd, _lines_of_tokens_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tokens_of_lines(tokens, lines, token_of):
    return _sum_lines(lines, token_of, tokens)


def _tokens_of_lines_fwd(tokens, lines, token_of):
    return _sum_lines(lines, token_of, tokens), token_of


def _tokens_of_lines_bwd(tokens, token_of, dy):
    return take_rows(dy, token_of), None


_tokens_of_lines.defvjp(_tokens_of_lines_fwd, _tokens_of_lines_bwd)
