"""The segments of a model: runs of equal units, each with experts, placement and expert-parallel degree of its own.

What stands once for each is a dictionary {name: part}: units of all; bank, tables, homes, plans of those with experts.
Source: DeepSpeed-MoE (Rajbhandari et al. 2022), section 4.2, "flexible multi-expert and multi-data parallelism".
Letters: docs/notation.md.
"""

# A segment reads like a model of its own between the embedding and the head: its `config` and `moe` are those of a
# model whose layers are all alike. On a mesh its roles are those of a mesh on which the innermost min(E, D) devices of
# the expert axis are its expert-parallel group, and the others hold replicas, as `data` does. So an expert's tokens
# come from the whole batch, shared evenly among its replicas, and its gradient is summed over them.

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.errors import UserError
from moe_jax.models.config import MODEL_FIELDS, MOE_FIELDS, ModelConfig
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.routers import build_router, check_knobs
from moe_jax.parallel.mesh import MeshConfig, Roles, ep_degree

BANK = "bank"


def flatten(tree, prefix: str = "") -> dict[str, Any]:
    """Return {name: leaf} of a tree, names such as 'params/dense/norm/scale' or 'params/bank/segment_0/w_in'."""
    flat = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        # a dictionary's key, a named tuple's field, or an index
        steps = (getattr(step, next(a for a in ("key", "name", "idx") if hasattr(step, a))) for step in path)
        name = "/".join(map(str, ([prefix] if prefix else []) + list(steps)))
        assert name not in flat, f"two leaves are called {name}"
        flat[name] = leaf
    return flat


def is_bank(name: str) -> bool:
    """Say whether a leaf is part of the expert bank (or of a moment of it)."""
    return BANK in name.split("/")


def segment_of(name: str) -> str:
    """Return the segment that a leaf of the bank is of."""
    return name.split("/")[name.split("/").index(BANK) + 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of equal units.

    Attributes:
      name: 'segment_0', 'segment_1', ..., in the order of the layers.
      config: as of a model of these layers alone.
      moe: its experts, K and the rest of the layer; means nothing where `has_experts` is False.
      first_layer: MoE layers before this segment.
      depth: Transformer blocks of the whole model, by which initial values are scaled.
    """

    name: str
    config: ModelConfig
    moe: MoEConfig
    first_layer: int
    depth: int

    @property
    def has_experts(self) -> bool:
        return self.config.moe_every > 0

    def roles(self, roles: Roles) -> Roles:
        """Return the roles of this segment on the model's mesh.

        Raises:
          UserError: experts that do not spread evenly over the expert axis.
        """
        return roles.for_experts(self.moe.num_experts) if self.has_experts else roles


def segments_of(config: ModelConfig, moe: MoEConfig) -> tuple[Segment, ...]:
    """Return the segments of a model, first layers first.

    Raises:
      UserError: a segment whose sizes do not fit together, or a model without experts.
    """
    runs = config.runs
    whole = dict.fromkeys(("segments", "experts_per_layer"), ()) | {"first_dense": 0}
    found: list[Segment] = []
    for index, run in enumerate(runs):
        with _named(index, run):
            part = dataclasses.replace(config, **whole, **{name: run[name] for name in MODEL_FIELDS if name in run})
            layer = dataclasses.replace(moe, **{name: run[name] for name in MOE_FIELDS if name in run})
        first = sum(segment.config.moe_layers for segment in found)
        name = f"segment_{index}"
        found.append(Segment(name=name, config=part, moe=layer, first_layer=first, depth=config.layers))
    if not any(segment.has_experts for segment in found):
        raise UserError(
            f"ModelConfig.moe_every ({config.moe_every}) leaves no layer with experts; set it to 1 or 2, or let a "
            "segment of ModelConfig.segments say moe_every=1"
        )
    numbers = sorted({segment.moe.top_k for segment in with_experts(found)})
    if moe.record_choices and len(numbers) > 1:  # those of all layers are one array [L, N, K]
        raise UserError(
            f"MoEConfig.record_choices (True) needs one top_k for all layers, but the segments of the model have "
            f"{', '.join(map(str, numbers))}; set MoEConfig.record_choices = False, or top_k alike in all segments"
        )
    check_knobs(moe, {segment.moe.router for segment in with_experts(found)})
    return tuple(found)


@contextlib.contextmanager
def _named(index: int, run: dict[str, Any]) -> Iterator[None]:
    """Say in a UserError which segment it is of; run: what `ModelConfig.runs` has of it."""
    try:
        yield
    except UserError as error:
        words = " ".join(f"{name}={value}" for name, value in run.items())
        raise UserError(f"segment {index} of the model ({words}): {error}") from error


def with_experts(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return the segments that have MoE layers."""
    return tuple(segment for segment in segments if segment.has_experts)


def expert_counts(config: ModelConfig, moe: MoEConfig, mesh: MeshConfig, devices: int) -> tuple[int, ...]:
    """Return E of each segment with experts, for the mesh of so many devices that is to hold them.

    Raises:
      UserError: E that does not spread evenly over the expert axis, or a mesh of another size.
    """
    axis, counts = mesh.resolve(devices).expert, []
    for index, (segment, run) in enumerate(zip(segments_of(config, moe), config.runs, strict=True)):
        if segment.has_experts:
            counts.append(segment.moe.num_experts)
            with _named(index, run) if len(config.runs) > 1 else contextlib.nullcontext():
                ep_degree(segment.moe.num_experts, axis)
    return tuple(counts)


def own_layers(counts, segment: Segment):
    """Return a segment's counts [L, E] of those of all MoE layers, without the zeros of the experts that it lacks."""
    layers = slice(segment.first_layer, segment.first_layer + segment.config.moe_layers)
    return counts[layers, : segment.moe.num_experts]


# What routers keep beside parameters: leaves in the gate of their layer, so that checkpoints, --init_from and
# evaluation have them, which no optimizer moves but the router itself.
def with_router_state(segments: tuple[Segment, ...], before, after, loads):
    """Return a tree like the parameters, `after`, with the routers' state of the parameters `before`.

    Args:
      segments: of the model.
      loads: int32 [L, sources, E] of the whole step, all its microbatches together, as in `StepStats`, by which the
        state moves on; None leaves it as it is.
    """
    units = dict(after["dense"]["units"])
    for segment in with_experts(segments):
        router, old = build_router(segment.moe), before["dense"]["units"][segment.name]["gate"]
        state = {name: old[name] for name in router.state}
        if state and loads is not None:
            state = router.next_state(state, own_layers(jnp.sum(loads, axis=1), segment))
        unit = units[segment.name]
        units[segment.name] = {**unit, "gate": {**unit["gate"], **state}}
    return {**after, "dense": {**after["dense"], "units": units}}
