"""`parm`: s1 or s2, whichever is predicted to take less time; with a calibration of whole layers also the baseline.

Compared by bytes without a cluster file; by bytes, start-ups and what SAA lets run at the same time with one of links;
by fitted times of collectives or whole layers with a calibration. The choice is made once, for static sizes. Source:
Parm, section V, algorithm 1; `deepspeed` for small layers, and two halves, are our additions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from moe_jax.cluster import Cluster, Fit, ParmChoice, parm_choice
from moe_jax.cluster.layer_seconds import LayerShape, layer_seconds
from moe_jax.moe.schedules.contract import (
    LayerSizes,
    Schedule,
    ScheduleOptions,
    build_schedule,
    layout_of,
    register,
    schedule_record,
)
from moe_jax.moe.schedules.gather_choice import choose_gather, fits_of, read_cluster_of
from moe_jax.moe.schedules.pause_after_gate import PauseAfterGate
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.block_schedule import Prefetch, Times, stage_seconds

_REQUESTED_BY = "MoEConfig.schedule 'parm'"
_DEFAULTS = ScheduleOptions()
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

    chooses_from = ("deepspeed", "s1", "s2")

    @classmethod
    def build(cls, roles, sizes, options):
        name, sentence = _decide(roles, sizes, options)
        chosen = build_schedule(name, roles, sizes, options)
        if sentence:
            chosen.notes = (sentence, *chosen.notes)
        return chosen

    @classmethod
    def sentences(cls, roles, sizes, options):
        sentence = _decide(roles, sizes, options)[1]
        taken = "schedule 'parm' takes s1 without a comparison: with MeshConfig.model = 1 it is what s2 is"
        under_mp = roles.size(roles.model) > 1
        return [sentence or taken, *(PauseAfterGate.sentences(roles, sizes, options) if under_mp else ())]


def _decide(roles: Roles, sizes: LayerSizes, options: ScheduleOptions) -> tuple[str, str]:
    """Return (the schedule to take, a sentence that says so, by which rule, and the numbers; '' without a choice).

    Raises:
      UserError: the cluster is of other devices or lacks collectives.
    """
    cluster = None
    if options.cluster:
        cluster = read_cluster_of(options.cluster, roles)
        fits_of(cluster, roles, options.gather, options.transport, _REQUESTED_BY)
    # without MP s1 and s2 are one, and without ESP deepspeed is the same too
    if roles.size(roles.model) == 1 and (roles.size(roles.expert_shard) == 1 or not _knows_layers(cluster)):
        return "s1", ""
    choice = choose(roles, sizes, sizes.row_bytes, cluster, options, sizes.sent_bytes)
    unit, name = ("bytes", "") if cluster is None else ("s", cluster.name)
    others = "" if choice.deepspeed_seconds is None else f", deepspeed {choice.deepspeed_seconds:.4g} {unit}"
    less = "" if _waits(cluster, options) is sum else ", of exchanges what outlasts the other half's computation"
    return choice.schedule, (
        f"schedule 'parm' takes {choice.schedule} by {_RULES[choice.rule].format(name)}{less}: "
        f"s1 {choice.s1_seconds:.4g} {unit}, s2 {choice.s2_seconds:.4g} {unit}{others} in one layer"
    )


def choose(
    roles: Roles,
    sizes: LayerSizes,
    row_bytes: int,
    cluster: Cluster | None,
    options: ScheduleOptions = _DEFAULTS,
    sent_bytes: int = 0,
) -> ParmChoice:
    """Return Parm's choice for one layer, by `by_layers` where the cluster has fits for it, else by `by_equations`.

    Where tokens come split over the MP group, s1 needs no all-gather at its end, and the others need one at their
    start. Where something computes beside the exchanges and the cluster has `flops`, what it hides of them is no cost.

    Args:
      sizes: of the whole MP group's tokens; row_bytes: bytes of one row of M elements; options: of the layer.
      sent_bytes: of a row on its way to experts where it travels as float8, else 0.

    Raises:
      UserError: the cluster lacks a fit.
    """
    known = set() if cluster is None else {name for name, _ in cluster.fits}
    by = by_layers if cluster is not None and known >= _PARTS else by_equations
    return by(roles, sizes, row_bytes, cluster, options, sent_bytes)


def by_layers(roles, sizes, row_bytes, cluster, options=_DEFAULTS, sent_bytes=0) -> ParmChoice:
    """Return the choice by `layer_seconds`: rule 'parts', or 'layers' where whole layers were timed too; see `choose`.

    The whole step is compared but for the experts, which do the same work under all: s2 gates every token on each
    device of its MP group, and that may cost more than it saves. Only 'layers' compares `deepspeed` as well. There
    calibrations timed s2 with SAA, and the start of its layers belongs to that: under 'auto' s2 is judged so, even
    where it will run with AAS.
    """
    whole = _knows_layers(cluster)
    timed_with = "saa" if whole and options.gather == "auto" else options.gather
    far_rows = layout_of(roles, PauseAfterGate.bucket_rows(sizes, roles)).rows.far
    gather = choose_gather(timed_with, roles, far_rows, row_bytes, cluster, options.transport)[0]
    candidates = ["s1", "s2", "deepspeed"] if whole else ["s1", "s2"]
    waits = _waits(cluster, options)
    seconds = {}
    for name in candidates:
        shape = layer_shape(name, roles, sizes, row_bytes, options.split_tokens, sent_bytes=sent_bytes)
        seconds[name] = sum(layer_seconds(name, shape, None, cluster, gather, options.transport, waits))
    fastest = min(candidates, key=lambda name: seconds[name])
    return ParmChoice(fastest, seconds["s1"], seconds["s2"], seconds.get("deepspeed"), "layers" if whole else "parts")


def by_equations(roles, sizes, row_bytes, cluster, options=_DEFAULTS, sent_bytes=0) -> ParmChoice:
    """Return the choice by the closed form, seconds of a forward; without a cluster bytes, rule 'bytes'; see `choose`.

    Both schedules have two exchanges of x and one gather, so without SAA start-ups are alike and only what is gathered
    counts: N M bytes under s1, E C M = K f N M under s2. s2 is then taken where K f < 1, in no layer of Parm's table
    III (f of 1.2 and 2.4). With SAA it gains where its gathers run on other links than its rounds, as inside nodes
    while rows cross them; where all links have one speed, or one node has all devices, nothing is gained.

    Source: Parm, equations 13 and 14.
    """
    mp_size, esp_size = roles.size(roles.model), roles.size(roles.expert_shard)
    layout = layout_of(roles, PauseAfterGate.bucket_rows(sizes, roles))
    gather = choose_gather(options.gather, roles, layout.rows.far, row_bytes, cluster, options.transport)[0]
    x1 = layout_of(roles, schedule_record("s1").bucket_rows(sizes, roles)).total * esp_size
    whole = layout.total
    x2 = whole * esp_size // mp_size
    gathered = sizes.tokens * row_bytes
    if cluster is None:
        per_byte = Fit(0.0, 1.0)
        fits = a2a, gather_fit, saa = per_byte, per_byte, None
    else:
        fits = a2a, gather_fit, saa = fits_of(cluster, roles, gather, options.transport, _REQUESTED_BY)
    # buckets are rounded up differently, so each schedule has its own x
    both = [
        parm_choice(
            (x * (sent_bytes or row_bytes), x * row_bytes), whole * row_bytes, gathered, *fits, _waits(cluster, options)
        )
        for x in (x1, x2)
    ]
    s1, s2 = both[0].s1_seconds, both[1].s2_seconds
    if options.split_tokens:
        s1, s2 = s1 - gather_fit.seconds(gathered), s2 + gather_fit.seconds(gathered)
    rule = "bytes" if cluster is None else "equations" if cluster.fits else "links"
    return ParmChoice("s1" if s1 <= s2 else "s2", s1, s2, rule=rule)


def _waits(cluster: Cluster | None, options: ScheduleOptions) -> Callable[[Sequence[float]], float]:
    """Return a function of the seconds of one half's exchanges, there and back: those that a layer waits for.

    All of them, or in two halves, where the rate of computation is known, what outlasts the other half's computation,
    in the mean of forward and backward and with what the backward exchanges again. What an MP group gathers before or
    after is counted whole, though it may fit beside the other half's exchange.
    """
    if options.beside is None or cluster is None or cluster.flops is None:
        return sum
    work, halves = options.beside, Prefetch(halves=True)
    alone = Times(attention=work.attention / cluster.flops, experts=work.experts / cluster.flops)

    def added(seconds: float) -> float:
        with_it = dataclasses.replace(alone, exchange=seconds)
        return float(stage_seconds(halves, with_it, work.recompute) - stage_seconds(halves, alone, work.recompute)) / 4

    return lambda exchanges: sum(map(added, exchanges))


def _knows_layers(cluster: Cluster | None) -> bool:
    return cluster is not None and {"layer:s1", "layer:deepspeed"} <= {name for name, _ in cluster.fits}


def layer_shape(
    schedule: str, roles: Roles, sizes: LayerSizes, model_dim: int, split_tokens: bool = False, groups: int = 1,
    sent_bytes: int = 0,
) -> LayerShape:  # fmt: skip
    """Return the cost formulas' inputs for a layer under a schedule that has formulas ('pairwise' in `groups`)."""
    mp_size, ep_size, esp_size = (roles.size(axes) for axes in (roles.model, roles.expert, roles.expert_shard))
    layout = layout_of(roles, schedule_record(schedule).on_mesh(mp_size, esp_size).bucket_rows(sizes, roles))
    return LayerShape(
        tokens=sizes.tokens,
        model_dim=model_dim,
        rows=layout.rows.far,
        more_in_node=layout.piece("node"),
        more_own=layout.piece("own"),
        members_in_node=layout.near,
        ep_size=ep_size,
        esp_size=esp_size,
        mp_size=mp_size,
        top_k=sizes.top_k,
        experts=sizes.num_experts,
        split_tokens=split_tokens,
        groups=groups,
        sent_bytes=sent_bytes,
    )
