"""`base`: every token one expert, every expert the same number of tokens, as good a match as there is.

w_gate holds the experts' embeddings w_e. In training the tokens of all devices are shuffled among them, by a key of the
step; each device gives T / E of the T tokens that it got to every expert such that the sum of x w_e is largest; only
scores and ids travel there. In evaluation a token takes the highest score. The output is sigmoid(x w_e) f_e(x), without
a balance loss. Source: BASE Layers (Lewis et al. 2021), sections 3.1 and 3.2.

The assignment is an auction. In a round every token without an expert bids for the one worth most to it: the price at
which its second best would be worth as much, and eps more. An expert keeps its highest bids, ties to the lowest token,
and its price is the lowest of them. Where the auction ends by itself the sum is within T eps of the best; what is left
after the rounds is filled in. Source: Bertsekas and Castanon (1989), The Auction Algorithm for the Transportation
Problem.
Letters: docs/notation.md; T tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.moe.routers.contract import Router, register
from moe_jax.moe.routers.scores import gate_logits
from moe_jax.moe.routers.statistics import statistics_of
from moe_jax.moe.routing import Choice
from moe_jax.parallel.few_kernels import first_places
from moe_jax.parallel.varying import cast_varying, varying_axes

# Least rise of a price: the assignment is within it, per token, of the best sum of scores.
AUCTION_EPS = 0.01
AUCTION_ROUNDS = 500  # at most; tokens that are left then are placed greedily, and counted
FREE = -1  # of a token without an expert


@register("base")
class Base(Router):
    """Assign tokens evenly."""

    ignores = ("routed_scale", "renormalize", "drop", "expert_groups", "kept_groups")
    by_token = False
    takes = (1, "gives every token one expert")
    draws = True

    @classmethod
    def check(cls, config):
        super().check(config)
        for name, plain in (("capacity_factor", None), ("gate_noise", 0)):
            value = getattr(config, name)
            if value != plain:
                raise UserError(
                    f"MoEConfig.{name} ({value}) must be {plain} with MoEConfig.router = 'base', which gives every "
                    "expert the same number of tokens"
                )

    def check_tokens(self, tokens):
        experts, devices, place = self.config.num_experts, 1, self.place
        if place is not None:
            devices = place.roles.size(place.roles.all if place.splits_tokens else place.roles.dense)
            tokens = place.gated(tokens)
        if tokens % experts or tokens % devices:  # each device deals its tokens out, and gives experts as many each
            raise UserError(
                f"the {tokens} tokens that a device gates must be divisible by MoEConfig.num_experts ({experts}) and "
                f"by the {devices} devices that shuffle theirs, with MoEConfig.router = 'base'; change "
                "train.batch_size or DataConfig.sequence_length"
            )

    def choose(self, x, params, inputs):
        logits = gate_logits(x, params["w_gate"], self.config.router_dtype)
        completed = None
        if inputs.noise_key is None:
            expert_ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            scores, tokens = lax.stop_gradient(logits), x.shape[0]
            if self.place is None:  # else its layer asked
                self.check_tokens(tokens)
            axes = () if self.place is None else tuple(a for a in self.place.roles.all if a in varying_axes(scores))
            # the order in which this device deals its tokens out: equal parts, one to each device
            key = jax.random.fold_in(inputs.noise_key, lax.axis_index(axes) if axes else 0)
            order = jax.random.permutation(key, jnp.arange(tokens, dtype=jnp.int32))
            rows = exchanged(scores[order], axes)
            mine, completed = assign_evenly(rows, AUCTION_EPS, AUCTION_ROUNDS)
            experts_back = exchanged(mine, axes)
            expert_ids = jnp.zeros_like(experts_back).at[order].set(experts_back, unique_indices=True)
        scores = jnp.take_along_axis(logits, expert_ids[:, None], axis=-1)
        choice = Choice(
            expert_ids=expert_ids[:, None],
            weights=jax.nn.sigmoid(scores),
            keep_mask=jnp.ones_like(expert_ids[:, None], bool),
        )
        probs, log_z = jax.nn.softmax(logits, axis=-1), jax.scipy.special.logsumexp(logits, axis=-1)
        stats = statistics_of(choice, probs, jax.nn.log_softmax(logits, axis=-1), log_z)
        return choice, dataclasses.replace(stats, completed=completed)

    def balance_loss(self, stats, tokens):
        return jnp.zeros_like(stats.entropy)


def exchanged(array, axes: tuple[str, ...]):
    """Exchange equal parts of [t, ...] among the devices of `axes`; twice is the identity."""
    return lax.all_to_all(cast_varying(array, axes), axes, 0, 0, tiled=True) if axes else array


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
