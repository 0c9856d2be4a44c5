"""Multiply rows that are sorted by expert by their experts' weights, with a choice of implementations.

Rows `[R, K]`, `group_sizes [G]` and the groups' weights in, `[R, N]` out; the gradients of the rows and, through the
grad_sinks, of the weights leave the backward. Works inside `shard_map` and outside. The rules are in `grouped.py`, the
implementations in `blocked.py` and `hopper.py`; over them `float8_ffn.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from moe_jax.kernels import float8_ffn as float8
from moe_jax.kernels import hopper
from moe_jax.kernels.float8_blocks import BLOCK
from moe_jax.kernels.grouped import GroupedWeights, Operands, find_implementation
from moe_jax.parallel.varying import match_varying

Array = jax.Array


def choose_implementation(wanted: str, device, dtype, dims: tuple[int, ...], in_float8: bool = False) -> str:
    """Return the configured name, or what 'auto' is: never one that multiplies every row by every group's weights.

    Hopper GPUs take `hopper`, where its kernels take the dtype and the sizes; this project's own, `mosaic`, wait for a
    GPU that has run them. All other GPUs, and CPUs, take `fused`:
    loops over row blocks, plain XLA matmuls of the rows in use. TPUs take `ragged`, `lax.ragged_dot`, for which they
    have a kernel; XLA for GPUs expands it to G matmuls of all rows, in FLOPs and memory (docs/results.md), or,
    from jax 0.11 on and with cuDNN 9.22, lowers it to cuDNN, which was never run here.

    Args:
      device: `jax.Device`, real or described.
      dtype: of the rows.
      dims: model and hidden dim of the weights on this device.
      in_float8: take that of `float8_ffn.py` over the chosen one; 'auto' is `mosaic` where its kernel takes the sizes.
    """
    if wanted == "auto":
        if hopper.fits(device, dtype, dims):
            wanted = "mosaic" if in_float8 and not any(dim % BLOCK for dim in dims) else "hopper"
        else:
            wanted = "ragged" if device.platform == "tpu" else "fused"
    return float8.PREFIX + wanted if in_float8 else wanted


def grouped_matmul(lhs: Array, group_sizes: Array, operands: Operands, *, implementation: str) -> Array:
    """Multiply the rows of each group by its weights.

    Args:
      lhs: float [R, K], rows sorted by group, without gaps; rows past sum(group_sizes) may hold anything.
      group_sizes: int32 [G], rows of each group; at most R together.
      operands: weights of the groups, [K, N] each: the groups of the first operand come first. A bank of another
          dtype is cast to that of `lhs` as it is read.
      implementation: a name from `implementations()`.

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
    chosen = find_implementation(implementation)
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
        saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, "products"), saved)
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
