"""Shared experts: a dense FFN on every token of an MoE layer, beside its routed experts.

Inputs: the tokens that the gate sees, as the MP group keeps its residual stream ([b, Sq, M] or [t / N_MP, M]). Outputs:
what is added to the routed experts' result, and the factor of that result. The FFN needs nothing of the exchange, so it
can run beside it. n shared experts of hidden dim Fs are one FFN of hidden dim n Fs, without norm and biases, as the
routed ones are. Its hidden dim is split over the MP group as that of dense FFNs is: a device holds 1 / N_MP of the
weights, and the schedules that gate all tokens on each device of the group do not compute them N_MP times; the price is
the FFN's all-reduce (or, with split tokens, an all-gather and a reduce-scatter) over the group.

    residual = 'sum'       y = FFN(x) + routed(x)
    residual = 'learned'   y = c_0 FFN(x) + c_1 routed(x), c = softmax(x w_mix), w_mix [M, 2]

With one shared expert and top-1 routing the layer is DeepSpeed-MoE's residual MoE; the paper's formula is the sum, its
release learns the mix.
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
from moe_jax.models.param_dtype_gradients import in_dtype
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import apply_activation, weight_names


class SharedExperts(nnx.Module):
    """The FFN, and w_mix where the mix is learned."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs, depth: int | None = None):
        dim, hidden, dtype = config.model_dim, moe.shared_ffn_dim(config.hidden_dim), config.param_dtype

        def normal(shape, scale):
            return (scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)

        self.activation, self.learned = config.activation, moe.residual == "learned"
        for name in weight_names(config.activation)[:-1]:
            setattr(self, name, nnx.Param(normal((dim, hidden), dim**-0.5), model_dim=1, operand=True))
        scale = (2 * (depth or config.layers) * hidden) ** -0.5
        self.w_out = nnx.Param(normal((hidden, dim), scale), model_dim=0, operand=True)
        if self.learned:
            self.w_mix = nnx.Param(normal((dim, 2), dim**-0.5))

    def __call__(self, x, group: ModelGroup):
        """Return (addend of the shape of x, factor of the routed experts' result: float [..., 1], or None for 1)."""
        names = weight_names(self.activation)[:-1]
        with jax.named_scope("shared_experts"):
            weights = [in_dtype(getattr(self, name)[...], x.dtype) for name in names]
            pre = group.project(x, functools.partial(_times_each, group), *weights)
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


def _times_each(group, h, *weights):
    return [group.times("bsm,mf->bsf", h, w) for w in weights]
