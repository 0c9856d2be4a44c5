"""Multiply rows that are sorted by expert by their experts' weights, with a choice of implementations.

Rows `[R, K]`, `group_sizes [G]` and the groups' weights in, `[R, N]` out; the gradients of the rows and, through the
grad_sinks, of the weights leave the backward. Works inside `shard_map` and outside. The rules are in `grouped.py`, the
implementations in `blocked.py` and `hopper.py`; over them `float8_ffn.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from moe_jax.kernels import float8_ffn as float8
from moe_jax.kernels import hopper
from moe_jax.kernels.grouped import GroupedWeights, Operands, find_implementation
from moe_jax.parallel.varying import match_varying

Array = jax.Array


def default_implementation(device, dtype, dims: tuple[int, ...]) -> str:
    """Return what 'auto' is: never one that multiplies every row by every group's weights.

    Hopper GPUs take `hopper`, where its kernels take the dtype and the sizes; this project's own, `mosaic`, wait for a
    GPU that has run them. All other GPUs, and CPUs, take `fused`:
    loops over row blocks, plain XLA matmuls of the rows in use. TPUs take `ragged`, `lax.ragged_dot`, for which they
    have a kernel; XLA for GPUs expands it to G matmuls of all rows, in FLOPs and memory (docs/results.md), or,
    from jax 0.11 on and with cuDNN 9.22, lowers it to cuDNN, which was never run here.

    Args:
      device: `jax.Device`, real or described.
      dtype: of the rows.
      dims: model and hidden dim of the weights on this device.
    """
    if device.platform == "tpu":
        return "ragged"
    return "hopper" if hopper.fits(device, dtype, dims) else "fused"


def choose_implementation(wanted: str, device, dtype, dims: tuple[int, ...], in_float8: bool = False) -> str:
    """Return the configured name, 'auto' resolved by `default_implementation`.

    With `in_float8` it is that of `float8_ffn.py` over that one; 'auto' is `mosaic` where its kernel takes the sizes.
    """
    if wanted == "auto":
        kernel = in_float8 and float8.has_kernel(device, dtype, dims)
        wanted = "mosaic" if kernel else default_implementation(device, dtype, dims)
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
    check_operands(lhs.shape[1], group_sizes, operands)
    lhs, group_sizes, operands = match_varying(lhs, group_sizes, without_bank_gradient(operands))
    return _multiply(find_implementation(implementation), grad_sink_dtypes(operands), lhs, group_sizes, operands)


def without_bank_gradient(operands: Operands) -> Operands:
    """Return the operands with banks through which no gradient flows."""
    return tuple(
        dataclasses.replace(
            operand, bank=operand.bank if operand.constant else jax.lax.stop_gradient(operand.bank), constant=False
        )
        for operand in operands
    )


def check_operands(contracted: int, group_sizes: Array, operands: Operands) -> None:
    """Raise a ValueError unless the operands serve all groups and fit rows of `contracted` elements."""
    groups = sum(operand.slots.shape[0] for operand in operands)
    if groups != group_sizes.shape[0]:
        raise ValueError(
            f"the operands serve {groups} groups and group_sizes has {group_sizes.shape[0]}; pass one slot per group"
        )
    shape = operands[0].bank.shape[1:]
    for operand in operands:
        if operand.bank.shape[1:] != shape or shape[0] != contracted:
            raise ValueError(
                f"a bank of shape {operand.bank.shape} does not fit rows of {contracted} elements and weights of shape "
                f"{shape}; banks are [Rb, K, N] with the same K and N"
            )
        if operand.grad_sink is not None and operand.grad_sink.shape != (operand.slots.shape[0], *shape):
            raise ValueError(
                f"grad_sink {operand.grad_sink.shape} must be {(operand.slots.shape[0], *shape)}: one [K, N] per group"
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(implementation, grad_sink_dtypes, lhs, group_sizes, operands):
    del grad_sink_dtypes
    return implementation.multiply(lhs, group_sizes, operands)


def _multiply_forward(implementation, grad_sink_dtypes, lhs, group_sizes, operands):
    out = _multiply(implementation, grad_sink_dtypes, lhs, group_sizes, operands)
    return out, (lhs, group_sizes, without_grad_sinks(operands))


def _multiply_backward(implementation, grad_sink_dtypes, residuals, dout):
    lhs, group_sizes, operands = residuals
    dlhs, dweights = implementation.gradients(lhs, dout, group_sizes, with_grad_sink_types(operands, grad_sink_dtypes))
    return dlhs, None, grad_sink_cotangents(dweights)


_multiply.defvjp(_multiply_forward, _multiply_backward)


def grad_sink_dtypes(operands: Operands) -> tuple:
    """Return the dtype of each operand's grad_sink, None where there is none; hashable."""
    return tuple(None if operand.grad_sink is None else operand.grad_sink.dtype for operand in operands)


def without_grad_sinks(operands: Operands) -> Operands:
    """Return the operands without grad_sinks: a backward that saved them would save zeros as large as the weights."""
    return tuple(dataclasses.replace(operand, grad_sink=None) for operand in operands)


def with_grad_sink_types(operands: Operands, dtypes: tuple) -> Operands:
    """Return the operands with grad_sinks that have a shape and a dtype and no value."""
    typed = []
    for operand, dtype in zip(operands, dtypes, strict=True):
        shape = (operand.slots.shape[0], *operand.bank.shape[1:])
        typed.append(
            dataclasses.replace(operand, grad_sink=None if dtype is None else jax.ShapeDtypeStruct(shape, dtype))
        )
    return tuple(typed)


def grad_sink_cotangents(dweights: tuple[Array | None, ...]) -> Operands:
    """Return the cotangents of operands: gradients leave through the grad_sinks, nothing through banks and slots."""
    nothing: Any = None
    return tuple(GroupedWeights(bank=nothing, slots=nothing, grad_sink=dweight) for dweight in dweights)
