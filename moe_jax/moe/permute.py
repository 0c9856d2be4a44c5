"""Moving rows inside one device: tokens into buckets, buckets into groups, rows back into tokens.

Every function here is a gather, and so is its gradient: the index of the inverse move is at hand, so no scatter-add
is needed (slow on a CPU, and not deterministic on a GPU). An index equal to the number of rows means "no row" and
reads as zeros.
Letters: docs/notation.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax.moe.routing import Grouping, Parcel
from moe_jax.parallel.row_sums import rows_in_use
from moe_jax.parallel.varying import match_varying


def take_rows(rows, index):
    """Return rows[index], with zeros where `index` equals the number of rows. Shapes [R, M], [n] -> [n, M]."""
    # a mask of its own: the one that `jnp.take` makes to fill with zeros is a kernel by itself on GPUs
    owned = (index < rows.shape[0]).reshape(index.shape + (1,) * (rows.ndim - 1))
    return jnp.where(owned, jnp.take(rows, index, axis=0, mode="clip"), jnp.zeros((), rows.dtype))


@jax.custom_vjp
def _permute_tokens(x, choice_of_row, row_of_choice):
    return take_rows(x, choice_of_row // row_of_choice.shape[1])


def _permute_tokens_fwd(x, choice_of_row, row_of_choice):
    return _permute_tokens(x, choice_of_row, row_of_choice), row_of_choice


def _permute_tokens_bwd(row_of_choice, d_rows):
    return _sum_choices(d_rows, None, row_of_choice), None, None


@jax.custom_vjp
def _sum_choices(rows, choice_of_row, row_of_choice):
    del choice_of_row  # the gradient's
    acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
    total = take_rows(rows, row_of_choice[:, 0]).astype(acc_dtype)
    for k in range(1, row_of_choice.shape[1]):
        total = total + take_rows(rows, row_of_choice[:, k]).astype(acc_dtype)
    return total.astype(rows.dtype)


_permute_tokens.defvjp(_permute_tokens_fwd, _permute_tokens_bwd)
_sum_choices.defvjp(
    lambda rows, choice_of_row, row_of_choice: (
        _sum_choices(rows, choice_of_row, row_of_choice), (choice_of_row, row_of_choice)
    ),
    lambda residuals, d: (take_rows(d, residuals[0] // residuals[1].shape[1]), None, None),
)  # fmt: skip


def permute_tokens(x, parcel: Parcel):
    """Copy each token into the rows of its choices: [t, M] -> [R, M]; empty rows are zero."""
    return _permute_tokens(*match_varying(x, parcel.choice_of_row, parcel.row_of_choice))


def sum_choices(rows, parcel: Parcel):
    """Sum each token's rows as they are: [R, M] -> [t, M]; the transpose of `permute_tokens`."""
    return _sum_choices(*match_varying(rows, parcel.choice_of_row, parcel.row_of_choice))


@jax.custom_vjp
def _unpermute_tokens(rows, weights, choice_of_row, row_of_choice):
    acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((), acc_dtype)
    for k in range(row_of_choice.shape[1]):
        total = total + weights[:, k, None].astype(acc_dtype) * take_rows(rows, row_of_choice[:, k]).astype(acc_dtype)
    return total.astype(rows.dtype)


def _unpermute_tokens_fwd(rows, weights, choice_of_row, row_of_choice):
    return _unpermute_tokens(rows, weights, choice_of_row, row_of_choice), (rows, weights, choice_of_row, row_of_choice)


def _unpermute_tokens_bwd(residuals, dy):
    rows, weights, choice_of_row, row_of_choice = residuals
    top_k = row_of_choice.shape[1]
    acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
    row_weight = take_rows(weights.reshape(-1), choice_of_row)
    d_rows = row_weight[:, None].astype(acc_dtype) * take_rows(dy, choice_of_row // top_k).astype(acc_dtype)
    acc_dy = dy.astype(acc_dtype)
    d_weights = jnp.stack(
        [jnp.sum(acc_dy * take_rows(rows, row_of_choice[:, k]).astype(acc_dtype), axis=-1) for k in range(top_k)],
        axis=-1,
    )
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype), None, None


_unpermute_tokens.defvjp(_unpermute_tokens_fwd, _unpermute_tokens_bwd)


def unpermute_tokens(rows, weights, parcel: Parcel):
    """Sum each token's rows, weighted: [R, M], [t, K] -> [t, M]. Choices without a row in this parcel add nothing."""
    return _unpermute_tokens(*match_varying(rows, weights, parcel.choice_of_row, parcel.row_of_choice))


def _to_places(rows, grouping: Grouping):
    """Return the row of each place [R, M], zeros past the last row; the mask is the one that experts apply."""
    owned = rows_in_use(grouping.group_sizes, rows.shape[0])
    return jnp.where(owned, jnp.take(rows, grouping.row_of_place, axis=0, mode="clip"), jnp.zeros((), rows.dtype))


def _to_rows(places, grouping: Grouping):
    """Return what stands at the place of each row [R, M], zeros in empty rows."""
    return take_rows(places, grouping.place_of_row)


def _with_gradient(there, back):
    """Return there(rows, grouping), whose gradient is `back` of the gradient of its result."""
    function = jax.custom_vjp(there)
    function.defvjp(
        lambda rows, grouping: (there(rows, grouping), grouping), lambda grouping, d: (back(d, grouping), None)
    )
    return function


_permute_rows, _unpermute_rows = _with_gradient(_to_places, _to_rows), _with_gradient(_to_rows, _to_places)


def permute_rows(rows, grouping: Grouping):
    """Bring received rows [R, M] into compact group order [R, M]; places past the last row are zero."""
    if grouping.row_of_place is None:
        return rows
    return _permute_rows(*match_varying(rows, grouping))


def unpermute_rows(rows, grouping: Grouping):
    """Undo `permute_rows`: [R, M] -> [R, M]; empty rows are zero."""
    if grouping.place_of_row is None:
        return rows
    return _unpermute_rows(*match_varying(rows, grouping))
