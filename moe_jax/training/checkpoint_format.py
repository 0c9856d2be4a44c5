"""The names of a checkpoint's leaves, and the check that it is one of this model. Host side; no arrays.

Inputs: a tree of arrays or ShapeDtypeStructs. Outputs: a flat dictionary {name: leaf} in the order of the tree, and for
what a file holds against what a model needs, nothing or the one line that names the first difference.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_jax.errors import UserError

FORMAT = "moe_jax checkpoint 1"
OPTIONAL = "ema"  # the part of a state that a run may keep or not


def agreed_part(stored: dict[str, Any], state: dict) -> tuple[dict[str, Any], dict]:
    """Return leaves of a file and a state to be read, both without the optional part where one of them lacks it."""
    kept = {name: leaf for name, leaf in stored.items() if not name.startswith(f"{OPTIONAL}/")}
    if OPTIONAL in state and len(kept) < len(stored):
        return stored, state
    return kept, {name: part for name, part in state.items() if name != OPTIONAL}


def check_same_leaves(path, stored: dict[str, Any], needed: dict[str, Any]) -> None:
    """Compare names, shapes and dtypes; orbax by itself casts dtypes silently.

    Args:
      path: of the checkpoint, for the message.
      stored, needed: {name: anything with shape and dtype}, in the file and in this run; in the file's order of dims.

    Raises:
      UserError: names the first leaf that differs, with both values.
    """
    names = [*needed, *(name for name in stored if name not in needed)]
    differing = [name for name in names if _described(stored, name) != _described(needed, name)]
    if not differing:
        return
    name = differing[0]
    more = f" (and {len(differing) - 1} more leaves differ)" if len(differing) > 1 else ""
    raise UserError(
        f"checkpoint {path} is not of this model: {name} is {_described(stored, name)} in the checkpoint and "
        f"{_described(needed, name)} in this run{more}; use the model, optimizer and tokenizer that it was trained "
        "with, or another --workdir"
    )


def _described(leaves: dict[str, Any], name: str) -> str:
    if name not in leaves:
        return "absent"
    leaf = leaves[name]
    return f"{np.dtype(leaf.dtype).name} {list(leaf.shape)}"
