"""`quantile_bias`: choices and weights of `sigmoid_bias`; the bias is solved for after each step instead of nudged.

Inputs, outputs and state as in `sigmoid_bias.py`. A token takes expert e if score + bias exceeds its cutoff, the best
score + bias that it does not take; so it needs a bias of e above cutoff - score. If K / E of a step's tokens need less
than the new bias, e gets as many tokens as every other expert, as long as the cutoffs stay: the new bias is that
quantile, less the mean over experts, which changes no choice. It is read off a histogram of what all tokens of the
step need, between the least and the largest that there can be; inside a bin needs count as spread evenly. So the
statistic is a sum, on any mesh and over microbatches, and a step has E x quantile_bins numbers of it for each layer.
Source: Su, Optimal assignment for load balance (2026), quantile balancing; the histogram from torchtitan #4577, which
cites Kimi K3's report, section 2.3.3 and appendix D.
Letters: docs/notation.md; t tokens.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.varying import match_varying
from moe_jax.errors import UserError
from moe_jax.routers.registry import router
from moe_jax.routers.sigmoid_bias import SigmoidBias


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantileKnobs:
    """The knob of `quantile_bias`.

    Attributes:
      quantile_bins: bins of the histogram, over a range of 2 and what the biases differ by.
    """

    quantile_bins: int = 512

    def check(self):
        if self.quantile_bins < 2:
            raise UserError(f"MoEConfig.quantile_bins ({self.quantile_bins}) must be at least 2; 512 suits most runs")


@router("quantile_bias", knobs=QuantileKnobs)
class QuantileBias(SigmoidBias):
    """Choose by biased sigmoid scores; the bias is a quantile of what tokens need."""

    in_groups = False
    ignores = ("bias_rate",)

    @classmethod
    def check(cls, config):
        super().check(config)
        if config.top_k == config.num_experts:
            raise UserError(
                f"MoEConfig.top_k ({config.top_k}) must be below MoEConfig.num_experts ({config.num_experts}) with "
                "MoEConfig.router = 'quantile_bias', which looks at the best expert that a token does not take"
            )

    def measured(self, stats, scores, bias):
        cutoff = lax.top_k(scores + bias.astype(scores.dtype)[None], self.config.top_k + 1)[0][:, -1:]
        return dataclasses.replace(stats, needed=histogram(cutoff - scores, *limits(bias), self.config.quantile_bins))

    def next_state(self, state, counts, needed=None):
        bias = state["choice_bias"]
        share = self.config.top_k / self.config.num_experts
        moved = quantiles(needed, *limits(bias), share)
        return {"choice_bias": (moved - jnp.mean(moved, axis=-1, keepdims=True)).astype(bias.dtype)}


def limits(bias):
    """Return the least and the largest bias that a token can need, [...], where scores lie in (0, 1); bias [..., E]."""
    return jnp.min(bias, axis=-1) - 1, jnp.max(bias, axis=-1) + 1


def histogram(values, low, high, bins: int):
    """Return int32 [E, bins], how many of the values [t, E] of each expert lie in each bin between two numbers."""
    experts = values.shape[1]
    at = jnp.floor((values - low) / (high - low) * bins).astype(jnp.int32).clip(0, bins - 1)
    at = at + bins * jnp.arange(experts, dtype=jnp.int32)[None]
    zeros, at = match_varying(jnp.zeros((experts * bins,), jnp.int32), at)
    return zeros.at[at.reshape(-1)].add(1).reshape(experts, bins)


def quantiles(counts, low, high, share: float):
    """Return float [..., E], below which `share` of an expert's values lie.

    Args:
      counts: int32 [..., E, bins] of `histogram`; low, high: [...].
    """
    bins = counts.shape[-1]
    upto = jnp.cumsum(counts, axis=-1)
    wanted = share * upto[..., -1:].astype(low.dtype)
    at = jnp.argmax(upto >= wanted, axis=-1)[..., None]
    inside = jnp.take_along_axis(counts, at, axis=-1)
    before = jnp.take_along_axis(upto, at, axis=-1) - inside
    part = (wanted - before.astype(low.dtype)) / jnp.maximum(inside, 1).astype(low.dtype)
    places = (at.astype(low.dtype) + part)[..., 0] / bins
    return low[..., None] + places * (high - low)[..., None]
