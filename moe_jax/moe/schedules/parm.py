"""`parm`: s1 or s2, whichever is predicted to take less time; with a calibration of whole layers also the baseline.

Compared by bytes without a cluster file; by bytes, start-ups and what SAA lets run at the same time with one of links;
by fitted times of collectives or whole layers with a calibration. The choice is made once, for static sizes. Source:
Parm, section V, algorithm 1; `deepspeed` for small layers, and two halves, are our additions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from moe_jax.cluster import Cluster, Fit, ParmChoice, cluster_named, parm_choice
from moe_jax.cluster.collectives import exchange_fits
from moe_jax.cluster.layer_seconds import LayerShape, layer_seconds
from moe_jax.moe.schedule import LayerSizes, Schedule, build_schedule, find_schedule, layout_of, register
from moe_jax.moe.schedules.s2 import PauseAfterGate, choose_gather
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.block_schedule import Prefetch, Times, stage_seconds

_REQUESTED_BY = "MoEConfig.schedule 'parm'"
_PARTS = {"gate", "regroup", "expert_step", "call"}
_RULES = {
    "bytes": "the closed form of Parm's equations 13 and 14 on bytes (no MoEConfig.cluster)",
    "links": "the closed form of Parm's equations 13 and 14 on the links of {!r}, which has no fits",
    "equations": "the closed form of Parm's equations 13 and 14 on the fits of {!r}",
    "parts": "the sum of a layer's parts, gate and moved rows too, on the fits of {!r}",
    "layers": "the whole-layer fits ('layer:SCHEDULE') of {!r}",
}


@register("parm")
class Parm(Schedule):
    """No schedule by itself: building it returns the one that is predicted to take less time."""

    one_piece = True
    chooses_from = ("deepspeed", "s1", "s2")

    @classmethod
    def build(cls, roles, sizes):
        name, sentence = _decide(roles, sizes)
        chosen = build_schedule(name, roles, sizes)
        if sentence:
            chosen.notes = (sentence, *chosen.notes)
        return chosen

    @classmethod
    def sentences(cls, roles, sizes):
        sentence = _decide(roles, sizes)[1]
        taken = "schedule 'parm' takes s1 without a comparison: with MeshConfig.model = 1 it is what s2 is"
        under_mp = roles.size(roles.model) > 1
        return [sentence or taken, *(PauseAfterGate.sentences(roles, sizes) if under_mp else ())]


def _decide(roles: Roles, sizes: LayerSizes) -> tuple[str, str]:
    """Return (the schedule to take, a sentence that says so, by which rule, and the numbers; '' without a choice).

    Raises:
      UserError: the cluster is of other devices or lacks collectives.
    """
    config = sizes.config
    cluster = cluster_named(config.cluster, roles.device_kind)
    if cluster is not None:
        cluster = cluster.on_mesh(roles.num_devices, roles.config.devices_per_node)
        _fits(cluster, roles, config.gather, config.transport)
    # without MP s1 and s2 are one, and without ESP deepspeed is the same too
    if roles.size(roles.model) == 1 and (roles.size(roles.expert_shard) == 1 or not _knows_layers(cluster)):
        return "s1", ""
    choice = choose(roles, sizes, cluster)
    unit, name = ("bytes", "") if cluster is None else ("s", cluster.name)
    others = "" if choice.deepspeed_seconds is None else f", deepspeed {choice.deepspeed_seconds:.4g} {unit}"
    less = "" if _waits(cluster, sizes) is sum else ", of exchanges what outlasts the other half's computation"
    return choice.schedule, (
        f"schedule 'parm' takes {choice.schedule} by {_RULES[choice.rule].format(name)}{less}: "
        f"s1 {choice.s1_seconds:.4g} {unit}, s2 {choice.s2_seconds:.4g} {unit}{others} in one layer"
    )


def choose(roles: Roles, sizes: LayerSizes, cluster: Cluster | None) -> ParmChoice:
    """Return Parm's choice for one layer, by `by_layers` where the cluster has fits for it, else by `by_equations`.

    Where tokens come split over the MP group, s1 needs no all-gather at its end, and the others need one at their
    start. Where something computes next to the exchanges and the cluster has `flops`, what it hides of them is no cost.

    Args:
      sizes: of the whole MP group's tokens, with the bytes of a row.

    Raises:
      UserError: the cluster lacks a fit.
    """
    known = set() if cluster is None else {name for name, _ in cluster.fits}
    by = by_layers if cluster is not None and known >= _PARTS else by_equations
    return by(roles, sizes, cluster)


def by_layers(roles: Roles, sizes: LayerSizes, cluster: Cluster) -> ParmChoice:
    """Return the choice by `layer_seconds`: rule 'parts', or 'layers' where whole layers were timed too; see `choose`.

    The whole step is compared but for the experts, which do the same work under all: s2 gates every token on each
    device of its MP group, and that may cost more than it saves. Only 'layers' compares `deepspeed` as well. There
    calibrations timed s2 with SAA, and the start of its layers belongs to that: under 'auto' s2 is judged so, even
    where it will run with AAS.
    """
    whole, config = _knows_layers(cluster), sizes.config
    timed_with = "saa" if whole and config.gather == "auto" else config.gather
    far_rows = layout_of(roles, PauseAfterGate.bucket_rows(sizes, roles)).rows.far
    gather = choose_gather(timed_with, roles, far_rows, sizes.row_bytes, cluster, config.transport)[0]
    candidates = ["s1", "s2", "deepspeed"] if whole else ["s1", "s2"]
    waits = _waits(cluster, sizes)
    seconds = {}
    for name in candidates:
        shape = layer_shape(name, roles, sizes)
        seconds[name] = sum(layer_seconds(shape, None, cluster, gather, config.transport, waits))
    fastest = min(candidates, key=lambda name: seconds[name])
    return ParmChoice(fastest, seconds["s1"], seconds["s2"], seconds.get("deepspeed"), "layers" if whole else "parts")


def by_equations(roles: Roles, sizes: LayerSizes, cluster: Cluster | None) -> ParmChoice:
    """Return the choice by the closed form, seconds of a forward; without a cluster bytes, rule 'bytes'; see `choose`.

    Both schedules have two exchanges of x and one gather, so without SAA start-ups are alike and only what is gathered
    counts: N M bytes under s1, E C M = K f N M under s2. s2 is then taken where K f < 1, in no layer of Parm's table
    III (f of 1.2 and 2.4). With SAA it gains where its gathers run on other links than its rounds, as inside nodes
    while rows cross them; where all links have one speed, or one node has all devices, nothing is gained.

    Source: Parm, equations 13 and 14.
    """
    mp_size, esp_size = roles.size(roles.model), roles.size(roles.expert_shard)
    config, row_bytes = sizes.config, sizes.row_bytes
    layout = layout_of(roles, PauseAfterGate.bucket_rows(sizes, roles))
    gather = choose_gather(config.gather, roles, layout.rows.far, row_bytes, cluster, config.transport)[0]
    x1 = layout_of(roles, find_schedule("s1").bucket_rows(sizes, roles)).total * esp_size
    whole = layout.total
    x2 = whole * esp_size // mp_size
    gathered = sizes.tokens * row_bytes
    if cluster is None:
        per_byte = Fit(0.0, 1.0)
        fits = a2a, gather_fit, saa = per_byte, per_byte, None
    else:
        fits = a2a, gather_fit, saa = _fits(cluster, roles, gather, config.transport)
    # buckets are rounded up differently, so each schedule has its own x
    both = [
        parm_choice(
            (x * (sizes.sent_bytes or row_bytes), x * row_bytes),
            whole * row_bytes,
            gathered,
            *fits,
            _waits(cluster, sizes),
        )
        for x in (x1, x2)
    ]
    s1, s2 = both[0].s1_seconds, both[1].s2_seconds
    if sizes.split_tokens:
        s1, s2 = s1 - gather_fit.seconds(gathered), s2 + gather_fit.seconds(gathered)
    rule = "bytes" if cluster is None else "equations" if cluster.fits else "links"
    return ParmChoice("s1" if s1 <= s2 else "s2", s1, s2, rule=rule)


def _fits(cluster: Cluster, roles: Roles, gather: str, transport: str):
    """Return `exchange_fits` on a mesh."""
    sizes = (roles.size(axes) for axes in (roles.expert, roles.expert_shard, roles.model))
    return exchange_fits(cluster, *sizes, gather, transport, _REQUESTED_BY)


def _waits(cluster: Cluster | None, sizes: LayerSizes) -> Callable[[Sequence[float]], float]:
    """Return a function of the seconds of one half's exchanges, there and back: those that a layer waits for.

    All of them, or in two halves, where the rate of computation is known, what outlasts the other half's computation,
    in the mean of forward and backward and with what the backward exchanges again. What an MP group gathers before or
    after is counted whole, though it may fit next to the other half's exchange.
    """
    if sizes.other_half is None or cluster is None or cluster.flops is None:
        return sum
    work, halves = sizes.other_half, Prefetch(halves=True)
    alone = Times(attention=work.attention / cluster.flops, experts=work.experts / cluster.flops)

    def added(seconds: float) -> float:
        with_it = dataclasses.replace(alone, exchange=seconds)
        return float(stage_seconds(halves, with_it, work.recompute) - stage_seconds(halves, alone, work.recompute)) / 4

    return lambda exchanges: sum(map(added, exchanges))


def _knows_layers(cluster: Cluster | None) -> bool:
    return cluster is not None and {"layer:s1", "layer:deepspeed"} <= {name for name, _ in cluster.fits}


def layer_shape(schedule: str, roles: Roles, sizes: LayerSizes, groups: int = 1) -> LayerShape:
    """Return the cost formulas' inputs, in bytes, for a layer under a schedule ('pairwise' in `groups`)."""
    mp_size, ep_size, esp_size = (roles.size(axes) for axes in (roles.model, roles.expert, roles.expert_shard))
    record = find_schedule(schedule).on_mesh(mp_size, esp_size)
    layout = layout_of(roles, record.bucket_rows(sizes, roles))
    return LayerShape(
        schedule=record.name,
        gates_group=record.gates_group,
        cuts_buckets=record.cuts_buckets,
        tokens=sizes.tokens,
        model_dim=sizes.row_bytes,
        rows=layout.rows.far,
        more_in_node=layout.piece("node"),
        more_own=layout.piece("own"),
        members_in_node=layout.near,
        ep_size=ep_size,
        esp_size=esp_size,
        mp_size=mp_size,
        top_k=sizes.config.top_k,
        experts=sizes.config.num_experts,
        split_tokens=sizes.split_tokens,
        groups=groups,
        sent_bytes=sizes.sent_bytes,
    )
