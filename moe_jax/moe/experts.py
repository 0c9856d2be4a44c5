"""The experts' feed-forward networks on rows that are sorted by expert.

Inputs: rows `[R, M]` sorted by group, `group_sizes [G]`, and per weight the `GroupedWeights` of the groups. Outputs:
rows `[R, M]`, zero past the last group, weighted where weights come with the rows. It does not move tokens or sum over
devices: with F split over `expert_shard` the result is this shard's part of a sum.

Letters: docs/notation.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moe_jax.kernels.grouped import MATMULS, Operands, grouped_ffn, grouped_matmul

Array = jax.Array
# ends of the names of the low-rank factors of a weight [M, F]: A [M, rank] and B [rank, F], leaves of the bank too
LORA_A, LORA_B = "_lora_a", "_lora_b"


def _swiglu(up: Array, gate: Array) -> Array:
    return jax.nn.silu(gate) * up


# what turns the products with the input weights, [R, F] each, into hidden rows; and the names of these weights
ACTIVATIONS = {"gelu": jax.nn.gelu, "swiglu": _swiglu}
_INPUTS = {"gelu": ("w_in",), "swiglu": ("w_in", "w_gate")}


def weight_names(activation: str) -> tuple[str, ...]:
    """Return the names of an expert's weights, w_out last.

    Raises:
      ValueError: an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation ({activation!r}) is unknown; choose one of {', '.join(ACTIVATIONS)}")
    return (*_INPUTS[activation], "w_out")


def expert_ffn(
    rows: Array,
    group_sizes: Array,
    weights: dict[str, Operands],
    row_weights: Array | None = None,
    *,
    activation: str,
    implementation: str,
) -> Array:
    """Apply to each group's rows its expert: act(rows w_in) w_out, or (silu(rows w_gate) * rows w_in) w_out.

    Args:
      rows: float [R, M], sorted by group, without gaps; rows past sum(group_sizes) may hold anything.
      group_sizes: int32 [G].
      weights: w_in [Rb, M, F], w_out [Rb, F, M], and w_gate [Rb, M, F] for 'swiglu', each as operands of a
          `grouped_matmul`: the groups of the first operand come first. With NAME_lora_a [Rb, M, rank] and
          NAME_lora_b [Rb, rank, F] a weight is NAME + NAME_lora_a NAME_lora_b, which is never formed.
      row_weights: float [R], the factor of each result, or None. It is applied to the hidden rows: the gradient of a
          weight then needs no result.
      activation: 'gelu' (its tanh form) or 'swiglu'.
      implementation: of the grouped matmul; a name of `MATMULS`.

    Returns:
      float [R, M] in the dtype of `rows`. The activation runs in at least float32.

    Raises:
      ValueError: an unknown name, a missing weight, or shapes that do not fit.
    """
    names = weight_names(activation)
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(
            f"activation {activation!r} needs the weights {', '.join(names)}; missing: {', '.join(missing)}"
        )
    operands = tuple(weights[name] for name in names)
    adapted = len(weights) > len(names)
    if row_weights is None and not adapted and hasattr(MATMULS.find(implementation), "ffn"):
        function = ACTIVATIONS[activation]
        return grouped_ffn(rows, group_sizes, operands, activation=function, implementation=implementation)
    acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)

    @jax.checkpoint  # else layers save float32 intermediates; without CSE prevented, those that are written out do too
    def activate(row_weights, *pre):
        hidden = ACTIVATIONS[activation](*(array.astype(acc_dtype) for array in pre))
        hidden = hidden if row_weights is None else hidden * row_weights[:, None].astype(acc_dtype)
        return hidden.astype(rows.dtype)

    # kernels of tiles have none as narrow as a rank
    narrow = implementation if implementation in ("reference", "ragged") else "fused"

    def times(rows, name):
        product = grouped_matmul(rows, group_sizes, weights[name], implementation=implementation)
        for_a, for_b = name + LORA_A, name + LORA_B
        if for_a not in weights:
            return product
        inner = grouped_matmul(rows, group_sizes, weights[for_a], implementation=narrow)
        return product + grouped_matmul(inner, group_sizes, weights[for_b], implementation=narrow)

    products = (checkpoint_name(times(rows, name), "products") for name in names[:-1])
    return times(activate(row_weights, *products), names[-1])
