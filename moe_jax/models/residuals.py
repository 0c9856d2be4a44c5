"""What a backward keeps: residuals of a stage without the arrays it has anyway, and of a scan what is expensive."""

# `residuals_of` keeps what `jax.vjp` returned but for arrays that the backward will have again (parameters, the bank,
# tables, replicas of experts), and joins the two in another iteration of another loop. So a loop can stack residuals
# without stacking a bank in every turn, and replicas can be fetched a second time instead of being saved.

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from moe_jax.models.config import ModelConfig
from moe_jax.parallel.varying import cast_varying, varying_axes


def residuals_of(pull_back, known) -> Partial:
    """Take apart what `jax.vjp` returned; left out: leaves of `known`, the same objects, and empty arrays.

    Returns:
      a pytree of the arrays that are its own. Called with a tree like `known`, whose arrays have the same shapes, it
      returns the function.
    """
    place = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(known))}
    leaves, tree = jax.tree.flatten(pull_back)
    arrays, places = [], []
    for leaf in leaves:
        if id(leaf) in place:
            places.append(("known", place[id(leaf)]))
        elif hasattr(leaf, "dtype") and leaf.size == 0:  # saved, it would be an input of loops that nothing reads
            places.append(("empty", (leaf.shape, leaf.dtype, varying_axes(leaf))))
        elif hasattr(leaf, "dtype"):
            place_of_own = next((i for i, other in enumerate(arrays) if other is leaf), len(arrays))
            if place_of_own == len(arrays):
                arrays.append(leaf)
            places.append(("own", place_of_own))
        else:  # JAX's placeholder for an argument that it does not need
            places.append(("static", leaf))

    def restore(own, known):
        sources, leaves = {"known": jax.tree.leaves(known), "own": own}, []
        for kind, at in places:
            if kind == "empty":
                shape, dtype, axes = at
                leaves.append(cast_varying(jnp.zeros(shape, dtype), axes))
            else:
                leaves.append(at if kind == "static" else sources[kind][at])
        return jax.tree.unflatten(tree, leaves)

    return Partial(restore, arrays)


# queries, keys and values as attention reads them; x before the MoE half; experts' products with their input weights
NAMES = ("heads", "attended", "products")
RECOMPUTED = frozenset(
    """
    abs add and bitcast_convert_type broadcast_in_dim cast_alone cbrt ceil clamp concatenate convert_element_type copy
    cos div dynamic_slice eq eq_to erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite le
    le_to log log1p logistic lt lt_to max min mul ne neg not or pad pcast pow pvary rem reshape rev round rsqrt select_n
    sign sin slice split sqrt square squeeze stop_gradient sub tan tanh transpose xor
    """.split()
)


# What a scan over layers keeps of each where `ModelConfig.remat` is 'none'. Without a policy the scan stacks whatever
# its backward happens to read: normed activations, in the compute dtype or once more as the gate's float32 copy, the
# hidden rows of experts next to the products that they are made of, weights cast to the compute dtype. Writing and
# reading those costs more than making them again.
# Kept are the values of NAMES and what is expensive: results of matmuls, attention, exchanges, sorts, gathers and
# scatters, and counts. Made again is what functions of single values, casts and moves make of them (RECOMPUTED), sums
# over rows of floats, which are those of norms, and, as in Megatron's sequence parallelism, the tokens that an MP group
# gathers. A layer that is written out, not looped over, keeps all that it reads: nothing is stacked there.
def checkpointed(function: Callable, config: ModelConfig, model_axes: tuple[str, ...]) -> Callable:
    """Return a layer, or a stage of one, that keeps for its backward what `ModelConfig.remat` says.

    Args:
      model_axes: mesh axes of the MP group.
    """

    def is_kept(primitive, *operands, **params) -> bool:
        if primitive.name == "name":
            return params["name"] in NAMES
        if primitive.name in ("reduce_sum", "reduce_max", "reduce_min"):
            return not jnp.issubdtype(operands[0].dtype, jnp.floating)
        if primitive.name.startswith("all_gather"):
            axes = params["axis_name"]
            return not set(model_axes) & set(axes if isinstance(axes, tuple) else (axes,))
        if primitive.name == "custom_vjp_call":  # one that only repeats what it is given is made again
            return sum(out.size for out in params["call_jaxpr"].out_avals) <= sum(one.size for one in operands)
        return primitive.name not in RECOMPUTED

    if config.remat == "none" and config.stack != "scan":
        return function
    policies = {
        "none": is_kept,
        "block": None,
        "block_but_attention": lambda primitive, *_, **params: "dot_product_attention_fwd" in primitive.name,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    return jax.checkpoint(function, policy=policies[config.remat], prevent_cse=False)
