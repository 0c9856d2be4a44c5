"""Parameters wider than the compute dtype: read in the compute dtype, with gradients summed in their own dtype.

Inputs: activations [..., M] in the compute dtype and parameters in theirs. Outputs: activations in the compute dtype.
For `x @ w.astype(dtype)` JAX rounds the sum over tokens that is w's gradient to the compute dtype before it casts it to
w's dtype, and adds parts of it (chunks of tokens, devices, the tokens of a bias) in the compute dtype too. Here the
parameter is a *grad_sink*: its value is not read, and its cotangent comes out of the matmul in its own dtype. Where the
two dtypes are equal, every function is plain JAX.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.row_sums import sum_rows
from moe_jax.collectives.varying import match_varying
from moe_jax.dispatch.route import record


@record
class Weight:
    """A parameter as an operand of a matmul.

    Attributes:
      held: float [...], its value in the compute dtype.
      grad_sink: the parameter, through which the gradient leaves; None where `held` is the parameter.
    """

    held: jax.Array
    grad_sink: jax.Array | None


def in_dtype(parameter, dtype) -> Weight:
    """Return a parameter [...] for a matmul in `dtype`."""
    if parameter.dtype == dtype:
        return Weight(held=parameter, grad_sink=None)
    return Weight(held=lax.stop_gradient(parameter).astype(dtype), grad_sink=parameter)


def project(spec: str, x, weight: Weight, out=None):
    """Return einsum(spec, x, weight), in the dtype of x or in `out`; the weight's gradient has the parameter's dtype.

    Args:
      spec: 'x,weight->result', without an index that only one of the three has.
      x: float [...].
      out: dtype of the result.
    """
    if weight.grad_sink is None:
        return jnp.einsum(spec, x, weight.held, preferred_element_type=out)
    return _project(spec, out, weight.grad_sink.dtype, *match_varying(x, weight.held, weight.grad_sink))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _project(spec, out, grad_sink_dtype, x, held, grad_sink):
    del grad_sink_dtype, grad_sink
    return jnp.einsum(spec, x, held, preferred_element_type=out)


def _project_fwd(spec, out, grad_sink_dtype, x, held, grad_sink):
    return _project(spec, out, grad_sink_dtype, x, held, grad_sink), (x, held)


def _project_bwd(spec, out, grad_sink_dtype, residuals, d):
    x, held = residuals
    operands, result = spec.split("->")
    of_x, of_weight = operands.split(",")
    dx = jax.vjp(lambda x: jnp.einsum(spec, x, held, preferred_element_type=out), x)[1](d)[0]
    dweight = jnp.einsum(f"{of_x},{result}->{of_weight}", x, d, preferred_element_type=grad_sink_dtype)
    return dx, None, dweight


_project.defvjp(_project_fwd, _project_bwd)


def add_bias(x, bias):
    """Return x + bias in the dtype of x; the bias's gradient is summed in the bias's dtype.

    Args:
      x: float [...].
      bias: float of as many dims; those of size 1 are broadcast.
    """
    if bias.dtype == x.dtype:
        return x + bias
    axes = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
    return _add_bias(axes, bias.dtype, *match_varying(x, bias))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add_bias(axes, bias_dtype, x, bias):
    del axes, bias_dtype
    return x + bias.astype(x.dtype)


def _sum_over(d, axes, dtype):
    if axes != tuple(range(len(axes))):
        return jnp.sum(d, axis=axes, keepdims=True, dtype=dtype)
    shape = d.shape[len(axes) :]
    return sum_rows(d.reshape(-1, *shape), dtype).reshape((1,) * len(axes) + shape)


_add_bias.defvjp(
    lambda axes, bias_dtype, x, bias: (_add_bias(axes, bias_dtype, x, bias), None),
    lambda axes, bias_dtype, _, d: (d, _sum_over(d, axes, bias_dtype)),
)
