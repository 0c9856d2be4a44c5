"""Moving rows inside one device: tokens into buckets, buckets into groups, rows back into tokens.

Every function here is a gather, and so is its gradient: the index of the inverse move is at hand, so no scatter-add
is needed (slow on a CPU, and not deterministic on a GPU). An index equal to the number of rows means "no row" and
reads as zeros.
Letters: t tokens, M model dim, K choices per token, R rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax.collectives.varying import match_varying
from moe_jax.dispatch.route import Grouping, Parcel


def take_rows(rows, index):
    """Return rows[index], with zeros where `index` equals the number of rows. Shapes [R, M], [n] -> [n, M]."""
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _tokens_to_rows(x, choice_of_row, row_of_choice):
    return take_rows(x, choice_of_row // row_of_choice.shape[1])


def _tokens_to_rows_fwd(x, choice_of_row, row_of_choice):
    return _tokens_to_rows(x, choice_of_row, row_of_choice), row_of_choice


def _tokens_to_rows_bwd(row_of_choice, d_rows):
    wide = jnp.promote_types(d_rows.dtype, jnp.float32)
    dx = take_rows(d_rows, row_of_choice[:, 0]).astype(wide)
    for k in range(1, row_of_choice.shape[1]):
        dx = dx + take_rows(d_rows, row_of_choice[:, k]).astype(wide)
    return dx.astype(d_rows.dtype), None, None


_tokens_to_rows.defvjp(_tokens_to_rows_fwd, _tokens_to_rows_bwd)


def tokens_to_rows(x, parcel: Parcel):
    """Copy each token into the rows of its choices: [t, M] -> [R, M]; empty rows are zero."""
    return _tokens_to_rows(*match_varying(x, parcel.choice_of_row, parcel.row_of_choice))


@jax.custom_vjp
def _rows_to_tokens(rows, weights, choice_of_row, row_of_choice):
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((), wide)
    for k in range(row_of_choice.shape[1]):
        total = total + weights[:, k, None].astype(wide) * take_rows(rows, row_of_choice[:, k]).astype(wide)
    return total.astype(rows.dtype)


def _rows_to_tokens_fwd(rows, weights, choice_of_row, row_of_choice):
    return _rows_to_tokens(rows, weights, choice_of_row, row_of_choice), (rows, weights, choice_of_row, row_of_choice)


def _rows_to_tokens_bwd(residuals, dy):
    rows, weights, choice_of_row, row_of_choice = residuals
    top_k = row_of_choice.shape[1]
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    row_weight = jnp.take(weights.reshape(-1), choice_of_row, mode="fill", fill_value=0)
    d_rows = row_weight[:, None].astype(wide) * take_rows(dy, choice_of_row // top_k).astype(wide)
    wide_dy = dy.astype(wide)
    d_weights = jnp.stack(
        [jnp.sum(wide_dy * take_rows(rows, row_of_choice[:, k]).astype(wide), axis=-1) for k in range(top_k)], axis=-1
    )
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype), None, None


_rows_to_tokens.defvjp(_rows_to_tokens_fwd, _rows_to_tokens_bwd)


def rows_to_tokens(rows, weights, parcel: Parcel):
    """Sum each token's rows, weighted: [R, M], [t, K] -> [t, M]. Choices without a row in this parcel add nothing."""
    return _rows_to_tokens(*match_varying(rows, weights, parcel.choice_of_row, parcel.row_of_choice))


@jax.custom_vjp
def _permute(rows, index, inverse):
    return take_rows(rows, index)


def _permute_fwd(rows, index, inverse):
    return take_rows(rows, index), inverse


def _permute_bwd(inverse, d_rows):
    return take_rows(d_rows, inverse), None, None


_permute.defvjp(_permute_fwd, _permute_bwd)


def rows_to_groups(rows, grouping: Grouping):
    """Bring received rows [R, M] into compact group order [R, M]; places past the last row are zero."""
    return _permute(*match_varying(rows, grouping.row_of_place, grouping.place_of_row))


def groups_to_rows(rows, grouping: Grouping):
    """Undo `rows_to_groups`: [R, M] -> [R, M]; empty rows are zero."""
    return _permute(*match_varying(rows, grouping.place_of_row, grouping.row_of_place))
