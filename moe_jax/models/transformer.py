"""The parts of a Transformer, as Flax modules: their parameters and their forward on this device's tokens.

Inputs: activations x as the MP group keeps its residual stream: [b, Sq, M], or [t / N_MP, M] where tokens are split
(see `model_group.py`). Outputs: the same shape. Modules give structure, names and initial values; they are called
inside `shard_map` on merged parameters, one unit at a time. A unit is what the layer loop scans: an MoE block, a dense
block followed by an MoE block, or, in a segment without experts, a dense block. Of a parameter `model_dim` says which
dim the MP group splits, and `operand` that it is read in the compute dtype alone.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.models.attention import attend
from moe_jax.models.config import ModelConfig
from moe_jax.models.model_group import ModelGroup, add_bias, in_dtype
from moe_jax.models.residuals import named
from moe_jax.models.segments import segments_of
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import apply_activation, weight_names
from moe_jax.moe.routers import build_router
from moe_jax.parallel.row_sums import spread

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
        if self.has_mean:
            return _normalize(x, self.scale[...], self.bias[...], self.epsilon)
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

        @recomputed
        def sum_of_squares(x):  # [b, Sq, 1, 1]
            return jnp.sum(jnp.square(_upcast(x)), axis=(-2, -1), keepdims=True)

        squares = sum_of_squares(x)
        squares = lax.psum(squares, group.axes) if group.axes else squares
        return recomputed(_scaled, static_argnums=3)(x, squares / self.features, self.scale[...], self.epsilon)


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


def _scaled(x, mean_square, scale, epsilon):
    upcast = _upcast(x)
    return (upcast * lax.rsqrt(mean_square + epsilon) * spread(scale.astype(upcast.dtype), upcast)).astype(x.dtype)


def _upcast(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def normal(key, shape, scale, dtype):
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def rotate(x, positions, base: float = 10000.0, factor: float = 1.0):
    """Rotate pairs of features (i, i + Dh / 2) by position / factor * base^(-2 i / Dh). Source: RoFormer.

    Args:
      x: [b, Sq, H, Dh]; positions: int32 [Sq] or [b, Sq].
    """
    half = x.shape[-1] // 2
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequency = base ** (-jnp.arange(half, dtype=acc_dtype) / half)
    if factor != 1:
        frequency = frequency / factor
    positions = positions.reshape(-1, x.shape[1])
    angle = positions.astype(acc_dtype)[:, :, None, None] * frequency[None, None, None]  # [1 or b, Sq, 1, half]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(acc_dtype), x[..., half:].astype(acc_dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Pre-norm multi-head self-attention. Under MP each device holds some of the heads.

    One matrix `qkv` makes queries, keys and values; where keys and values have fewer heads, `q` and `kv` do.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, depth: int | None = None):
        dim, heads, head_size, dtype = config.model_dim, config.heads, config.head_size, config.param_dtype
        self.config = config
        self.norm = Norm(config)
        for name, shape in config.qkv_matrices.items():
            shape = (*shape, head_size)
            split = len(shape) - 2  # the heads
            matrix = normal(rngs.params(), (dim, *shape), dim**-0.5, dtype)
            setattr(self, name, nnx.Param(matrix, model_dim=split + 1, operand=True))
            if config.attention_bias:
                setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(shape, dtype), model_dim=split))
        if config.qk_norm != "none":
            self.q_norm = HeadNorm(config, heads)
            self.k_norm = HeadNorm(config, config.key_value_heads)
        scale = (2 * (depth or config.layers) * heads * head_size) ** -0.5
        self.out = nnx.Param(normal(rngs.params(), (heads, head_size, dim), scale, dtype), model_dim=0, operand=True)
        if config.attention_bias:
            self.out_bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x, group: ModelGroup, positions=None, mix=None, documents=None):
        """Return the residual branch, of the shape of x; `group` gathers and sums over the MP group.

        Args:
          positions: int32 [Sq] or [b, Sq], of the tokens in their sequences; None counts from 0.
          mix: (q, k, v) -> mixed values [b, Sq, H, Dh], attention to more than these tokens; None attends among them.
          documents: int32 [b, Sq], as in `Batch`; None is one document.
        """
        config, names = self.config, self.config.qkv_matrices
        with jax.named_scope("attention"):
            h = self.norm(x)
            weights = [in_dtype(getattr(self, name)[...], x.dtype) for name in names]
            specs = ["bsm,mhd->bshd" if len(shape) == 1 else "bsm,mchd->bschd" for shape in names.values()]
            parts = group.project(h, specs, weights)  # [b, Sq, H, Dh] or [b, Sq, 2 or 3, H, Dh]
            if config.attention_bias:
                biases = (getattr(self, f"{name}_bias")[...] for name in names)
                parts = [add_bias(part, bias[None, None]) for part, bias in zip(parts, biases, strict=True)]
            q, k, v = (array for part in parts for array in ((part,) if part.ndim == 4 else jnp.unstack(part, axis=2)))
            if config.qk_norm != "none":
                q, k = self.q_norm(q, group), self.k_norm(k, group)
            if config.positions == "rotary":
                positions = jnp.arange(q.shape[1], dtype=jnp.int32) if positions is None else positions
                q, k = (rotate(array, positions, config.rotary_base, config.rotary_factor) for array in (q, k))
            q, k, v = named((q, k, v), "heads")
            if mix is None:
                mixed = attend(q, k, v, config.kind == "gpt", config.attention, documents)
            else:
                mixed = mix(q, k, v)
            out = group.reduce(group.times("bshd,hdm->bsm", mixed, in_dtype(self.out[...], mixed.dtype)))
            return add_bias(out, as_last(self.out_bias[...], out)) if config.attention_bias else out


class FeedForward(nnx.Module):
    """Pre-norm dense FFN. Under MP each device holds a part of the hidden dim."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, depth: int | None = None):
        dim, hidden, dtype = config.model_dim, config.ffn_dim, config.param_dtype
        self.norm = Norm(config)
        self.w_in = nnx.Param(normal(rngs.params(), (dim, hidden), dim**-0.5, dtype), model_dim=1, operand=True)
        if config.ffn_bias:
            self.in_bias = nnx.Param(jnp.zeros((hidden,), dtype), model_dim=0)
        if config.activation == "swiglu":
            self.w_gate = nnx.Param(normal(rngs.params(), (dim, hidden), dim**-0.5, dtype), model_dim=1, operand=True)
        scale = (2 * (depth or config.layers) * hidden) ** -0.5
        self.w_out = nnx.Param(normal(rngs.params(), (hidden, dim), scale, dtype), model_dim=0, operand=True)
        if config.ffn_bias:
            self.out_bias = nnx.Param(jnp.zeros((dim,), dtype))
        self.swiglu, self.has_bias = config.activation == "swiglu", config.ffn_bias

    def __call__(self, x, group: ModelGroup):
        """Return the residual branch, of the shape of x; `group` gathers and sums over the MP group."""
        dtype = x.dtype
        with jax.named_scope("feed_forward"):
            weights = [self.w_in, self.w_gate] if self.swiglu else [self.w_in]
            h = self.norm(x)
            held = [in_dtype(w[...], dtype) for w in weights]
            up, *gate = group.project(h, ["bsm,mf->bsf"] * len(held), held)
            up = add_bias(up, as_last(self.in_bias[...], up)) if self.has_bias else up
            up = jax.checkpoint(_swiglu if self.swiglu else jax.nn.gelu, prevent_cse=False)(up, *gate)
            out = group.reduce(group.times("bsf,fm->bsm", up, in_dtype(self.w_out[...], dtype)))
            return add_bias(out, as_last(self.out_bias[...], out)) if self.has_bias else out


def _swiglu(up, gate):
    return jax.nn.silu(gate) * up


class Gate(nnx.Module):
    """Norm, gate weight and what else its router keeps of one MoE layer; the experts are in the bank."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        self.norm = Norm(config)
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

    def attend(self, x, group: ModelGroup, run: Callable | None = None, documents=None):
        """Run what precedes the MoE layer, or the whole unit where it has none; x keeps its shape.

        Args:
          run: (name of an attention of this unit, x) -> its residual branch, for a caller that keeps keys and values;
            None calls it.
          documents: int32 [b, Sq], as in `Batch`, where `run` is None; None is one document.
        """
        run = run or (lambda name, x: getattr(self, name)(x, group, documents=documents))
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
    """Token and, if learned, position embeddings, and the output head: the token table, or one of its own."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        dtype = config.param_dtype
        learned = config.positions == "learned"  # then rows are added to positions before they are cast
        self.tokens = nnx.Param(normal(rngs.params(), (vocab_size, config.model_dim), 0.02, dtype), operand=not learned)
        if learned:
            self.positions = nnx.Param(normal(rngs.params(), (config.max_length, config.model_dim), 0.02, dtype))
        if not config.tied_head:
            self.head = nnx.Param(normal(rngs.params(), (vocab_size, config.model_dim), 0.02, dtype), operand=True)
        self.learned, self.tied_head = learned, config.tied_head

    def head_table(self):
        """Return the output head [V, M]: logits are its products with the last norm's results."""
        return (self.tokens if self.tied_head else self.head)[...]

    def __call__(self, token_ids, dtype, group: ModelGroup, positions=None):
        """Embed int32 [b, Sq]: [b, Sq, M], or this device's [t / N_MP, M] where the group splits its tokens.

        Rows are read and added as parameters and cast then, so that gradients are summed in the parameters' dtype.

        Args:
          positions: int32 [b, Sq], of the tokens in their sequences or documents; None counts from 0.
        """
        rows, length = token_ids.shape
        x = self.tokens[...][group.own_flat(token_ids) if group.split else token_ids]
        if self.learned:
            table = self.positions[...]
            if positions is None and group.split:
                positions = (jnp.arange(rows * length, dtype=jnp.int32) % length).reshape(rows, length)
            if positions is None:
                x = x + table[None, :length]
            else:
                x = x + table[group.own_flat(positions) if group.split else positions]
        return x.astype(dtype)


class Transformer(nnx.Module):
    """All parameters of a model but the experts: embedding, stacked units [U, ...] by segment, final norm."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, vocab_size: int, rngs: nnx.Rngs):
        self.embedding = Embedding(config, vocab_size, rngs)
        units = {}
        for segment in segments_of(config, moe):

            @nnx.split_rngs(splits=segment.config.units)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):  # called at once
                return Unit(segment.config, segment.moe, rngs, segment.depth)  # noqa: B023

            units[segment.name] = make(rngs)
        self.units = nnx.Dict(units)
        self.norm = Norm(config)


def abstract_transformer(config: ModelConfig, moe: MoEConfig, vocab_size: int) -> Transformer:
    """Return the modules with the shapes of their parameters; nothing is computed."""
    return nnx.eval_shape(lambda: Transformer(config, moe, vocab_size, nnx.Rngs(0)))


class SharedExperts(nnx.Module):
    """A dense FFN on every token of an MoE layer, beside its routed experts, and w_mix where the mix is learned.

        residual = 'sum'       y = FFN(x) + routed(x)
        residual = 'learned'   y = c_0 FFN(x) + c_1 routed(x), c = softmax(x w_mix), w_mix [M, 2]

    n shared experts of hidden dim Fs are one FFN of hidden dim n Fs, without norm and biases, as the routed ones are.
    With one shared expert and top-1 routing the layer is DeepSpeed-MoE's residual MoE; the paper's formula is the sum,
    its release learns the mix.
    """

    # The hidden dim is split over the MP group as that of dense FFNs is, so the schedules that gate all tokens on each
    # device of the group do not compute the FFN N_MP times; the price is its all-reduce (or, with split tokens, an
    # all-gather and a reduce-scatter) over the group. The FFN needs nothing of the exchange, so it can run next to it.

    def __init__(self, config: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs, depth: int | None = None):
        dim, hidden, dtype = config.model_dim, moe.shared_ffn_dim(config.hidden_dim), config.param_dtype

        self.activation, self.learned = config.activation, moe.residual == "learned"
        for name in weight_names(config.activation)[:-1]:
            setattr(
                self, name, nnx.Param(normal(rngs.params(), (dim, hidden), dim**-0.5, dtype), model_dim=1, operand=True)
            )
        scale = (2 * (depth or config.layers) * hidden) ** -0.5
        self.w_out = nnx.Param(normal(rngs.params(), (hidden, dim), scale, dtype), model_dim=0, operand=True)
        if self.learned:
            self.w_mix = nnx.Param(normal(rngs.params(), (dim, 2), dim**-0.5, dtype))

    def __call__(self, x, group: ModelGroup):
        """Return (addend of the shape of x, factor of the routed experts' result: float [..., 1], or None for 1)."""
        names = weight_names(self.activation)[:-1]
        with jax.named_scope("shared_experts"):
            weights = [in_dtype(getattr(self, name)[...], x.dtype) for name in names]
            pre = group.project(x, ["bsm,mf->bsf"] * len(names), weights)
            hidden = jax.checkpoint(_activate, prevent_cse=False, static_argnums=0)(self.activation, *pre)
            out = group.reduce(group.times("bsf,fm->bsm", hidden, in_dtype(self.w_out[...], x.dtype)))
            if not self.learned:
                return out, None
            acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
            logits = jnp.dot(x.astype(acc_dtype), self.w_mix[...].astype(acc_dtype), precision=lax.Precision.HIGHEST)
            mix = jax.nn.softmax(logits, axis=-1)
            return _weighted(mix[..., :1], out), mix[..., 1:]


def add_shared(y, addend, factor):
    """Return what the layer computes, from the routed experts' y and what `SharedExperts` returned, or (None, None)."""
    routed = y if factor is None else _weighted(factor, y)
    return routed if addend is None else routed + addend


@functools.partial(jax.checkpoint, prevent_cse=False)  # else a loop over layers saves float32 rows of each
def _weighted(weight, rows):
    return (weight * rows.astype(weight.dtype)).astype(rows.dtype)


def _activate(activation, *pre):
    acc_dtype = jnp.promote_types(pre[0].dtype, jnp.float32)
    return apply_activation(activation, *(array.astype(acc_dtype) for array in pre)).astype(pre[0].dtype)
