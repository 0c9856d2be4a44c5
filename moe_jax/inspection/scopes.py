"""What an instruction belongs to, read from the path of jax names that the compiler keeps (`op_name`).

    jit(train_step)/transpose(jvp(moe))/while/body/closed_call/dispatch/all_to_all

Inputs: that path. Outputs: the named scopes of this project in it ('moe/dispatch'), the pass (forward, backward or
recompute), and the role of a collective: Trans, Agg, all-to-all, or its kind.
"""

from __future__ import annotations

import re

from moe_jax.inspection.hlo import split_outside

# words that jax itself puts into a path
_STRUCTURE = re.compile(
    r"^(while|body|cond|closed_call|eval_jaxpr|checkpoint|remat\w*|rematted_computation|shard_map|branch_\d+_fun|custom_\w+_call|"
    r"custom_vjp_call\w*|pjit|core_call|jit|scan|true_fun|false_fun|main|cond_fun|body_fun|)$"
)
_WRAPPER = re.compile(r"^(?:jvp|transpose|vmap|pmap|linearize|vjp)\((.*)\)$")

TRANS, AGG, EXCHANGE = "Trans", "Agg", "all-to-all"
_ROLES = (("sparse_reduce_scatter", AGG), ("sparse_all_gather", TRANS))


def scope_of(op_name: str) -> str:
    """Return the named scopes of a path joined by '/', without what jax adds and without the operation itself."""
    names: list[str] = []
    for part in split_outside(op_name, "/")[:-1]:
        while wrapped := _WRAPPER.match(part):
            part = wrapped.group(1)
        if part.startswith("jit(") or _STRUCTURE.match(part) or "," in part or "->" in part:
            continue
        names += [name for name in part.split("/") if name and not _STRUCTURE.match(name) and "(" not in name]
    # the transpose of a scope repeats its name
    return "/".join(name for place, name in enumerate(names) if place == 0 or names[place - 1] != name)


def pass_of(op_name: str) -> str:
    """Return 'recompute', 'backward', 'forward', or '' where the compiler left no name."""
    if not op_name:
        return ""
    if "rematted_computation" in op_name:
        return "recompute"
    return "backward" if "transpose(" in op_name else "forward"


def role_of(kind: str, op_name: str) -> str:
    """Return what a collective is for: Trans, Agg, all-to-all (an exchange of tokens), or its kind."""
    parts = op_name.split("/")
    for scope, role in _ROLES:
        if any(scope in part for part in parts):
            return role
    moves_tokens = any(name in part for part in parts for name in ("dispatch", "combine"))
    if kind in ("all-to-all", "ragged-all-to-all") or (kind == "collective-permute" and moves_tokens):
        return EXCHANGE
    return kind
