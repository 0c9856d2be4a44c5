"""Low-rank adapters (LoRA) next to the matrices that they adapt.

    W' = W + alpha / rank A B        W [in, out], frozen      A [in, rank], normal      B [rank, out], zero at first

Inputs: trees of parameters. Outputs: the same trees with adapters, leaves `NAME_lora_a` and `NAME_lora_b` beside the
leaf NAME, stacked and split as that is: an expert's lie in its row of the bank, and move with it. A unit's matrices are
put together layer by layer, once they are gathered; experts multiply their rows by A and then by B (`moe/experts.py`).
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.models.config import LoraConfig
from moe_jax.models.transformer import MODULES, matrix_dims
from moe_jax.moe.bank import init_bank
from moe_jax.moe.experts import LORA_A, LORA_B
from moe_jax.parallel.sharding import gather_tree
from moe_jax.planning.placement import Placement

RANK = -2  # in place of a dim: that of the adapter itself


def is_adapter(name: str) -> bool:
    """Say whether a leaf is an adapter (or a moment of one)."""
    return name.endswith((LORA_A, LORA_B))


def part_of(tree: dict, wanted: Callable[[str], bool]) -> dict:
    """Return the leaves of a nested dictionary whose own name is wanted, without dictionaries that have none."""
    inner = {name: part_of(own, wanted) if isinstance(own, dict) else own for name, own in tree.items()}
    return {name: own for name, own in inner.items() if (own if isinstance(own, dict) else wanted(name))}


def adapters_of(tree: dict) -> dict:
    """Return the adapters alone."""
    return part_of(tree, is_adapter)


def base_of(tree: dict) -> dict:
    """Return all but the adapters."""
    return part_of(tree, lambda name: not is_adapter(name))


def joined(tree: dict, more: dict) -> dict:
    """Return one tree with the leaves of both; where both have one, that of `more`."""
    out = dict(tree)
    for name, own in more.items():
        out[name] = joined(out[name], own) if isinstance(own, dict) and name in out else own
    return out


def find_sites(config: LoraConfig, base: dict) -> dict[tuple[str, ...], tuple[str, tuple[int, ...]]]:
    """Return {path of an adapted leaf: (what a target calls it, its shape)} of parameters {'dense', 'bank'}.

    Raises:
      UserError: a target that matches nothing, or a rank above the dims of what it adapts.
    """
    known = {}
    for path, leaf in jax.tree.leaves_with_path(base):
        names = tuple(step.key for step in path)
        module = "experts" if names[0] == "bank" else MODULES.get(names[3]) if names[1] == "units" else None
        if module is not None and len(names) < 6 and matrix_dims(names[-1]) is not None:
            known[names] = f"{module}/{names[-1]}", leaf.shape
    found = {}
    for target in config.targets:
        own = {names: site for names, site in known.items() if target in (site[0], site[0].split("/")[0])}
        if not own:
            possible = dict.fromkeys(word for site, _ in known.values() for word in (site.split("/")[0], site))
            raise UserError(
                f"LoraConfig.targets: {target!r} matches nothing in this model; take of {', '.join(sorted(possible))}"
            )
        found |= own
    for names, (site, shape) in found.items():
        inner, outer = (math.prod(shape[1 + dim] for dim in dims) for dims in matrix_dims(names[-1]))
        if config.rank > min(inner, outer):
            raise UserError(
                f"LoraConfig.rank ({config.rank}) is above the dims of {site} ({inner} x {outer}); lower it, or leave "
                "that out of LoraConfig.targets"
            )
    return found


def factor_dims(name: str, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which dims of the leaf NAME, `ndim` without what it is stacked over, A has and B has, and where `RANK` is.

    Dims that are neither in nor out (queries, keys and values in one leaf) are A's and B's too, so that each of those
    matrices has adapters of its own: of qkv [M, 3, H, Dh] A is [M, 3, rank] and B [3, rank, H, Dh].
    """
    inner, outer = matrix_dims(name)
    of_b = [dim for dim in range(ndim) if dim not in inner]
    of_b.insert(len(of_b) - len(outer), RANK)
    return (*(dim for dim in range(ndim) if dim not in outer), RANK), tuple(of_b)


def merge(name: str, weight, a, b):
    """Return W + A B of one matrix or several side by side, in the widest of their dtypes; B holds alpha / rank."""
    letters = "".join(chr(ord("a") + dim) for dim in range(weight.ndim))
    of_a, of_b = (
        "".join("z" if dim == RANK else letters[dim] for dim in dims) for dims in factor_dims(name, weight.ndim)
    )
    product = jnp.einsum(f"{of_a},{of_b}->{letters}", a, b, precision=lax.Precision.HIGHEST)
    return weight + product


def merged(tree: dict, put_together: Callable = merge) -> dict:
    """Return a tree without adapters, each adapted leaf put together with them."""
    out = {}
    for name, own in tree.items():
        if isinstance(own, dict):
            out[name] = merged(own, put_together)
        elif not is_adapter(name):
            adapted = name + LORA_A in tree
            out[name] = put_together(name, own, tree[name + LORA_A], tree[name + LORA_B]) if adapted else own
    return out


def merged_model(params: dict) -> dict:
    """Return {'dense', 'bank'} as of a model without adapters, in its own dtypes; B holds alpha / rank."""
    one = jax.vmap(merge, in_axes=(None, 0, 0, 0))
    return merged(params, lambda name, weight, a, b: one(name, weight, a, b).astype(weight.dtype))


def gather_merged(tree: dict, dims: dict, axes: tuple[str, ...], parts: int, wires: dict) -> dict:
    """Return a unit's leaves as `gather_tree` does, without adapters: those are put together with what they adapt.

    Only adapters have a gradient then; without any, all leaves have.
    """
    if not (own := adapters_of(tree)):
        return gather_tree(tree, dims, axes, parts, wires)
    base = gather_tree(lax.stop_gradient(base_of(tree)), base_of(dims), axes, parts, base_of(wires))
    return merged(joined(base, gather_tree(own, adapters_of(dims), axes, parts, adapters_of(wires))))


def init_adapters(config: LoraConfig, key, base: dict, placements: dict[str, Placement]) -> dict:
    """Return fresh adapters {'dense', 'bank'} of parameters with the shapes of `base`, which add nothing yet; traced.

    Values of A depend on the key, on which leaves are adapted and, of an expert's, on layer and expert, never on the
    mesh. They have the variance of those that peft starts from, 1 / (3 in).

    Args:
      placements: {segment: even homes of its experts}, `LanguageModel.even_placements`.
    """
    sites, out = find_sites(config, base), {}

    def factors(key, name, shape, dtype):
        of_a, of_b = (
            tuple(config.rank if dim == RANK else shape[dim] for dim in dims) for dims in factor_dims(name, len(shape))
        )
        scale = (3 * math.prod(shape[dim] for dim in matrix_dims(name)[0])) ** -0.5
        a = scale * jax.random.normal(key, of_a, jnp.float32)
        return {name + LORA_A: a.astype(dtype), name + LORA_B: jnp.zeros(of_b, dtype)}

    for number, (path, (_, shape)) in enumerate(sorted(sites.items())):
        *inside, name = path
        dtype = jnp.promote_types(functools.reduce(lambda node, step: node[step], path, base).dtype, jnp.float32)
        make = functools.partial(factors, name=name, shape=shape[1:], dtype=dtype)
        own_key = jax.random.fold_in(key, number)
        if path[0] == "bank":
            own = placements[path[1]]
            made = init_bank(make, own_key, own.layers, own.experts, own.devices)
        else:
            made = jax.vmap(make)(jax.random.split(own_key, shape[0]))
        tree: Any = made
        for step in reversed(inside):
            tree = {step: tree}
        out = joined(out, tree)
    return out
