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

from moe_jax.models.attention import attend, attend_cached, rotate
from moe_jax.models.config import ModelConfig, Segment, segments_of
from moe_jax.models.latent_attention import LatentAttention
from moe_jax.models.model_group import ModelGroup, add_bias, fresh_weight, in_dtype
from moe_jax.models.norms import HeadNorm, Norm, upcast
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import apply_activation, weight_names
from moe_jax.moe.routers import build_router


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
    return apply_activation(activation, *operands).astype(pre[0].dtype)


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
