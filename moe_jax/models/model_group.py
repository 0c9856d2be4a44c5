"""How the devices of a model-parallel (MP) group share the blocks between the MoE layers. Two ways to keep tokens:

    replicated      x [b, Sq, M] on every device; one all-reduce after the second matmul of attention or FFN
    split tokens    x [t / N_MP, M], device r holds the r-th part of the group's tokens; all-gather before the first
                    matmul, reduce-scatter after the second: the same bytes, and norms, residuals and what they save
                    for the backward are held only once. Source: Korthikanti et al. 2022, section 4.2.2 ("Reducing
                    Activation Recomputation in Large Transformer Models"), sequence parallelism

Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.errors import UserError
from moe_jax.models.config import ModelConfig
from moe_jax.parallel.few_kernels import sum_rows
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import wait_for
from moe_jax.parallel.varying import match_varying, own_part


# Parameters wider than the compute dtype. For `x @ w.astype(dtype)` JAX rounds the sum over tokens that is w's gradient
# to the compute dtype before it casts it to w's dtype, and adds parts of it (chunks of tokens, devices, the tokens of a
# bias) in the compute dtype too. Here the parameter is a *grad_sink*: its value is not read, and its cotangent comes
# out of the matmul in its own dtype. Where the two dtypes are equal, every function is plain JAX.
def in_dtype(parameter, dtype) -> tuple:
    """Return a parameter [...] as an operand of a matmul in `dtype`: (its value in that, its grad_sink).

    The latter is the parameter, through which the gradient leaves; None where the value itself is the parameter.
    """
    if parameter.dtype == dtype:
        return parameter, None
    return lax.stop_gradient(parameter).astype(dtype), parameter


def fresh_weight(config: ModelConfig, rngs: nnx.Rngs, shape, scale: float, model_dim=-1, operand=True) -> nnx.Param:
    """Return a parameter of normal values times `scale`.

    Args:
      model_dim: which dim the MP group splits, or -1; operand: whether it is read in the compute dtype alone.
    """
    values = (scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(config.param_dtype)
    return nnx.Param(values, model_dim=model_dim, operand=operand)


def project(spec: str, x, weight: tuple, out=None):
    """Return einsum(spec, x, weight), in the dtype of x or in `out`; the weight's gradient has the parameter's dtype.

    Args:
      spec: 'x,weight->result', without an index that only one of the three has.
      x: float [...]; weight: from `in_dtype`.
      out: dtype of the result.
    """
    held, grad_sink = weight
    if grad_sink is None:
        return jnp.einsum(spec, x, held, preferred_element_type=out)
    wide = grad_sink.dtype

    @jax.custom_vjp
    def product(x, held, grad_sink):
        del grad_sink
        return jnp.einsum(spec, x, held, preferred_element_type=out)

    def backward(residuals, d):
        x, held = residuals
        operands, result = spec.split("->")
        of_x, of_weight = operands.split(",")
        dx = jax.vjp(lambda x: jnp.einsum(spec, x, held, preferred_element_type=out), x)[1](d)[0]
        dweight = jnp.einsum(f"{of_x},{result}->{of_weight}", x, d, preferred_element_type=wide)
        return dx, None, dweight

    product.defvjp(lambda x, held, grad_sink: (product(x, held, grad_sink), (x, held)), backward)
    return product(*match_varying(x, held, grad_sink))


def add_bias(x, bias):
    """Return x + bias in the dtype of x; the bias's gradient is summed in the bias's dtype.

    Args:
      x: float [...]; bias: float, of the last dims of x, or of as many of which those of size 1 are broadcast.
    """
    if bias.ndim < x.ndim:
        bias = bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
    if bias.dtype == x.dtype:
        return x + bias
    axes, wide = tuple(axis for axis, size in enumerate(bias.shape) if size == 1), bias.dtype

    @jax.custom_vjp
    def add(x, bias):
        return x + bias.astype(x.dtype)

    def backward(_, d):
        if axes != tuple(range(len(axes))):
            return d, jnp.sum(d, axis=axes, keepdims=True, dtype=wide)
        shape = d.shape[len(axes) :]
        return d, sum_rows(d.reshape(-1, *shape), wide).reshape((1,) * len(axes) + shape)

    add.defvjp(lambda x, bias: (add(x, bias), None), backward)
    return add(*match_varying(x, bias))


@dataclasses.dataclass(frozen=True)
class ModelGroup:
    """The MP group of one device; methods are called inside `shard_map`.

    Attributes:
      axes: mesh axes of the group, () for a group of one.
      rows: b.
      split: whether the residual stream is split over tokens.
      padded: whether some tokens are padding, such as the last sequences of the last groups, which fill up a batch.
      parts: 2 where the sequences are cut into halves; a split residual stream then holds a part of each of them.
    """

    axes: tuple[str, ...] = ()
    rows: int = 1
    split: bool = False
    parts: int = 1
    padded: bool = False

    times = staticmethod(project)  # the matmuls of attention and FFN, which `inference/programs.py` overrides

    def part(self) -> ModelGroup:
        """Return the group as it holds one of the parts."""
        return dataclasses.replace(self, rows=self.rows // self.parts, parts=1)

    def project(self, h, specs: list[str], weights: list[tuple]):
        """Return [einsum(spec, tokens [b, Sq, M], weight)], the first matmuls of attention or FFN.

        With split tokens the backward gathers them again instead of saving all t.

        Args:
          h: normed tokens as the residual stream is kept; weights: split over the group.
        """
        if not self.split:
            return [self.times(spec, h, weight) for spec, weight in zip(specs, weights, strict=True)]

        def whole(part, weights):
            tokens = self.whole(part)
            return [self.times(spec, tokens, weight) for spec, weight in zip(specs, weights, strict=True)]

        def backward(saved, d):
            part, weights = saved
            # else XLA:CPU may gather again next to a branch of collectives that the cotangent comes from
            part = wait_for(part, d)
            return jax.vjp(whole, part, weights)[1](d)

        gathered = jax.custom_vjp(whole)
        gathered.defvjp(lambda part, weights: (whole(part, weights), (part, weights)), backward)
        return gathered(h, weights)

    def whole(self, part):
        """Return [b, Sq, ...], all tokens of the group, of what is kept as the residual stream is."""
        if not self.split:
            return part
        tokens = lax.all_gather(part, self.axes, axis=0, tiled=True)
        return tokens.reshape(self.rows, -1, tokens.shape[-1])

    def reduce(self, partial):
        """Sum partial results [b, Sq, M] over the group, and return them as the residual stream is kept."""
        if not self.axes:
            return partial
        if not self.split:
            return lax.psum(partial, self.axes)
        flat = partial.reshape(-1, partial.shape[-1])
        return lax.psum_scatter(flat, self.axes, scatter_dimension=0, tiled=True)

    def own_flat(self, tokens):
        """Return [t / N_MP, ...] of [b, Sq, ...], the tokens that this device takes to the loss, in their order."""
        flat = tokens.reshape(self.parts if self.split else 1, -1, *tokens.shape[2:])
        own = own_part(flat, self.axes, dim=1)
        return own.reshape(-1, *own.shape[2:])


def rows_of(config: ModelConfig, roles: Roles, batch_size: int) -> int:
    """Return b, the sequences that an MP group holds of a microbatch of `batch_size`; an even number for two halves.

    Where all groups together hold more than the microbatch has, the last ones are padding.
    """
    parts = 2 if config.overlap == "halves" else 1
    return parts * -(-batch_size // (parts * roles.size(roles.dense)))


def make_model_group(config: ModelConfig, roles: Roles, batch_size: int, length: int) -> ModelGroup:
    """Return the MP group of a mesh on a microbatch of `batch_size` sequences; a group of one has nothing to split.

    Raises:
      UserError: sequences of `length` tokens that are longer than the positions, or do not split evenly over the MP
        group where `sequence_parallel` is set.
    """
    rows, parts = rows_of(config, roles, batch_size), roles.size(roles.model)
    if config.positions == "learned" and length > config.max_length:
        raise UserError(
            f"DataConfig.sequence_length ({length}) must not exceed ModelConfig.max_length ({config.max_length}); "
            "raise ModelConfig.max_length or set ModelConfig.positions = 'rotary'"
        )
    # tokens of a whole batch could split evenly even so; but then it would depend on its size whether a config runs
    if config.sequence_parallel and length % parts:
        raise UserError(
            f"ModelConfig.sequence_parallel splits the tokens over MeshConfig.model ({parts}) devices, which must "
            f"divide DataConfig.sequence_length ({length}); make it a multiple of {parts}, or set "
            "ModelConfig.sequence_parallel = False"
        )
    return ModelGroup(
        axes=roles.model,
        rows=rows,
        split=config.sequence_parallel and bool(roles.model),
        parts=2 if config.overlap == "halves" else 1,
        padded=rows * roles.size(roles.dense) != batch_size,
    )
