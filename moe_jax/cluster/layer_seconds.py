"""The time of one MoE layer, forward and backward, predicted from fits: collectives, experts, gating, moving rows.

Inputs: sizes of one layer under a schedule, and a cluster whose fits calibrate wrote. Outputs: seconds, part by part.
The sum is a synchronous layer: nothing overlaps, as on a CPU; the all-reduce of gradients is left out. Where whole
layers were timed too (fit `layer:SCHEDULE`), communication and computation are scaled by what they cost there, and the
call is the start of such a layer.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence

from moe_jax.cluster.cluster import Cluster
from moe_jax.cluster.fit_names import fit_name, strided_name
from moe_jax.cluster.fits import Fit
from moe_jax.cluster.volumes import LayerShape, Transfer, formulas_of, index_transfers, layer_transfers


class LayerSeconds(typing.NamedTuple):
    """Predicted seconds of one forward and backward."""

    communication: float
    experts: float
    gate: float
    rows: float
    call: float

    @property
    def computation(self) -> float:
        return self.experts + self.gate + self.rows

    @property
    def total(self) -> float:
        return sum(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """One device's experts, forward and backward: FLOPs and bytes touched, as `grouped_matmul/ffn_cost.py` counts."""

    flops: float
    bytes: float


def layer_seconds(
    schedule: str,
    shape: LayerShape,
    load: ExpertLoad | None,
    cluster: Cluster,
    *,
    gather: str = "saa",
    transport: str = "all_to_all",
    item: int = 4,
    requested_by: str = "the layer's cost",
    waits: Callable[[Sequence[float]], float] = sum,
) -> LayerSeconds:
    """Predict one layer.

    Args:
      schedule: a name in `FORMULAS` of `volumes.py`.
      shape: its sizes, rows as `volumes.py` says; load: of the experts, None leaves them out; item: bytes of a number.
      gather, transport: as in `MoEConfig`; a transport is looked up under its name.
      waits: seconds of the exchanges of one direction, there and back -> those that the layer waits for: all, unless
        something hides them. There and back count as equally long; what an MP group gathers before or after is none.

    Raises:
      UserError: the cluster lacks a fit; it names the fit and `requested_by`.
    """
    if transport == "coordinated":  # of other collectives, not one of its own
        ways = layer_transfers(schedule, shape, gather, transport)
    else:
        ways = [[_carried(move, transport) for move in way] for way in layer_transfers(schedule, shape, gather)]
    moving = 0.0
    for way in ways:
        exchanges = list(way)
        outside = [move for move in shape.whole(formulas_of(schedule).in_parts) if move in way]
        for move in outside:
            exchanges.remove(move)
        seconds = transfer_seconds(exchanges, shape, cluster, item, requested_by)
        moving += transfer_seconds(outside, shape, cluster, item, requested_by) + waits((seconds / 2, seconds / 2))
    moving += transfer_seconds(index_transfers(schedule, shape, transport=transport), shape, cluster, 4, requested_by)
    work = formulas_of(schedule).work(shape)
    row = shape.model_dim * item
    alone = LayerSeconds(
        communication=moving,
        experts=0.0 if load is None else cluster.fit("expert_step", requested_by).seconds(load.flops, load.bytes),
        gate=cluster.fit("gate", requested_by).seconds(
            work.gated, 2 * row * (work.packed + shape.top_k * work.combined)
        ),
        rows=cluster.fit("regroup", requested_by).seconds(work.received, 4 * row * work.received)
        if work.received
        else 0.0,
        call=cluster.fit("call", requested_by).alpha,
    )
    whole = dict(cluster.fits).get(layer_name("s1" if shape.mp_size == 1 and schedule == "s2" else schedule))
    return alone if whole is None else _together(alone, whole)


def layer_name(schedule: str) -> str:
    """Return the name of the fit over whole layers: x seconds of communication, y of computation, each alone."""
    return f"layer:{schedule}"


def _together(alone: LayerSeconds, whole: Fit) -> LayerSeconds:
    return LayerSeconds(
        communication=whole.beta * alone.communication,
        experts=whole.gamma * alone.experts,
        gate=whole.gamma * alone.gate,
        rows=whole.gamma * alone.rows,
        call=whole.alpha,
    )


def transfer_seconds(
    transfers: list[Transfer], shape: LayerShape, cluster: Cluster, item: int, requested_by: str
) -> float:
    """Return the time of transfers one after the other; the rounds and gathers of SAA count as one collective."""
    seconds, rest = 0.0, list(transfers)
    rounds = [t for t in rest if t.collective == "permute" and shape.mp_size > 1]
    gathers = [t for t in rest if t.collective == "all_gather" and t.group == "model" and t.calls == shape.ep_size]
    if rounds and gathers:
        size = shape.ep_size * shape.esp_size
        part = rounds[0].elements * size * item
        whole = gathers[0].elements * gathers[0].calls * item
        seconds += cluster.fit(fit_name("saa", size, shape.mp_size, shape.esp_size), requested_by).seconds(part, whole)
        rest.remove(rounds[0])
        rest.remove(gathers[0])
    for transfer in rest:
        fit = cluster.fit(transfer_fit(transfer, shape), requested_by)
        seconds += transfer.calls * max(0.0, fit.seconds(transfer.elements * (transfer.item or item)))
    return seconds


def _carried(transfer: Transfer, transport: str) -> Transfer:
    return transfer._replace(collective=transport) if transfer.collective == "all_to_all" else transfer


def transfer_fit(transfer: Transfer, shape: LayerShape) -> str:
    """Return the name of the fit that a transfer of this layer is predicted by."""
    both = shape.ep_size * shape.esp_size
    size, stride = {
        "model": (shape.mp_size, 1),
        "expert": (shape.ep_size, shape.esp_size),
        "expert_shard": (shape.esp_size, 1),
        "node": (shape.members_in_node * shape.esp_size, 1),
        "expert_node": (shape.members_in_node, shape.esp_size),
        "expert+expert_shard": (both, 1),
        "pairwise_group": (both // shape.groups, 1),
        "pairwise_ring": (shape.groups, both // shape.groups),
        # an MP group's EP members stand N_ESP apart; calibrations time neighbours
        "model_expert": (shape.mp_size // shape.esp_size, 1),
        "expert_across": (shape.ep_size // max(1, shape.mp_size // shape.esp_size), max(shape.mp_size, shape.esp_size)),
    }[transfer.group]
    return strided_name(transfer.collective, size, stride)
