"""The expert bank: where the parameters of all experts of all layers live, and how their gradients come home.

Enters: one array per weight, [D S, ...], sharded over the expert axis, S = L E / D slots per device. Slots belong to
experts through tables, so an expert may live anywhere and nothing is copied per layer.

A loop over layers that differentiated the whole bank would add a bank-sized gradient in every turn. So the bank enters
the loop without a gradient, and beside it goes a *sink*: zeros of the bank's shape whose value is never read, and whose
cotangent is the bank's gradient. `with_sink` makes the pair, `open_sink` cuts the sink into one small part per layer.
Letters: L MoE layers, E experts, D devices of an expert-parallel group, G groups a device holds per layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax.collectives.varying import cast_varying, varying_axes


@jax.custom_vjp
def with_sink(bank):
    """Return (bank, sink): the sink is zeros shaped like the bank, and its cotangent is the bank's gradient.

    Args:
      bank: pytree of arrays. Called outside `shard_map`; the two may then be sharded differently.
    """
    return bank, jax.tree.map(jnp.zeros_like, bank)


def _with_sink_fwd(bank):
    return with_sink(bank), None


def _with_sink_bwd(_, cotangents):
    return (cotangents[1],)


with_sink.defvjp(_with_sink_fwd, _with_sink_bwd)


@jax.custom_vjp
def _open_sink(sink, slots):
    zeros = jnp.zeros(slots.shape + sink.shape[1:], sink.dtype)
    return cast_varying(zeros, varying_axes(sink))


def _open_sink_fwd(sink, slots):
    return _open_sink(sink, slots), (slots, jnp.zeros((sink.shape[0], 0)))  # the second carries S, and no bytes


def _open_sink_bwd(residuals, d_layers):
    slots, bank_slots = residuals
    flat = d_layers.reshape((-1,) + d_layers.shape[2:])
    places = jnp.full((bank_slots.shape[0],), flat.shape[0], jnp.int32)
    index = jnp.arange(flat.shape[0], dtype=jnp.int32)
    places = places.at[slots.reshape(-1)].set(index, mode="drop", unique_indices=True)
    return jnp.take(flat, places, axis=0, mode="fill", fill_value=0), None


_open_sink.defvjp(_open_sink_fwd, _open_sink_bwd)


def open_sink(sink, slots):
    """Return the sink layer by layer: [S, ...] -> [L, G, ...], zeros whose cotangents become the bank's gradient.

    Args:
      sink: [S, ...], this device's part, inside `shard_map`.
      slots: int32 [L, G], bank slot of each group; S (out of range) in a group that holds no home expert.
    """
    slots = cast_varying(slots, varying_axes(sink))
    return _open_sink(sink, slots)
