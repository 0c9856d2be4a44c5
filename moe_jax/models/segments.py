"""The segments of a model: runs of equal units, each with experts, placement and expert-parallel degree of its own.

Inputs: `ModelConfig`, `MoEConfig`, and for what lies on devices the mesh's `Roles`. Outputs: `Segment`s; and the rule
by which trees keep what stands once for each of them.

A segment reads like a model of its own between the embedding and the head: its `config` and `moe` are those of a model
whose layers are all alike, so whatever is computed for such a model (leaves, bytes, placements, plans) is computed for
a segment by the same functions. On a mesh its roles are those of a mesh on which the innermost min(E, D) devices of the
expert axis are its expert-parallel group, and the others hold replicas, as `data` does. So an expert's tokens come from
the whole batch, shared evenly among its replicas, and its gradient is summed over them. Source: DeepSpeed-MoE
(Rajbhandari et al. 2022), section 4.2, "flexible multi-expert and multi-data parallelism".

Where a model has one segment, a tree holds that segment's part itself; where it has several, a dictionary {name: part}.
For units every segment counts; for the bank, tables, homes and plans only those with experts.
Letters: docs/notation.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from moe_jax.errors import UserError
from moe_jax.mesh.roles import MeshConfig, Roles, ep_degree
from moe_jax.models.config import ModelConfig
from moe_jax.models.leaf_names import SEGMENT
from moe_jax.models.segment_text import MODEL_FIELDS, MOE_FIELDS
from moe_jax.moe.config import MoEConfig
from moe_jax.routers import check_knobs


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

    @property
    def units(self) -> int:
        """U, the turns of its loop."""
        return self.config.units

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
        name = f"{SEGMENT}{index}"
        found.append(Segment(name=name, config=part, moe=layer, first_layer=first, depth=config.layers))
    if not any(segment.has_experts for segment in found):
        raise UserError(
            f"ModelConfig.moe_every ({config.moe_every}) leaves no layer with experts; set it to 1 or 2, or let a "
            "segment of ModelConfig.segments say moe_every=1"
        )
    _check_recorded(with_experts(found))
    check_knobs(moe, {segment.moe.router for segment in with_experts(found)})
    return tuple(found)


def _check_recorded(segments: tuple[Segment, ...]) -> None:
    """Raise a UserError where the choices of all layers, [L, N, K], are to be recorded and K differs."""
    numbers = sorted({segment.moe.top_k for segment in segments})
    if segments[0].moe.record_choices and len(numbers) > 1:
        raise UserError(
            f"MoEConfig.record_choices (True) needs one top_k for all layers, but the segments of the model have "
            f"{', '.join(map(str, numbers))}; set MoEConfig.record_choices = False, or top_k alike in all segments"
        )


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


def joined(parts: dict[str, Any]) -> Any:
    """Return the tree of what stands once per segment, from {name: part}: the only part, or all by name."""
    return next(iter(parts.values())) if len(parts) == 1 else parts


def part_of(tree: Any, segment: Segment, segments: tuple[Segment, ...]) -> Any:
    """Return the part of `segment` in a tree of `segments`, as `joined` made it; None stays None."""
    return tree if tree is None or len(segments) == 1 else tree[segment.name]


def path_of(segment: Segment, segments: tuple[Segment, ...]) -> tuple[str, ...]:
    """Return the keys that lead to the part of `segment` in a tree of `segments`."""
    return () if len(segments) == 1 else (segment.name,)


def own_layers(array, segment: Segment):
    """Return a segment's part [L, E, ...] of what is known of all layers and experts [all MoE layers, most, ...]."""
    layers = slice(segment.first_layer, segment.first_layer + segment.config.moe_layers)
    return array[layers, : segment.moe.num_experts]


def own_loads(loads, segment: Segment, sources: int):
    """Return a segment's counts [L, sources, E] of those of all layers, without the zeros of what it lacks.

    Args:
      loads: integers [all MoE layers, most sources, most experts].
      sources: D of the segment's expert-parallel group.
    """
    layers = slice(segment.first_layer, segment.first_layer + segment.config.moe_layers)
    return loads[layers, :sources, : segment.moe.num_experts]
