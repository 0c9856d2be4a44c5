"""Multi-head latent attention (MLA): keys and values of all heads are made from one small latent of each token.

    c = norm(x w_kv)[:r]      keys k_h = (c up_h, rot(x w_kv)[r:])      values v_h = c up'_h

The rotated part of a key is alike for all heads. Queries are made from x, or from a latent of their own. Training and
prompts make keys and values of all heads. Single tokens attend to the cached latents and rotated parts, r + dr numbers
of a token and layer: `up` moves to the query, and `up'` behind the mixing. Under MP each device holds some of the
heads, and all of what makes latents, of its own tokens where these are split.
Source: DeepSeek-V2 (2024), section 2.1; appendix C for all formulas.
Letters: docs/notation.md; r kv_lora_rank, dr qk_rope_head_dim.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from moe_jax.models.attention import attend, attend_cached, rotate, yarn_magnitude
from moe_jax.models.config import ModelConfig
from moe_jax.models.model_group import ModelGroup, add_bias, fresh_weight, in_dtype
from moe_jax.models.norms import LatentNorm, Norm


class LatentAttention(nnx.Module):
    """Pre-norm multi-head latent self-attention; it is called as `transformer.Attention` is."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, depth: int):
        dim, heads, size, dtype = config.model_dim, config.heads, config.head_size, config.param_dtype
        self.config, self.rank, self.own_size = config, config.kv_lora_rank, size - config.qk_rope_head_dim
        self.norm = Norm(config)
        sizes = {"kv_down": self.rank + config.qk_rope_head_dim}
        if config.q_lora_rank:
            sizes["q_down"], self.q_norm = config.q_lora_rank, LatentNorm(config, config.q_lora_rank)
            self.q_up = fresh_weight(config, rngs, (config.q_lora_rank, heads, size), config.q_lora_rank**-0.5, 1)
        else:
            self.q = fresh_weight(config, rngs, (dim, heads, size), dim**-0.5, 1)
        for name, features in sizes.items():
            setattr(self, name, fresh_weight(config, rngs, (dim, features), dim**-0.5))
            if config.attention_bias:
                setattr(self, f"{name}_bias", nnx.Param(jnp.zeros((features,), dtype)))
        self.kv_norm, value = LatentNorm(config, self.rank), config.value_size
        self.kv_up = fresh_weight(config, rngs, (self.rank, heads, self.own_size + value), self.rank**-0.5, 1)
        self.out = fresh_weight(config, rngs, (heads, value, dim), (2 * depth * heads * value) ** -0.5, 0)
        if config.attention_bias:
            self.out_bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x, group: ModelGroup, documents=None, positions=None, mix=None):
        """Return the residual branch, of the shape of x; arguments are those of `transformer.Attention`."""
        config = self.config
        with jax.named_scope("attention"):
            h = self.norm(x)
            latent, k_rotary = jnp.split(self._down(h, "kv_down", group), [self.rank], axis=-1)
            latent, k_rotary = self.kv_norm(latent), group.whole(k_rotary)[:, :, None]  # [b, Sq, 1, dr]
            if config.q_lora_rank:
                q_latent = self.q_norm(self._down(h, "q_down", group))
                (q,) = group.project(q_latent, ["bsr,rhd->bshd"], [in_dtype(self.q_up[...], x.dtype)])
            else:
                (q,) = group.project(h, ["bsm,mhd->bshd"], [in_dtype(self.q[...], x.dtype)])
            q_own, q_rotary = jnp.split(q, [self.own_size], axis=-1)
            positions = jnp.arange(q.shape[1], dtype=jnp.int32) if positions is None else positions
            rotary = config.rotary_base, config.rotary_factor, config.rotary_yarn
            q_rotary, k_rotary = (rotate(array, positions, *rotary) for array in (q_rotary, k_rotary))
            factor = yarn_magnitude(config.rotary_factor, config.rotary_yarn[4]) ** 2 if config.rotary_yarn else 1.0

            def among():
                (kv,) = group.project(latent, ["bsr,rhd->bshd"], [in_dtype(self.kv_up[...], x.dtype)])
                rest = jnp.concatenate([q_own, q_rotary], axis=-1), kv, k_rotary
                q, kv, shared = (checkpoint_name(array, "heads") for array in rest)
                k, v = jnp.split(kv, [self.own_size], axis=-1)
                k = jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:3], shared.shape[3]))], axis=-1)
                return attend(q, k, v, config.kind == "gpt", config.attention, documents, factor)

            def over(cached, positions, in_place):
                k_up, v_up = jnp.split(in_dtype(self.kv_up[...], x.dtype)[0], [self.own_size], axis=-1)
                queries = jnp.einsum("bshd,rhd->bshr", q_own, k_up), q_rotary
                divisor = math.sqrt(config.head_size) / factor
                mixed = attend_cached(queries, kept, divisor, 0, cached, positions, in_place)
                return jnp.einsum("bshr,rhd->bshd", mixed, v_up)

            if mix is None:
                mixed = among()
            else:
                kept = latent[:, :, None], k_rotary
                mixed = mix(kept, among, over)
            out = group.reduce(group.times("bshd,hdm->bsm", mixed, in_dtype(self.out[...], mixed.dtype)))
            return add_bias(out, self.out_bias[...]) if config.attention_bias else out

    def _down(self, h, name: str, group: ModelGroup):
        """Return a latent of the tokens h, which are kept as the residual stream is; it is as all devices have it."""
        spec = "bsm,mr->bsr" if h.ndim == 3 else "tm,mr->tr"
        latent = group.times(spec, h, in_dtype(getattr(self, name)[...], h.dtype))
        return add_bias(latent, getattr(self, f"{name}_bias")[...]) if self.config.attention_bias else latent
