"""The parts of a Transformer, as Flax modules: their parameters and their forward on this device's tokens.

Inputs: activations x as the MP group keeps its residual stream: [b, Sq, M], or [t / N_MP, M] where tokens are split
(see `model_group.py`). Outputs: the same shape. Modules give structure, names and initial values; they are called
inside `shard_map` on merged parameters, one unit at a time. A unit is what the layer loop scans: an MoE block, a dense
block followed by an MoE block, or, in a segment without experts, a dense block.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.models.attention import attend
from moe_jax.models.config import ModelConfig
from moe_jax.models.model_group import ModelGroup
from moe_jax.models.param_dtype_gradients import add_bias, in_dtype, project
from moe_jax.models.segments import Segment, joined, segments_of
from moe_jax.models.shared_experts import SharedExperts
from moe_jax.moe.config import MoEConfig
from moe_jax.routers import build_router


def normal(key, shape, scale, dtype):
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def as_last(vector, like):
    """Return a vector [n] with as many dims as `like` [..., n], ready to add or multiply."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


class LayerNorm(nnx.Module):
    """Layer normalisation over the last dim, in at least float32."""

    def __init__(self, dim: int, dtype):
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x):
        return _normalize(x, self.scale[...], self.bias[...])


@functools.partial(jax.checkpoint, prevent_cse=False)  # else a loop over layers saves float32 intermediates of each
def _normalize(x, scale, bias):
    upcast = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(upcast, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(upcast - mean), axis=-1, keepdims=True)
    normed = (upcast - mean) * jax.lax.rsqrt(variance + 1e-5)
    return (normed * as_last(scale.astype(upcast.dtype), upcast) + as_last(bias.astype(upcast.dtype), upcast)).astype(
        x.dtype
    )


def rotate(x, positions):
    """Rotate pairs of features by their position's angle. x [b, Sq, H, Dh], positions int32 [Sq] or [b, Sq].

    Source: RoFormer.
    """
    half = x.shape[-1] // 2
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequency = 10000.0 ** (-jnp.arange(half, dtype=acc_dtype) / half)
    positions = positions.reshape(-1, x.shape[1])
    angle = positions.astype(acc_dtype)[:, :, None, None] * frequency[None, None, None]  # [1 or b, Sq, 1, half]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(acc_dtype), x[..., half:].astype(acc_dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Pre-norm multi-head self-attention. Under MP each device holds some of the heads."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, depth: int | None = None):
        dim, heads, head_dim, dtype = config.model_dim, config.heads, config.head_dim, config.param_dtype
        self.config = config
        self.norm = LayerNorm(dim, dtype)
        self.qkv = nnx.Param(normal(rngs.params(), (dim, 3, heads, head_dim), dim**-0.5, dtype), model_dim=2)
        self.qkv_bias = nnx.Param(jnp.zeros((3, heads, head_dim), dtype), model_dim=1)
        scale = (2 * (depth or config.layers) * dim) ** -0.5
        self.out = nnx.Param(normal(rngs.params(), (heads, head_dim, dim), scale, dtype), model_dim=0)
        self.out_bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x, group: ModelGroup, positions=None, mix=None):
        """Return the residual branch, of the shape of x; `group` gathers and sums over the MP group.

        Args:
          positions: int32 [Sq] or [b, Sq], of the tokens in their sequences; None counts from 0.
          mix: (q, k, v) -> [b, Sq, H, Dh], attention to more than these tokens; None attends among them.
        """
        dtype, config = x.dtype, self.config
        with jax.named_scope("attention"):
            qkv = group.project(self.norm(x), _to_heads, in_dtype(self.qkv[...], dtype))
            qkv = add_bias(qkv, self.qkv_bias[...][:, None, None])
            q, k, v = qkv[0], qkv[1], qkv[2]
            if config.positions == "rotary":
                positions = jnp.arange(q.shape[1], dtype=jnp.int32) if positions is None else positions
                q, k = rotate(q, positions), rotate(k, positions)
            mixed = attend(q, k, v, config.kind == "gpt", config.attention) if mix is None else mix(q, k, v)
            out = group.reduce(project("bshd,hdm->bsm", mixed, in_dtype(self.out[...], dtype)))
            return add_bias(out, as_last(self.out_bias[...], out))


def _to_heads(h, w):
    """Return queries, keys and values [3, b, Sq, H, Dh] of tokens [b, Sq, M]; w [M, 3, H, Dh]."""
    return project("bsm,mchd->cbshd", h, w)


class FeedForward(nnx.Module):
    """Pre-norm dense FFN. Under MP each device holds a part of the hidden dim."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, depth: int | None = None):
        dim, hidden, dtype = config.model_dim, config.ffn_dim, config.param_dtype
        self.norm = LayerNorm(dim, dtype)
        self.w_in = nnx.Param(normal(rngs.params(), (dim, hidden), dim**-0.5, dtype), model_dim=1)
        self.in_bias = nnx.Param(jnp.zeros((hidden,), dtype), model_dim=0)
        if config.activation == "swiglu":
            self.w_gate = nnx.Param(normal(rngs.params(), (dim, hidden), dim**-0.5, dtype), model_dim=1)
        scale = (2 * (depth or config.layers) * hidden) ** -0.5
        self.w_out = nnx.Param(normal(rngs.params(), (hidden, dim), scale, dtype), model_dim=0)
        self.out_bias = nnx.Param(jnp.zeros((dim,), dtype))
        self.swiglu = config.activation == "swiglu"

    def __call__(self, x, group: ModelGroup):
        """Return the residual branch, of the shape of x; `group` gathers and sums over the MP group."""
        dtype = x.dtype
        with jax.named_scope("feed_forward"):
            weights = [self.w_in, self.w_gate] if self.swiglu else [self.w_in]
            up, *gate = group.project(self.norm(x), _times_each, *(in_dtype(w[...], dtype) for w in weights))
            up = add_bias(up, as_last(self.in_bias[...], up))
            up = jax.checkpoint(_swiglu if self.swiglu else jax.nn.gelu, prevent_cse=False)(up, *gate)
            out = group.reduce(project("bsf,fm->bsm", up, in_dtype(self.w_out[...], dtype)))
            return add_bias(out, as_last(self.out_bias[...], out))


def _swiglu(up, gate):
    return jax.nn.silu(gate) * up


def _times_each(h, *weights):
    return [project("bsm,mf->bsf", h, w) for w in weights]


class Gate(nnx.Module):
    """Norm, gate weight and what else its router keeps of one MoE layer; the experts are in the bank."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        self.norm = LayerNorm(config.model_dim, config.param_dtype)
        shape = (config.model_dim, moe.num_experts)
        self.w_gate = nnx.Param(normal(rngs.params(), shape, config.model_dim**-0.5, config.param_dtype))
        leaves = build_router(moe).leaves(config.model_dim)
        for name, shape in leaves.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape, config.param_dtype)))
        self.names = ("w_gate", *leaves)

    def router_params(self) -> dict:
        """Return what the router reads, {'w_gate': [M, E], ...}."""
        return {name: getattr(self, name)[...] for name in self.names}


class Unit(nnx.Module):
    """One turn of the layer loop: an MoE block, a dense block and an MoE block, or a dense block (moe_every 1, 2, 0).

    The loop runs `attend`, `enter_moe`, the layer (`moe/layer.py`), and adds what comes back. `depth` is the number of
    Transformer blocks of the whole model, by which initial values are scaled; None takes those of the config.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs, depth: int | None = None):
        self.has_dense, self.has_experts = config.moe_every != 1, config.moe_every != 0
        self.has_shared = self.has_experts and moe.shared_experts > 0
        if self.has_dense:
            self.dense_attention = Attention(config, rngs, depth)
            self.dense = FeedForward(config, rngs, depth)
        if self.has_experts:
            self.attention = Attention(config, rngs, depth)
            self.gate = Gate(config, moe, rngs)
        if self.has_shared:
            self.shared = SharedExperts(config, moe, rngs, depth)

    def attend(self, x, group: ModelGroup, run: Callable | None = None):
        """Run what precedes the MoE layer, or the whole unit where it has none; x keeps its shape.

        Args:
          run: (name of an attention of this unit, x) -> its residual branch, for a caller that keeps keys and values;
            None calls it.
        """
        run = run or (lambda name, x: getattr(self, name)(x, group))
        if self.has_dense:
            x = x + run("dense_attention", x)
            x = x + self.dense(x, group)
        return x + run("attention", x) if self.has_experts else x

    def enter_moe(self, x, group: ModelGroup):
        """Return (normed tokens [t, M] or [t / N_MP, M], what `add_shared` takes beside the routed experts' result)."""
        normed = self.gate.norm(x)
        beside = self.shared(normed, group) if self.has_shared else (None, None)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), (normed, beside))


class Embedding(nnx.Module):
    """Token and, if learned, position embeddings; the token table serves as the output head too."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        dtype = config.param_dtype
        self.tokens = nnx.Param(normal(rngs.params(), (vocab_size, config.model_dim), 0.02, dtype))
        if config.positions == "learned":
            self.positions = nnx.Param(normal(rngs.params(), (config.max_length, config.model_dim), 0.02, dtype))
        self.learned = config.positions == "learned"

    def __call__(self, token_ids, dtype, group: ModelGroup, positions=None):
        """Embed int32 [b, Sq]: [b, Sq, M], or this device's [t / N_MP, M] where the group splits its tokens.

        Rows are read and added as parameters and cast then, so that gradients are summed in the parameters' dtype.

        Args:
          positions: int32 [b, Sq], of the tokens in their sequences, where the group does not split them; None counts
            from 0.
        """
        length = token_ids.shape[1]
        x = self.tokens[...][group.own_tokens(token_ids)]
        if self.learned:
            table = self.positions[...]
            if positions is not None:
                return (x + table[positions]).astype(dtype)
            x = x + (table[group.positions(length)] if group.split else table[None, :length])
        return x.astype(dtype)


class Transformer(nnx.Module):
    """All parameters of a model but the experts: embedding, stacked units [U, ...], final norm.

    Where the model has several segments, units are those of each by name.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, vocab_size: int, rngs: nnx.Rngs):
        def make_units(segment: Segment):
            @nnx.split_rngs(splits=segment.units)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return Unit(segment.config, segment.moe, rngs, segment.depth)

            return make(rngs)

        self.embedding = Embedding(config, vocab_size, rngs)
        units = {segment.name: make_units(segment) for segment in segments_of(config, moe)}
        self.units = joined(units) if len(units) == 1 else nnx.Dict(units)
        self.norm = LayerNorm(config.model_dim, config.param_dtype)
