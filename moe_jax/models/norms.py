"""Normalisation of activations, in at least float32: by mean and variance, or by the root of the mean square alone.

Inputs: activations [..., M], or queries or keys [b, Sq, H, Dh]. Outputs: the same shape and dtype.

    LayerNorm   y = (x - mean) / sqrt(variance + epsilon) * scale + bias
    RMSNorm     y = x / sqrt(mean(x^2) + epsilon) * scale

Sources: Ba et al. 2016; Zhang and Sennrich 2019; norms of queries and keys: Dehghani et al. 2023, section 2.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.collectives.row_sums import spread
from moe_jax.models.config import ModelConfig
from moe_jax.models.model_group import ModelGroup

# else a loop over layers saves float32 intermediates of each
recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


def build_norm(config: ModelConfig) -> LayerNorm | RMSNorm:
    """Return the norm of a model's residual stream, over its M features."""
    norm = RMSNorm if config.norm == "rms" else LayerNorm
    return norm(config.model_dim, config.param_dtype, config.norm_epsilon)


class LayerNorm(nnx.Module):
    """Layer normalisation over the last dim."""

    def __init__(self, dim: int, dtype, epsilon: float = 1e-5):
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), dtype))
        self.epsilon = epsilon

    def __call__(self, x):
        return _normalize(x, self.scale[...], self.bias[...], self.epsilon)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last dim."""

    def __init__(self, dim: int, dtype, epsilon: float):
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.epsilon = epsilon

    def __call__(self, x):
        return _divide_by_root(x, self.scale[...], self.epsilon)


class HeadNorm(nnx.Module):
    """RMSNorm of queries or keys [b, Sq, H, Dh]: each head by itself, or all heads of a token together.

    The scale is [Dh], alike for all heads, or [H, Dh], of which each device of an MP group holds its heads' part.
    """

    def __init__(self, config: ModelConfig, heads: int):
        self.whole, self.epsilon = config.qk_norm == "width", config.norm_epsilon
        self.features = heads * config.head_size
        if self.whole:
            self.scale = nnx.Param(jnp.ones((heads, config.head_size), config.param_dtype), model_dim=0)
        else:
            self.scale = nnx.Param(jnp.ones((config.head_size,), config.param_dtype))

    def __call__(self, x, group: ModelGroup):
        """Return x normalised; over all heads the squares are summed over the MP group, which holds them together."""
        if not self.whole:
            return _divide_by_root(x, self.scale[...], self.epsilon)
        squares = _sum_of_squares(x)
        squares = lax.psum(squares, group.axes) if group.axes else squares
        return _times_rsqrt(x, squares / self.features, self.scale[...], self.epsilon)


def as_last(vector, like):
    """Return a vector [n] with as many dims as `like` [..., n], ready to add or multiply."""
    return vector.reshape((1,) * (like.ndim - vector.ndim) + vector.shape)


@functools.partial(recomputed, static_argnums=3)
def _normalize(x, scale, bias, epsilon):
    upcast = _upcast(x)
    mean = jnp.mean(upcast, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(upcast - mean), axis=-1, keepdims=True)
    normed = (upcast - mean) * lax.rsqrt(variance + epsilon)
    scale, bias = (spread(vector.astype(upcast.dtype), upcast) for vector in (scale, bias))
    return (normed * scale + bias).astype(x.dtype)


@functools.partial(recomputed, static_argnums=2)
def _divide_by_root(x, scale, epsilon):
    mean_square = jnp.mean(jnp.square(_upcast(x)), axis=-1, keepdims=True)
    return _scaled(x, mean_square, scale, epsilon)


@functools.partial(recomputed, static_argnums=3)
def _times_rsqrt(x, mean_square, scale, epsilon):
    return _scaled(x, mean_square, scale, epsilon)


@recomputed
def _sum_of_squares(x):
    """Return [b, Sq, 1, 1] of [b, Sq, H, Dh]."""
    return jnp.sum(jnp.square(_upcast(x)), axis=(-2, -1), keepdims=True)


def _scaled(x, mean_square, scale, epsilon):
    upcast = _upcast(x)
    return (upcast * lax.rsqrt(mean_square + epsilon) * spread(scale.astype(upcast.dtype), upcast)).astype(x.dtype)


def _upcast(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
