"""The names of the leaves of parameters and training states, and which of them are rows of the expert bank.

Inputs: a tree of arrays or ShapeDtypeStructs. Outputs: a flat dictionary {name: leaf} in the order of the tree.
"""

from __future__ import annotations

from typing import Any

import jax

BANK = "bank"
SEGMENT = "segment_"  # the names of a model's segments begin so (`segments.py`)


def flatten(tree, prefix: str = "") -> dict[str, Any]:
    """Return {name: leaf} of a tree, names such as 'params/dense/units/gate/w_gate' or 'opt_state/1/0/mu/bank/w_in'."""
    flat = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = "/".join([prefix, *map(_text, path)] if prefix else map(_text, path))
        assert name not in flat, f"two leaves are called {name}"
        flat[name] = leaf
    return flat


def is_bank(name: str) -> bool:
    """Say whether a leaf is part of the expert bank (or of a moment of it)."""
    return BANK in name.split("/")


def segment_of(name: str) -> str | None:
    """Return the segment that a leaf of the bank is of, None in a model whose bank is one segment's."""
    after = name.split("/")[name.split("/").index(BANK) + 1]
    return after if after.startswith(SEGMENT) else None


def _text(entry) -> str:
    """Return one step of a path: a dictionary's key, a named tuple's field, or an index."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(f"a state has no {type(entry).__name__}")
