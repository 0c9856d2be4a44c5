"""What the GPU benchmark consists of: items in order of value, each of some parts. Standard library alone.

A part is one call in a child process. Parts of one item with the same environment share a child until one of them
fails; the next parts get a new one, since after an error of a kernel CUDA does not work in that process.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One call.

    Attributes:
      name: within its item.
      call: 'module:function'; it takes a `context.Context` and `arguments`.
      arguments: for the function.
      limit: seconds, its child's start included.
      flags: for XLA_FLAGS of its process.
      unless: name of a part of this item; this one runs only if that one went wrong.
      after: name of a part of this item; this one runs only if that one went well.
    """

    name: str
    call: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    limit: float = 60
    flags: str = ""
    unless: str = ""
    after: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One item of the day.

    Attributes:
      number, name, title: as in docs/results.md.
      budget: seconds of all its parts; least: seconds that must be left for it to be begun.
    """

    number: int
    name: str
    title: str
    budget: float
    least: float
    parts: tuple[Part, ...]


CUDNN_RAGGED = "xla_gpu_experimental_use_ragged_dot_fusion"
GROUPED_GEMM = "xla_gpu_experimental_use_ragged_dot_grouped_gemm"
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def _part(name: str, call: str, **fields) -> Part:
    return Part(name=name, call=f"gpu_day_items.{call}", **fields)


def _grouped(name: str, limit: float = 45, **arguments) -> Part:
    return _part(name, "grouped:measure", arguments={"implementation": name, **arguments}, limit=limit)


def _variant(name: str, limit: float = 40, **arguments) -> Part:
    return _part(name, "choices:measure", arguments=arguments, limit=limit)


def _resumed(kind: str, flags: str) -> tuple[Part, ...]:
    found, before = [_part(f"gradient, {kind}", "determinism:gradient", limit=40, flags=flags)], ""
    for name, call in (("straight", "straight"), ("killed", "until_killed"), ("resumed", "resumed")):
        part = _part(f"{name}, {kind}", f"determinism:{call}", arguments={"kind": kind}, flags=flags, after=before)
        found.append(dataclasses.replace(part, limit=30 if before else 40))
        before = part.name
    return tuple(found)


ITEMS = (
    Item(
        number=1, name="grouped_matmuls", title="Grouped matmuls against float32", budget=130, least=20,
        parts=(
            _grouped("hopper"),
            _grouped("ragged_cudnn", of="ragged", option=CUDNN_RAGGED),
            _grouped("ragged_grouped_gemm", of="ragged", option=GROUPED_GEMM),
            _grouped("ragged"),
            _grouped("fused"),
        ),
    ),
    Item(
        number=2, name="whole_model", title="training.run, GPT-MoE-S whole, batch 8", budget=160, least=60,
        parts=(
            _part("auto", "whole:train", arguments={"grouped_matmul": "auto"}, limit=130),
            _part("fused", "whole:train", arguments={"grouped_matmul": "fused"}, limit=130, unless="auto"),
        ),
    ),
    Item(
        number=3, name="instructions", title="inspect --profile: measured next to modelled, instruction by instruction",
        budget=70, least=30, parts=(_part("profile", "profiled:measure", limit=70),),
    ),
    Item(
        number=4, name="choices", title="A / B of 10 steps at 4 layers, unguided", budget=115, least=30,
        parts=(
            _variant("base"),
            _variant("xla_gpu_enable_command_buffer = ''", options={"xla_gpu_enable_command_buffer": ""}),
            _variant("stack = 'unrolled'", model={"stack": "unrolled"}),
            _variant("attention = 'blocks'", model={"attention": "blocks"}),
            _variant("attention = 'cudnn'", model={"attention": "cudnn"}),
            _variant("loss_chunk x 4", chunk=4),
            _variant("loss_chunk x 16", chunk=16),
            _variant("overlap = 'halves'", model={"overlap": "halves"}),
            _variant("document_mask = True", model={"document_mask": True}),
            _variant("base again"),
        ),
    ),
    Item(
        number=5, name="conditional", title="What a conditional costs: a scan of 12 turns", budget=25, least=12,
        parts=(_part("scan", "alone:conditional", limit=25),),
    ),
    Item(
        number=6, name="routing", title="Routing alone", budget=25, least=12,
        parts=(
            _part("top_k", "alone:top_k", limit=15),
            _part("sorts", "alone:sorts", limit=20),
        ),
    ),
    Item(
        number=7, name="determinism", title="The same again: gradients, and a run that was killed", budget=95, least=20,
        parts=(*_resumed("default", ""), *_resumed("deterministic ops", DETERMINISTIC)),
    ),
    Item(
        number=8, name="after_gate", title="Rules after the gate alone", budget=30, least=12,
        parts=tuple(
            _part(name, "alone:after_gate", arguments={"planner": name}, limit=20)
            for name in ("fastermoe", "hecate", "balanced")
        ),
    ),
    Item(
        number=9, name="layer", title="One MoE layer over a dense FFN of equal FLOPs", budget=40, least=15,
        parts=(
            _part("bfloat16", "layer:measure", arguments={"dtype": "bfloat16"}, limit=40),
            _part("float32", "layer:measure", arguments={"dtype": "float32"}, limit=40),
            _part("tf32", "layer:tf32_error", limit=20),
        ),
    ),
    Item(
        number=10, name="tune", title="moe_jax.tune at 4 layers: what measuring chooses", budget=150, least=60,
        parts=(_part("search", "tuned:measure", arguments={"seconds": 120}, limit=150),),
    ),
)  # fmt: skip
PROBE = _part("machine", "configs:describe_machine", limit=90)
