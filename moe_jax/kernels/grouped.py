"""Multiply rows that are sorted by expert by their experts' weights, with a choice of implementations.

Rows `[R, K]` are sorted by group: group g owns the `group_sizes[g]` rows after those of the groups before it. Rows past
the last group belong to none: they may hold anything in the input, NaN too, and are zero in the output. Products are
summed in float32 or wider. The gradients of the rows and, through the grad_sinks, of the weights leave the backward.
Works inside `shard_map` and outside. Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moe_jax.errors import UserError
from moe_jax.parallel.varying import match_varying
from moe_jax.registry import Registry

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedWeights:
    """Say which row of a weight bank serves each of some consecutive groups, and where their gradients go.

    The bank is read and never differentiated: a loop over layers can close over a bank that holds all of them, without
    a gradient as large as the bank in its carry. A group's gradient leaves as the cotangent of its row of `grad_sink`.

    Attributes:
      bank: float [Rb, K, N], the weights of many groups.
      slots: int32 [G], the row of `bank` that serves each group.
      grad_sink: float [G, K, N], zeros whose values are never read, or None where no gradient is wanted. Its dtype is
          the dtype of the gradient.
      constant: the caller differentiates nothing with respect to the bank, so no stop_gradient is needed; a backward
        then saves the caller's own array, not another one.
    """

    bank: Array
    slots: Array
    grad_sink: Array | None = None
    constant: bool = dataclasses.field(default=False, metadata={"static": True})


Operands = tuple[GroupedWeights, ...]  # the groups of the first come first

MATMULS = Registry("MoEConfig.grouped_matmul")
HOPPER = "9.0"  # compute capability: the kernels of `hopper.py` use instructions of this generation alone


class GroupedMatmul:
    """The contract of an implementation; `MATMULS` has the classes by name. Each has

        multiply(lhs [R, K], group_sizes, operands) -> [R, N] in the dtype of lhs
        gradients(lhs, dout [R, N], group_sizes, operands) -> (gradient of lhs, zero past the last group,
            of each operand's weights [G, K, N] in the dtype of its grad_sink, None where it has none)

    and, if it computes a whole expert FFN at once, with `ins` the operands of each input weight [Rb, M, F] and `outs`
    those of the output weight [Rb, F, M],

        ffn(activation, rows [R, M], group_sizes, ins, outs, saved) -> ([R, M], residuals, () where not `saved`)
        ffn_gradients(activation, rows, residuals, dout, group_sizes, ins, outs) -> gradients of rows, ins, and outs

    Attributes:
      gathers: it gathers the weights of all groups and casts them to the dtype of lhs.
    """

    options = None  # none of them has any of its own
    gathers = False


def choose_implementation(wanted: str, device, dtype, dims: tuple[int, ...]) -> str:
    """Return the configured name, or what 'auto' is: never one that multiplies every row by every group's weights.

    Args:
      device: `jax.Device`, real or described; None, which 'auto' does not take, checks nothing.
      dtype: of the rows.
      dims: model and hidden dim of the weights on this device.

    Raises:
      UserError: 'hopper' by name on another device.
    """
    capability = str(getattr(device, "compute_capability", ""))
    if wanted == "hopper" and device is not None and capability != HOPPER:
        raise UserError(
            f"MoEConfig.grouped_matmul ('hopper') needs a GPU of compute capability {HOPPER}, not "
            f"{capability or device.platform}; set MoEConfig.grouped_matmul = 'auto'"
        )
    if wanted != "auto":
        return wanted
    # On Hopper, in 16 bits, 'auto' is the kernels that ship with JAX, whose tests hold them to plain matmuls; no GPU
    # has run them for this project, where they are compiled for one, and scripts/gpu_day.py compares them on one.
    if capability == HOPPER and dtype in (jnp.bfloat16, jnp.float16) and not any(dim % 64 for dim in dims):
        return "hopper"
    # TPUs have a kernel for `lax.ragged_dot`. XLA for GPUs expands it to G matmuls of all rows, in FLOPs and memory,
    # or, from jax 0.11 on and with cuDNN 9.22, lowers it to cuDNN, which was never run here.
    return "ragged" if device.platform == "tpu" else "fused"


def grouped_matmul(lhs: Array, group_sizes: Array, operands: Operands, *, implementation: str) -> Array:
    """Multiply the rows of each group by its weights.

    Args:
      lhs: float [R, K], rows sorted by group, without gaps; rows past sum(group_sizes) may hold anything.
      group_sizes: int32 [G], rows of each group; at most R together.
      operands: weights of the groups, [K, N] each: the groups of the first operand come first. A bank of another
          dtype is cast to that of `lhs` as it is read.
      implementation: a name of `MATMULS`.

    Returns:
      float [R, N] in the dtype of `lhs`; rows past the last group are zero. Products are summed in at least float32.

    Raises:
      ValueError: an unknown implementation, or shapes that do not fit.
    """
    return grouped_ffn(lhs, group_sizes, (operands,), activation=None, implementation=implementation)


def grouped_ffn(
    rows: Array, group_sizes: Array, weights: tuple[Operands, ...], *, activation: Callable | None, implementation: str
) -> Array:
    """Return [R, M], the FFN of each row's group, by an implementation that has it whole; zero past the last group.

    Args:
      rows, group_sizes: as in `grouped_matmul`; weights: operands of each input weight, and last of the output weight.
      activation: takes one hidden array per input weight, in at least float32; None multiplies by the only weight.
    """
    chosen = MATMULS.find(implementation)()
    for number, operands in enumerate(weights):
        groups, shape = sum(operand.slots.shape[0] for operand in operands), operands[0].bank.shape[1:]
        last = activation is not None and number == len(weights) - 1
        contracted = weights[0][0].bank.shape[2] if last else rows.shape[1]
        if groups != group_sizes.shape[0]:
            raise ValueError(
                f"the operands serve {groups} groups and group_sizes has {group_sizes.shape[0]}; pass one slot per "
                "group"
            )
        for operand in operands:
            if operand.bank.shape[1:] != shape or shape[0] != contracted:
                raise ValueError(
                    f"a bank of shape {operand.bank.shape} does not fit rows of {contracted} elements and weights of "
                    f"shape {shape}; banks are [Rb, K, N] with the same K and N"
                )
            sink = (operand.slots.shape[0], *shape)
            if operand.grad_sink is not None and operand.grad_sink.shape != sink:
                raise ValueError(f"grad_sink {operand.grad_sink.shape} must be {sink}: one [K, N] per group")
    dtypes = tuple(tuple(o.grad_sink if o.grad_sink is None else o.grad_sink.dtype for o in of) for of in weights)
    # no gradient flows through a bank
    frozen = tuple(
        tuple(
            dataclasses.replace(o, bank=o.bank if o.constant else jax.lax.stop_gradient(o.bank), constant=False)
            for o in operands
        )
        for operands in weights
    )
    rows, group_sizes, frozen = match_varying(rows, group_sizes, frozen)
    return _multiply(chosen, activation, dtypes, rows, group_sizes, frozen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _multiply(implementation, activation, dtypes, rows, group_sizes, weights):
    """Multiply by the only weight, or with an activation apply the FFN; dtypes: of each grad_sink, None for none."""
    del dtypes
    if activation is None:
        return implementation.multiply(rows, group_sizes, weights[0])
    return implementation.ffn(activation, rows, group_sizes, weights[:-1], weights[-1], saved=False)[0]


def _multiply_forward(implementation, activation, dtypes, rows, group_sizes, weights):
    if activation is None:
        out, saved = implementation.multiply(rows, group_sizes, weights[0]), ()
    else:
        out, saved = implementation.ffn(activation, rows, group_sizes, weights[:-1], weights[-1], saved=True)
        # the results too: a loop is run again for what it made, but no policy keeps that unless it has a name
        out, saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, "products"), (out, saved))
    # a backward that saved the grad_sinks would save zeros as large as the weights
    plain = tuple(tuple(dataclasses.replace(o, grad_sink=None) for o in operands) for operands in weights)
    return out, (rows, saved, group_sizes, plain)


def _multiply_backward(implementation, activation, dtypes, residuals, dout):
    rows, saved, group_sizes, plain = residuals
    weights = []  # with grad_sinks that have a shape and a dtype and no value
    for operands, of_sinks in zip(plain, dtypes, strict=True):
        shapes = [(o.slots.shape[0], *o.bank.shape[1:]) for o in operands]
        sinks = [dtype and jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, of_sinks, strict=True)]
        weights.append(tuple(dataclasses.replace(o, grad_sink=s) for o, s in zip(operands, sinks, strict=True)))
    if activation is None:
        drows, *dweights = implementation.gradients(rows, dout, group_sizes, weights[0])
    else:
        *ins, outs = weights
        drows, dins, douts = implementation.ffn_gradients(activation, rows, saved, dout, group_sizes, ins, outs)
        dweights = [*dins, douts]
    nothing: Any = None  # flows through banks and slots
    cotangents = [tuple(GroupedWeights(bank=nothing, slots=nothing, grad_sink=d) for d in ds) for ds in dweights]
    return drows, None, tuple(cotangents)


_multiply.defvjp(_multiply_forward, _multiply_backward)
