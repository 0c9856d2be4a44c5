"""What a scan over layers keeps of each for its backward, where `ModelConfig.remat` is 'none'.

Inputs: the body of the loop. Outputs: the same function under a policy of `jax.checkpoint`. Without one the scan stacks
whatever its backward happens to read: normed activations, in the compute dtype or once more as the gate's float32 copy,
the hidden rows of experts beside the products that they are made of, weights cast to the compute dtype. Writing and
reading those costs more than making them again.

Kept are the values that NAMES names, and what is dear: results of matmuls, attention, exchanges, sorts, gathers and
scatters, and counts. Made again is what functions of single values, casts and moves make of them (RECOMPUTED), sums
over rows of floats, which are those of norms, and, as in Megatron's sequence parallelism, the tokens that an MP group
gathers. In the loops of a block-wise schedule (`prefetch.py`) each stage is such a body. A layer that is written out,
not looped over, keeps all that it reads: nothing is stacked there, so nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# queries, keys and values as attention reads them; x before the MoE half; experts' products with their input weights
NAMES = ("heads", "attended", "products")
RECOMPUTED = frozenset(
    """
    abs add and bitcast_convert_type broadcast_in_dim cbrt ceil clamp concatenate convert_element_type copy cos div
    dynamic_slice eq eq_to erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite le le_to
    log log1p logistic lt lt_to max min mul ne neg not or pad pcast pow pvary rem reshape rev round rsqrt select_n sign
    sin slice split sqrt square squeeze stop_gradient sub tan tanh transpose xor
    """.split()
)


def named(value, name: str):
    """Return a value, or a tree of them, under one of NAMES. `moe/experts.py` names its own."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), value)


def keep_what_is_dear(function: Callable, model_axes: tuple[str, ...]) -> Callable:
    """Return the body of a scan, which keeps for its backward what this file's first paragraphs say.

    Args:
      model_axes: mesh axes of the MP group.
    """
    return jax.checkpoint(function, policy=functools.partial(_is_kept, set(model_axes)), prevent_cse=False)


def _is_kept(model_axes: set[str], primitive, *operands, **params) -> bool:
    """Say whether the result of an operation is kept; operands: their types."""
    if primitive.name == "name":
        return params["name"] in NAMES
    if primitive.name in ("reduce_sum", "reduce_max", "reduce_min"):
        return not jnp.issubdtype(operands[0].dtype, jnp.floating)
    if primitive.name.startswith("all_gather"):
        axes = params["axis_name"]
        return not model_axes & set(axes if isinstance(axes, tuple) else (axes,))
    if primitive.name == "custom_vjp_call":  # one that only repeats what it is given is made again
        return sum(out.size for out in params["call_jaxpr"].out_avals) <= sum(one.size for one in operands)
    return primitive.name not in RECOMPUTED
