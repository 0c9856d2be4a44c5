"""The contract that every grouped matmul implementation meets, and the registry that holds them.

Inputs: rows `[R, K]` sorted by group, `group_sizes [G]` and the weights of the groups. Output: `[R, N]`. Group g owns
the `group_sizes[g]` rows after those of the groups before it; rows past the last group belong to no group: they may
hold anything in the input and are zero in the output. Nothing here computes: see `matmul.py`.

Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("bank", "slots", "grad_sink"), meta_fields=("constant",)
)
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
    constant: bool = False


Operands = tuple[GroupedWeights, ...]  # the groups of the first come first


class GroupedMatmul(Protocol):
    """Multiply rows by their group's weights, and differentiate that; products are summed in float32 or wider."""

    def multiply(self, lhs: Array, group_sizes: Array, operands: Operands) -> Array:
        """Return float [R, N] in the dtype of `lhs`; rows past the last group are zero whatever `lhs` holds there."""
        ...

    def gradients(
        self, lhs: Array, dout: Array, group_sizes: Array, operands: Operands
    ) -> tuple[Array, tuple[Array | None, ...]]:
        """Return the gradients of `lhs` and of each operand's weights [G, K, N], None where it has no grad_sink.

        Rows of `lhs` and `dout` past the last group may hold anything; the gradient of `lhs` is zero there.
        """
        ...


@runtime_checkable
class FusedFfn(Protocol):
    """What an implementation has besides, if it computes an expert's whole FFN at once.

    `activation` takes one hidden array per input weight, in at least float32. `ins` holds the operands of each input
    weight [Rb, M, F], `outs` those of the output weight [Rb, F, M].
    """

    def ffn(
        self, activation: Callable, rows: Array, group_sizes: Array, ins: tuple[Operands, ...], outs: Operands
    ) -> Array:
        """Return float [R, M] in the dtype of `rows`, zero past the last group."""
        ...

    def ffn_forward(
        self, activation: Callable, rows: Array, group_sizes: Array, ins: tuple[Operands, ...], outs: Operands
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return the same, and residuals: what the backward needs besides the arguments."""
        ...

    def ffn_gradients(
        self,
        activation: Callable,
        rows: Array,
        residuals: tuple[Array, ...],
        dout: Array,
        group_sizes: Array,
        ins: tuple[Operands, ...],
        outs: Operands,
    ) -> tuple[Array, tuple[tuple[Array | None, ...], ...], tuple[Array | None, ...]]:
        """Return the gradients of `rows` and of the weights in `ins` and `outs`, None where there is no grad_sink."""
        ...


_REGISTRY: dict[str, GroupedMatmul] = {}


def register(name: str) -> Callable[[Callable], Callable]:
    """Return a class decorator that makes an implementation available under `name`.

    One whose name holds a colon stands over another one: a config does not name it, another field asks for it.
    """

    def decorate(implementation: Callable) -> Callable:
        if name in _REGISTRY:
            raise ValueError(f"a grouped matmul named {name!r} is registered already; choose another name")
        _REGISTRY[name] = implementation()
        return implementation

    return decorate


def implementations() -> tuple[str, ...]:
    """Return the registered names that a config may choose, sorted."""
    return tuple(sorted(name for name in _REGISTRY if ":" not in name))


def find_implementation(name: str) -> GroupedMatmul:
    """Return the implementation registered under `name`.

    Raises:
      ValueError: no implementation has that name.
    """
    if name not in _REGISTRY:
        raise ValueError(
            f"grouped matmul implementation ({name!r}) is unknown; choose one of {', '.join(implementations())}"
        )
    return _REGISTRY[name]
