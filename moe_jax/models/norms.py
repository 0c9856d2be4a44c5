"""Norms of the residual stream, of queries and keys, and of the latents of attention.

Inputs: activations of one device. Outputs: the same shape and dtype; what is summed is in at least float32.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.models.config import ModelConfig
from moe_jax.models.model_group import ModelGroup
from moe_jax.parallel.few_kernels import spread

# Norms, in at least float32. Sources: Ba et al. 2016; Zhang and Sennrich 2019; of queries and keys: Dehghani et al.
# 2023, section 2.
#     LayerNorm   y = (x - mean) / sqrt(variance + epsilon) * scale + bias
#     RMSNorm     y = x / sqrt(mean(x^2) + epsilon) * scale

# else a loop over layers saves float32 intermediates of each
recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


class Norm(nnx.Module):
    """The norm of a model's residual stream, over its M features, the last dim."""

    def __init__(self, config: ModelConfig):
        dim, dtype = config.model_dim, config.param_dtype
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.has_mean, self.epsilon = config.norm == "layer", config.norm_epsilon
        if self.has_mean:
            self.bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x):
        return _normalize(x, self.scale[...], self.bias[...] if self.has_mean else None, self.epsilon)


class HeadNorm(nnx.Module):
    """RMSNorm of queries or keys [b, Sq, H, Dh]: each head by itself, or all heads of a token together.

    The scale is [Dh], alike for all heads, or [H, Dh], of which each device of an MP group holds its heads' part.
    """

    def __init__(self, config: ModelConfig, heads: int):
        self.whole, self.epsilon = config.qk_norm == "width", config.norm_epsilon
        self.features = heads * config.head_size
        shape = (heads, config.head_size) if self.whole else (config.head_size,)
        self.scale = nnx.Param(jnp.ones(shape, config.param_dtype), model_dim=0 if self.whole else -1)

    def __call__(self, x, group: ModelGroup):
        """Return x normalised; over all heads the squares are summed over the MP group, which holds them together."""
        if not self.whole:
            return _normalize(x, self.scale[...], None, self.epsilon)

        @recomputed
        def sum_of_squares(x):  # [b, Sq, 1, 1]
            return jnp.sum(jnp.square(upcast(x)), axis=(-2, -1), keepdims=True)

        squares = sum_of_squares(x)
        squares = lax.psum(squares, group.axes) if group.axes else squares
        return recomputed(_scaled, static_argnums=3)(x, squares / self.features, self.scale[...], self.epsilon)


class LatentNorm(nnx.Module):
    """RMSNorm of a latent of attention, its last dim of so many features, with the epsilon that DeepSeek's models have.

    It is 1e-6 whatever that of the residual stream is.
    """

    def __init__(self, config: ModelConfig, features: int):
        self.scale = nnx.Param(jnp.ones((features,), config.param_dtype))

    def __call__(self, x):
        return _normalize(x, self.scale[...], None, 1e-6)


@functools.partial(recomputed, static_argnums=3)
def _normalize(x, scale, bias, epsilon):
    """Return LayerNorm, or without a bias RMSNorm, over the last dim."""
    wide = upcast(x)
    if bias is None:
        return _scaled(x, jnp.mean(jnp.square(wide), axis=-1, keepdims=True), scale, epsilon)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    normed = (wide - mean) * lax.rsqrt(variance + epsilon)
    scale, bias = spread(scale.astype(wide.dtype), wide), spread(bias.astype(wide.dtype), wide)
    return (normed * scale + bias).astype(x.dtype)


def _scaled(x, mean_square, scale, epsilon):
    wide = upcast(x)
    return (wide * lax.rsqrt(mean_square + epsilon) * spread(scale.astype(wide.dtype), wide)).astype(x.dtype)


def upcast(x):
    """Return x in at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
