"""The expert bank: where the parameters of all experts of all layers are stored, and how gradients return to the owner.

Inputs: one array per weight, [D Rb, ...], sharded over the expert axis, Rb = L E / D rows per device. Tables say which
expert a row belongs to, so an expert may be stored on any device and nothing is copied per layer.

A loop over layers that differentiated the whole bank would add a bank-sized gradient in every turn. So the bank enters
the loop without a gradient, and beside it goes a *grad_sink*: zeros of the bank's shape whose value is never read, and
whose cotangent is the bank's gradient. `with_grad_sink` makes the pair, `open_grad_sink` cuts the grad_sink into one
small part per layer.
Letters: docs/notation.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax.collectives.varying import cast_varying, varying_axes


@jax.custom_vjp
def with_grad_sink(bank):
    """Return (bank, grad_sink): the grad_sink is zeros shaped like the bank, and its cotangent is the bank's gradient.

    Args:
      bank: pytree of arrays. Called outside `shard_map`; the two may then be sharded differently.
    """
    return bank, jax.tree.map(jnp.zeros_like, bank)


def _with_grad_sink_fwd(bank):
    return with_grad_sink(bank), None


def _with_grad_sink_bwd(_, cotangents):
    return (cotangents[1],)


with_grad_sink.defvjp(_with_grad_sink_fwd, _with_grad_sink_bwd)


@jax.custom_vjp
def _open_grad_sink(grad_sink, rows):
    zeros = jnp.zeros(rows.shape + grad_sink.shape[1:], grad_sink.dtype)
    return cast_varying(zeros, varying_axes(grad_sink))


def _open_grad_sink_fwd(grad_sink, rows):
    return _open_grad_sink(grad_sink, rows), (rows, jnp.zeros((grad_sink.shape[0], 0)))  # Rb, and no bytes


def _open_grad_sink_bwd(residuals, d_layers):
    rows, bank_rows = residuals
    flat = d_layers.reshape((-1,) + d_layers.shape[2:])
    places = jnp.full((bank_rows.shape[0],), flat.shape[0], jnp.int32)
    index = jnp.arange(flat.shape[0], dtype=jnp.int32)
    places = places.at[rows.reshape(-1)].set(index, mode="drop", unique_indices=True)
    return jnp.take(flat, places, axis=0, mode="fill", fill_value=0), None


_open_grad_sink.defvjp(_open_grad_sink_fwd, _open_grad_sink_bwd)


def open_grad_sink(grad_sink, rows):
    """Return the grad_sink by layer: [Rb, ...] -> [L, Hs, ...], zeros whose cotangents become the bank's gradient.

    Args:
      grad_sink: [Rb, ...], this device's part, inside `shard_map`.
      rows: int32 [L, Hs], the bank row of each home slot; Rb or more (out of range) where the slot is empty.
    """
    rows = cast_varying(rows, varying_axes(grad_sink))
    return _open_grad_sink(grad_sink, rows)
