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
from moe_jax.parallel.few_kernels import rows_in_use
from moe_jax.parallel.varying import match_varying


def take_rows(rows, index):
    """Return rows[index], with zeros where `index` equals the number of rows. Shapes [R, M], [n] -> [n, M]."""
    # a mask of its own: the one that `jnp.take` makes to fill with zeros is a kernel by itself on GPUs
    owned = (index < rows.shape[0]).reshape(index.shape + (1,) * (rows.ndim - 1))
    return jnp.where(owned, jnp.take(rows, index, axis=0, mode="clip"), jnp.zeros((), rows.dtype))


def _with_gradient(there, back):
    """Return there(rows, index), whose gradient is `back` of its result's; index: a pytree of integers."""
    function = jax.custom_vjp(there)
    function.defvjp(lambda rows, index: (there(rows, index), index), lambda index, d: (back(d, index), None))
    return lambda rows, index: function(*match_varying(rows, index))


def _to_choices(x, parcel: Parcel):
    """Copy each token into the rows of its choices: [t, M] -> [R, M]; empty rows are zero."""
    return take_rows(x, parcel.choice_of_row // parcel.row_of_choice.shape[1])


def _sum_of_choices(rows, parcel: Parcel):
    """Sum each token's rows as they are: [R, M] -> [t, M], in at least float32."""
    acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
    total = take_rows(rows, parcel.row_of_choice[:, 0]).astype(acc_dtype)
    for k in range(1, parcel.row_of_choice.shape[1]):
        total = total + take_rows(rows, parcel.row_of_choice[:, k]).astype(acc_dtype)
    return total.astype(rows.dtype)


# transposes of each other: tokens [t, M] and parcel -> rows [R, M], and back
permute_tokens = _with_gradient(_to_choices, _sum_of_choices)
sum_choices = _with_gradient(_sum_of_choices, _to_choices)


@jax.custom_vjp
def _unpermute_tokens(rows, weights, parcel: Parcel):
    acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((), acc_dtype)
    for k in range(weights.shape[1]):
        of_choice = take_rows(rows, parcel.row_of_choice[:, k]).astype(acc_dtype)
        total = total + weights[:, k, None].astype(acc_dtype) * of_choice
    return total.astype(rows.dtype)


def _unpermute_tokens_bwd(residuals, dy):
    rows, weights, parcel = residuals
    acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
    row_weight = take_rows(weights.reshape(-1), parcel.choice_of_row)
    d_rows = row_weight[:, None].astype(acc_dtype) * _to_choices(dy, parcel).astype(acc_dtype)
    acc_dy, d_weights = dy.astype(acc_dtype), []
    for k in range(weights.shape[1]):
        of_choice = take_rows(rows, parcel.row_of_choice[:, k]).astype(acc_dtype)
        d_weights.append(jnp.sum(acc_dy * of_choice, axis=-1))
    return d_rows.astype(rows.dtype), jnp.stack(d_weights, axis=-1).astype(weights.dtype), None


_unpermute_tokens.defvjp(lambda *given: (_unpermute_tokens(*given), given), _unpermute_tokens_bwd)


def unpermute_tokens(rows, weights, parcel: Parcel):
    """Sum each token's rows, weighted: [R, M], [t, K] -> [t, M]. Choices without a row in this parcel add nothing."""
    return _unpermute_tokens(*match_varying(rows, weights, parcel))


def _to_places(rows, grouping: Grouping):
    """Bring received rows [R, M] into compact group order [R, M]; places past the last row are zero."""
    if grouping.row_of_place is None:
        return rows
    owned = rows_in_use(grouping.group_sizes, rows.shape[0])  # the mask is the one that experts apply
    return jnp.where(owned, jnp.take(rows, grouping.row_of_place, axis=0, mode="clip"), jnp.zeros((), rows.dtype))


def _to_rows(places, grouping: Grouping):
    """Return what stands at the place of each row [R, M], zeros in empty rows: undo `_to_places`."""
    return places if grouping.place_of_row is None else take_rows(places, grouping.place_of_row)


# transposes of each other: rows [R, M] and grouping -> places [R, M], and back
permute_rows = _with_gradient(_to_places, _to_rows)
unpermute_rows = _with_gradient(_to_rows, _to_places)
