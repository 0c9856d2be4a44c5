"""How a config says that its layers differ: the text of a segment, and the short forms.

Inputs: the fields of a `ModelConfig`. Outputs: for each run of equal units the fields in which it differs from the
config, as a dictionary {field: int, or str for 'router'} that has 'layers' at least. What they mean together with the
experts of `MoEConfig` is in `segments.py`. Host side; no arrays.
"""

from __future__ import annotations

from typing import Any

from moe_jax.errors import UserError

MODEL_FIELDS = ("layers", "moe_every", "hidden_dim", "dense_hidden_dim")
MOE_FIELDS = ("num_experts", "top_k", "router")
FIELDS = (*MODEL_FIELDS, *MOE_FIELDS)
WORDS = ("router",)  # whose values are names, not numbers


def layer_runs(
    *, layers: int, moe_every: int, segments: tuple[str, ...], experts_per_layer: tuple[int, ...], first_dense: int
) -> tuple[dict[str, Any], ...]:
    """Return the runs of equal units, first layers first; one {'layers': all} where no field says that layers differ.

    Arguments are the fields of `ModelConfig` of the same names.

    Raises:
      UserError: texts that cannot be read, runs that do not add up to the layers, or two ways to say it at once.
    """
    if segments:
        if experts_per_layer or first_dense:
            raise UserError(
                f"ModelConfig.segments {segments} says all that experts_per_layer {experts_per_layer} and first_dense "
                f"({first_dense}) could say; leave out the one or the others"
            )
        runs = tuple(read_segment(index, text) for index, text in enumerate(segments))
        total = sum(run["layers"] for run in runs)
        if total != layers:
            added = " + ".join(str(run["layers"]) for run in runs)
            raise UserError(
                f"ModelConfig.segments have {added} = {total} layers, but ModelConfig.layers is {layers}; make them "
                f"equal, for instance by ModelConfig.layers = {total}"
            )
        return runs
    if not 0 <= first_dense < layers:
        raise UserError(
            f"ModelConfig.first_dense ({first_dense}) must be at least 0 and below ModelConfig.layers ({layers}); "
            "some layers must have experts"
        )
    rest = layers - first_dense
    dense = ({"layers": first_dense, "moe_every": 0},) if first_dense else ()
    if not experts_per_layer:
        return (*dense, {"layers": rest})
    if not moe_every:
        raise UserError(
            "ModelConfig.experts_per_layer gives experts to layers, and ModelConfig.moe_every (0) says that none has "
            "any; set moe_every to 1 or 2"
        )
    if len(experts_per_layer) * moe_every != rest:
        counted = f" - first_dense ({first_dense})" if first_dense else ""
        raise UserError(
            f"ModelConfig.experts_per_layer has {len(experts_per_layer)} numbers for ModelConfig.layers ({layers})"
            f"{counted} with moe_every = {moe_every}; give {rest // moe_every}, one for each MoE layer"
        )
    runs = []
    for experts in experts_per_layer:
        if runs and runs[-1]["num_experts"] == experts:
            runs[-1]["layers"] += moe_every
        else:
            runs.append({"layers": moe_every, "num_experts": experts})
    return (*dense, *runs)


def read_segment(index: int, text: str) -> dict[str, Any]:
    """Return what one text such as 'layers=4 moe_every=2 num_experts=16' says."""
    place = f"ModelConfig.segments[{index}] ({text!r})"
    found: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        readable = bool(value) if name in WORDS else value.isascii() and value.isdecimal()
        if name not in FIELDS or not readable:
            known = ", ".join(f"{field}=NAME" if field in WORDS else f"{field}=N" for field in FIELDS)
            raise UserError(
                f"{place}: {word!r} is none of {known}; write such as 'layers=4 moe_every=2 num_experts=16'"
            )
        if name in found:
            raise UserError(f"{place} says {name} twice; leave one of them out")
        found[name] = value if name in WORDS else int(value)
    if found.get("layers", 0) < 1:
        raise UserError(f"{place} must say how many layers it has, at least 1, such as 'layers=4'")
    return found
