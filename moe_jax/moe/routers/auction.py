"""An assignment of tokens to experts, the same number to each, that maximises the sum of their scores.

In a round every token without an expert bids for the one worth most to it: the price at which its second best would be
worth as much, and eps more. An expert keeps its highest bids, ties to the lowest token, and its price is the lowest of
them. Where the auction ends by itself the sum is within T eps of the best; what is left after `rounds` is filled in.
Source: Bertsekas and Castanon (1989), The Auction Algorithm for the Transportation Problem; BASE Layers (Lewis et al.
2021), section 3.1. Letters: docs/notation.md; T tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.few_kernels import first_places
from moe_jax.parallel.varying import cast_varying, varying_axes

FREE = -1  # of a token without an expert


def assign_evenly(scores, eps: float, rounds: int):
    """Return (expert of each token int32 [T], tokens placed after the auction int32 []) of scores [T, E]."""
    scores = lax.stop_gradient(scores)
    tokens, experts = scores.shape
    assert tokens % experts == 0, scores.shape
    if experts == 1:
        return jnp.zeros_like(scores[:, 0], jnp.int32), jnp.zeros_like(scores[0, 0], jnp.int32)
    each = tokens // experts
    axes = varying_axes(scores)
    empty = (jnp.full((tokens,), FREE, jnp.int32), jnp.zeros((tokens,), scores.dtype))
    owner, bids = cast_varying(empty, axes)

    def goes_on(carry):
        at, owner, _ = carry
        return (at < rounds) & jnp.any(owner == FREE)

    def turn(carry):  # a round, in which all tokens without an expert bid
        at, owner, bids = carry
        ids = jnp.arange(experts, dtype=jnp.int32)
        held = owner[:, None] == ids[None]
        lowest = jnp.min(jnp.where(held, bids[:, None], jnp.inf), axis=0)
        price = jnp.where(jnp.sum(held, axis=0) == each, lowest, 0).astype(scores.dtype)
        values, wanted = lax.top_k(scores - price[None], 2)
        bidding = owner == FREE
        offer = price[wanted[:, 0]] + (values[:, 0] - values[:, 1]) + jnp.asarray(eps, scores.dtype)
        owner, bids = jnp.where(bidding, wanted[:, 0], owner), jnp.where(bidding, offer, bids)
        return at + 1, highest(owner, bids, experts, each), bids

    _, owner, _ = lax.while_loop(goes_on, turn, (cast_varying(jnp.int32(0), axes), owner, bids))
    left = jnp.sum(owner == FREE, dtype=jnp.int32)
    owner = lax.while_loop(lambda owner: jnp.any(owner == FREE), lambda owner: fill(scores, owner, each), owner)
    return owner, left


def fill(scores, owner, each: int):
    """Return int32 [T] after every token without an expert asked for its best one with room, which takes the best."""
    experts = scores.shape[1]
    held = jnp.sum(owner[:, None] == jnp.arange(experts, dtype=jnp.int32)[None], axis=0)
    wanted = jnp.argmax(jnp.where(held[None] < each, scores, -jnp.inf), axis=1).astype(jnp.int32)
    asks = owner == FREE
    offers = jnp.where(asks, jnp.take_along_axis(scores, wanted[:, None], axis=1)[:, 0], jnp.inf)  # who has one stays
    return highest(jnp.where(asks, wanted, owner), offers, experts, each)


def highest(owner, bids, experts: int, each: int):
    """Return int32 [T]: the owner where its bid is among the `each` highest of its expert, else FREE."""
    tokens = owner.shape[0]
    order = jnp.lexsort((-bids, owner))  # stable: ties to the lowest token; FREE, -1, comes first
    by_owner = owner[order]
    start = first_places(by_owner, jnp.arange(experts, dtype=owner.dtype))
    place = jnp.arange(tokens, dtype=jnp.int32) - start[jnp.maximum(by_owner, 0)]
    owner = jnp.where(place < each, by_owner, FREE)
    return jnp.zeros((tokens,), owner.dtype).at[order].set(owner, unique_indices=True)
