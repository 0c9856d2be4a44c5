"""What serves the groups of a grouped matmul, and the registry of its implementations.

Rows `[R, K]` are sorted by group: group g owns the `group_sizes[g]` rows after those of the groups before it. Rows past
the last group belong to none: they may hold anything in the input, NaN too, and are zero in the output. Products are
summed in float32 or wider. Letters: docs/notation.md; here K and N are the contracted and the resulting dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

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

_REGISTRY: dict[str, Any] = {}


def register(name: str, implementation: Any) -> None:
    """Make an implementation available under `name`.

    One whose name holds a colon stands over another one: a config does not name it, another field asks for it. It has

        multiply(lhs [R, K], group_sizes, operands) -> [R, N] in the dtype of lhs
        gradients(lhs, dout [R, N], group_sizes, operands) -> (gradient of lhs, zero past the last group,
            of each operand's weights [G, K, N] in the dtype of its grad_sink, None where it has none)

    and, if it computes a whole expert FFN at once, with `ins` the operands of each input weight [Rb, M, F] and `outs`
    those of the output weight [Rb, F, M],

        ffn(activation, rows [R, M], group_sizes, ins, outs, saved) -> ([R, M], residuals, () where not `saved`)
        ffn_gradients(activation, rows, residuals, dout, group_sizes, ins, outs) -> gradients of rows, ins, and outs
    """
    if name in _REGISTRY:
        raise ValueError(f"a grouped matmul named {name!r} is registered already; choose another name")
    _REGISTRY[name] = implementation


def implementations() -> tuple[str, ...]:
    """Return the registered names that a config may choose, sorted."""
    return tuple(sorted(name for name in _REGISTRY if ":" not in name))


def find_implementation(name: str) -> Any:
    """Return the implementation registered under `name`, with the methods that `register` lists.

    Raises:
      ValueError: no implementation has that name.
    """
    if name not in _REGISTRY:
        raise ValueError(
            f"grouped matmul implementation ({name!r}) is unknown; choose one of {', '.join(implementations())}"
        )
    return _REGISTRY[name]
