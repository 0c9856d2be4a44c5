"""The parts of a Transformer, as Flax modules: their parameters and their forward on this device's tokens.

Activations x are as the MP group keeps its residual stream: [b, Sq, M], or [t / N_MP, M] where tokens are split (see
`model_group.py`). Modules give structure, names and initial values; they are called inside `shard_map` on merged
parameters, one unit at a time. Of a parameter `model_dim` says which dim the MP group splits, and `operand` that it is
read in the compute dtype alone.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moe_jax.models.attention import attend, attend_cached, rotate, yarn_magnitude
from moe_jax.models.config import ModelConfig, Segment, segments_of
from moe_jax.models.model_group import ModelGroup, add_bias, fresh_weight, in_dtype
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import ACTIVATIONS, weight_names
from moe_jax.moe.routers import build_router
from moe_jax.parallel.few_kernels import spread

# Norms, in at least float32. Sources: Ba et al. 2016; Zhang and Sennrich 2019; of queries and keys: Dehghani et al.
# 2023, section 2.
#     LayerNorm   y = (x - mean) / sqrt(variance + epsilon) * scale + bias
#     RMSNorm     y = x / sqrt(mean(x^2) + epsilon) * scale

# else a loop over layers saves float32 intermediates of each
recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


class Norm(nnx.Module):
    """The norm of a model's residual stream, over its M features, or of a latent of attention, over its own.

    Of a latent it is RMSNorm with the epsilon that DeepSeek's models have, 1e-6, whatever that of the stream is.
    """

    def __init__(self, config: ModelConfig, latent: int = 0):
        dtype, self.has_mean = config.param_dtype, config.norm == "layer" and not latent
        self.epsilon, features = 1e-6 if latent else config.norm_epsilon, latent or config.model_dim
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        if self.has_mean:
            self.bias = nnx.Param(jnp.zeros((features,), dtype))

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
        return _normalize(x, self.scale[...], None, self.epsilon, squares / self.features)


@functools.partial(recomputed, static_argnums=3)
def _normalize(x, scale, bias, epsilon, mean_square=None):
    """Return LayerNorm, or without a bias RMSNorm, over the last dim; a mean square [..., 1] may be that of more."""
    wide = upcast(x)
    if bias is None:
        if mean_square is None:
            mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * lax.rsqrt(mean_square + epsilon) * spread(scale.astype(wide.dtype), wide)).astype(x.dtype)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    normed = (wide - mean) * lax.rsqrt(variance + epsilon)
    scale, bias = spread(scale.astype(wide.dtype), wide), spread(bias.astype(wide.dtype), wide)
    return (normed * scale + bias).astype(x.dtype)


def upcast(x):
    """Return x in at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Attention(nnx.Module):
    """Pre-norm multi-head self-attention, but for that of latents. Under MP each device holds some of the heads.

    One matrix `qkv` makes queries, keys and values; where keys and values have fewer heads, `q` and `kv` do.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, depth: int):
        dim, heads, head_size, dtype = config.model_dim, config.heads, config.head_size, config.param_dtype
        self.config = config
        self.norm = Norm(config)
        for name, shape in config.qkv_matrices.items():
            shape = (*shape, head_size)
            split = len(shape) - 2  # the heads
            setattr(self, name, fresh_weight(config, rngs, (dim, *shape), dim**-0.5, split + 1))
            if config.attention_bias:
                setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(shape, dtype), model_dim=split))
        if config.qk_norm != "none":
            self.q_norm = HeadNorm(config, heads)
            self.k_norm = HeadNorm(config, config.key_value_heads)
        self.out = fresh_weight(config, rngs, (heads, head_size, dim), (2 * depth * heads * head_size) ** -0.5, 0)
        if config.attention_bias:
            self.out_bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x, group: ModelGroup, documents=None, positions=None, mix=None):
        """Return the residual branch, of the shape of x; `group` gathers and sums over the MP group.

        Args:
          documents: int32 [b, Sq], as in `Batch`; None is one document.
          positions: int32 [Sq] or [b, Sq], of the tokens in their sequences; None counts from 0.
          mix: where tokens of a cache are attended to: ((k, v) to be kept, attention among these tokens, attention to a
            cache as `attend_cached` takes it) -> mixed values [b, Sq, H, Dh]; None attends among these tokens.
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
            q, k, v = (checkpoint_name(array, "heads") for array in (q, k, v))
            among = functools.partial(attend, q, k, v, config.kind == "gpt", config.attention, documents)
            cached = functools.partial(attend_cached, (q,), (k, v), math.sqrt(config.head_size), 1)
            mixed = among() if mix is None else mix((k, v), among, cached)
            out = group.reduce(group.times("bshd,hdm->bsm", mixed, in_dtype(self.out[...], mixed.dtype)))
            return add_bias(out, self.out_bias[...]) if config.attention_bias else out


class LatentAttention(nnx.Module):
    """Pre-norm multi-head latent self-attention (MLA): keys and values of all heads are made from one small latent.

        c = norm(x w_kv)[:r]      keys k_h = (c up_h, rot(x w_kv)[r:])      values v_h = c up'_h

    The rotated part of a key is alike for all heads. Queries are made from x, or from a latent of their own. Training
    and prompts make keys and values of all heads. Single tokens attend to the cached latents and rotated parts, r + dr
    numbers of a token and layer: `up` moves to the query, and `up'` behind the mixing. Under MP each device holds some
    of the heads, and all of what makes latents, of its own tokens where these are split. r is kv_lora_rank, dr
    qk_rope_head_dim. Source: DeepSeek-V2 (2024), section 2.1; appendix C for all formulas.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, depth: int):
        dim, heads, size, dtype = config.model_dim, config.heads, config.head_size, config.param_dtype
        self.config, self.rank, self.own_size = config, config.kv_lora_rank, size - config.qk_rope_head_dim
        self.norm = Norm(config)
        sizes = {"kv_down": self.rank + config.qk_rope_head_dim}
        if config.q_lora_rank:
            sizes["q_down"], self.q_norm = config.q_lora_rank, Norm(config, config.q_lora_rank)
            self.q_up = fresh_weight(config, rngs, (config.q_lora_rank, heads, size), config.q_lora_rank**-0.5, 1)
        else:
            self.q = fresh_weight(config, rngs, (dim, heads, size), dim**-0.5, 1)
        for name, features in sizes.items():
            setattr(self, name, fresh_weight(config, rngs, (dim, features), dim**-0.5))
            if config.attention_bias:
                setattr(self, f"{name}_bias", nnx.Param(jnp.zeros((features,), dtype)))
        self.kv_norm, value = Norm(config, self.rank), config.value_size
        self.kv_up = fresh_weight(config, rngs, (self.rank, heads, self.own_size + value), self.rank**-0.5, 1)
        self.out = fresh_weight(config, rngs, (heads, value, dim), (2 * depth * heads * value) ** -0.5, 0)
        if config.attention_bias:
            self.out_bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x, group: ModelGroup, documents=None, positions=None, mix=None):
        """Return the residual branch, of the shape of x; arguments are those of `Attention`."""
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


class FeedForward(nnx.Module):
    """Dense FFN. Under MP each device holds a part of the hidden dim.

    As a block's it has a norm before it and perhaps biases; `like_expert` it has neither, and its activation is in at
    least float32.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, depth: int, hidden: int, like_expert: bool = False):
        dim, dtype = config.model_dim, config.param_dtype
        self.activation, self.like_expert = config.activation, like_expert
        self.has_bias = config.ffn_bias and not like_expert
        for name in weight_names(config.activation)[:-1]:
            setattr(self, name, fresh_weight(config, rngs, (dim, hidden), dim**-0.5, 1))
        self.w_out = fresh_weight(config, rngs, (hidden, dim), (2 * depth * hidden) ** -0.5, 0)
        if not like_expert:
            self.norm = Norm(config)
        if self.has_bias:
            self.in_bias = nnx.Param(jnp.zeros((hidden,), dtype), model_dim=0)
            self.out_bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x, group: ModelGroup):
        """Return the residual branch, of the shape of x; `group` gathers and sums over the MP group."""
        names, dtype = weight_names(self.activation)[:-1], x.dtype
        with jax.named_scope("feed_forward"):
            h = x if self.like_expert else self.norm(x)
            weights = [in_dtype(getattr(self, name)[...], dtype) for name in names]
            up, *gate = group.project(h, ["bsm,mf->bsf"] * len(names), weights)
            up = add_bias(up, self.in_bias[...]) if self.has_bias else up
            activate = jax.checkpoint(_activate, prevent_cse=False, static_argnums=(0, 1))
            hidden = activate(self.activation, self.like_expert, up, *gate)
            out = group.reduce(group.times("bsf,fm->bsm", hidden, in_dtype(self.w_out[...], dtype)))
            return add_bias(out, self.out_bias[...]) if self.has_bias else out


def _activate(activation, wide, *pre):
    operands = map(upcast, pre) if wide else pre
    return ACTIVATIONS[activation](*operands).astype(pre[0].dtype)


class SharedExperts(FeedForward):
    """A dense FFN on every token of an MoE layer, besides its routed experts, and w_mix where the mix is learned.

        residual = 'sum'       y = FFN(x) + routed(x)
        residual = 'learned'   y = c_0 FFN(x) + c_1 routed(x), c = softmax(x w_mix), w_mix [M, 2]

    n shared experts of hidden dim Fs are one FFN of hidden dim n Fs, without norm and biases, as the routed ones are.
    With one shared expert and top-1 routing the layer is DeepSpeed-MoE's residual MoE; the paper's formula is the sum,
    its release learns the mix.
    """

    # The hidden dim is split over the MP group as that of dense FFNs is, so the schedules that gate all tokens on each
    # device of the group do not compute the FFN N_MP times; the price is its all-reduce (or, with split tokens, an
    # all-gather and a reduce-scatter) over the group. The FFN needs nothing of the exchange, so it can run next to it.

    def __init__(self, config: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs, depth: int):
        super().__init__(config, rngs, depth, moe.shared_ffn_dim(config.hidden_dim), like_expert=True)
        self.learned = moe.residual == "learned"
        if self.learned:
            self.w_mix = fresh_weight(config, rngs, (config.model_dim, 2), config.model_dim**-0.5, operand=False)

    def __call__(self, x, group: ModelGroup):
        """Return (addend of the shape of x, factor of the routed experts' result: float [..., 1], or None for 1)."""
        with jax.named_scope("shared_experts"):
            out = super().__call__(x, group)
            if not self.learned:
                return out, None
            wide = upcast(x)
            logits = jnp.dot(wide, self.w_mix[...].astype(wide.dtype), precision=lax.Precision.HIGHEST)
            mix = jax.nn.softmax(logits, axis=-1)
            return _weighted(mix[..., :1], out), mix[..., 1:]


def add_shared(y, addend, factor):
    """Return what the layer computes, from the routed experts' y and what `SharedExperts` returned, or (None, None)."""
    routed = y if factor is None else _weighted(factor, y)
    return routed if addend is None else routed + addend


@functools.partial(jax.checkpoint, prevent_cse=False)  # else a loop over layers saves float32 rows of each
def _weighted(weight, rows):
    return (weight * rows.astype(weight.dtype)).astype(rows.dtype)


class Gate(nnx.Module):
    """Norm, gate weight and what else its router keeps of one MoE layer; the experts are in the bank."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        self.norm = Norm(config)
        self.w_gate = fresh_weight(
            config, rngs, (config.model_dim, moe.num_experts), config.model_dim**-0.5, operand=False
        )
        leaves = build_router(moe).leaves(config.model_dim)
        for name, shape in leaves.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape, config.param_dtype)))
        self.names = ("w_gate", *leaves)

    def router_params(self) -> dict:
        """Return what the router reads, {'w_gate': [M, E], ...}."""
        return {name: getattr(self, name)[...] for name in self.names}


class Unit(nnx.Module):
    """One turn of the layer loop: an MoE block, a dense block and an MoE block, or a dense block (moe_every 1, 2, 0).

    The loop runs `attend`, `enter_moe`, the layer (`moe/layer.py`), and adds what comes back.
    """

    def __init__(self, segment: Segment, rngs: nnx.Rngs):
        config, moe, depth = segment.config, segment.moe, segment.depth
        self.has_dense, self.has_experts = config.moe_every != 1, segment.has_experts
        self.has_shared = self.has_experts and moe.shared_experts > 0
        make_attention = LatentAttention if config.kv_lora_rank else Attention
        if self.has_dense:
            self.dense_attention = make_attention(config, rngs, depth)
            self.dense = FeedForward(config, rngs, depth, config.ffn_dim)
        if self.has_experts:
            self.attention = make_attention(config, rngs, depth)
            self.gate = Gate(config, moe, rngs)
        if self.has_shared:
            self.shared = SharedExperts(config, moe, rngs, depth)

    def attend(self, x, group: ModelGroup, documents=None, positions=None, mixes: dict | None = None):
        """Run what precedes the MoE layer, or the whole unit where it has none; x keeps its shape.

        Args:
          documents, positions: as `Attention` takes them; mixes: {name of an attention of this unit: its `mix`}.
        """
        mixes = mixes or {}
        if self.has_dense:
            x = x + self.dense_attention(x, group, documents, positions, mixes.get("dense_attention"))
            x = x + self.dense(x, group)
        if self.has_experts:
            x = x + self.attention(x, group, documents, positions, mixes.get("attention"))
        return x

    def enter_moe(self, x, group: ModelGroup):
        """Return (normed tokens [t, M] or [t / N_MP, M], what `add_shared` adds to the routed experts' result)."""
        normed = self.gate.norm(x)
        shared = self.shared(normed, group) if self.has_shared else (None, None)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), (normed, shared))


class Embedding(nnx.Module):
    """Token and, if learned, position embeddings, and the output head: the token table, or one of its own."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        table, learned = (vocab_size, config.model_dim), config.positions == "learned"
        # learned positions are added to rows before they are cast
        self.tokens = fresh_weight(config, rngs, table, 0.02, operand=not learned)
        if learned:
            self.positions = fresh_weight(config, rngs, (config.max_length, config.model_dim), 0.02, operand=False)
        if not config.tied_head:
            self.head = fresh_weight(config, rngs, table, 0.02)
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
            make = nnx.vmap(functools.partial(Unit, segment), in_axes=0, out_axes=0)
            units[segment.name] = nnx.split_rngs(splits=segment.config.units)(make)(rngs)
        self.units = nnx.Dict(units)
        self.norm = Norm(config)


# of a unit: what a target of LoRA and a count of parameters call its modules with matrices, but for the gate
MODULES = {
    "dense_attention": "attention",
    "attention": "attention",
    "dense": "feed_forward",
    "shared": "shared_experts",
}


def matrix_dims(name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the dims (in, out) of the matrices in the leaf of this name, not counting what it is stacked over.

    Of attention qkv [M, 3, H, Dh], three matrices [M, H Dh] (or q [M, H, Dh] and kv [M, 2, Hkv, Dh]; or what makes
    latents, and what is made of them), its out [H, Dh, M]; of FFNs and experts [in, out]. None of all other leaves.
    """
    found = {"qkv": ((0,), (2, 3)), "kv": ((0,), (2, 3)), "out": ((0, 1), (2,))}
    found |= dict.fromkeys(("q", "q_up", "kv_up"), ((0,), (1, 2)))
    found |= dict.fromkeys(("w_in", "w_gate", "w_out", "q_down", "kv_down"), ((0,), (1,)))
    return found.get(name)


def unit_graph(segment: Segment):
    """Return the modules of a unit without their parameters."""
    return nnx.split(nnx.eval_shape(lambda: Unit(segment, nnx.Rngs(0))))[0]


def abstract_transformer(config: ModelConfig, moe: MoEConfig, vocab_size: int) -> Transformer:
    """Return the modules with the shapes of their parameters; nothing is computed."""
    return nnx.eval_shape(lambda: Transformer(config, moe, vocab_size, nnx.Rngs(0)))
