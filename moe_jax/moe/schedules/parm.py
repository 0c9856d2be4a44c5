"""`parm`: s1 or s2, whichever is predicted to take less time; with a calibration of whole layers also the baseline.

Compared are a layer's exchanges by the links of a cluster, with start-ups and what SAA lets run at the same time, or by
a calibration's fits; with fits of the gate and of moved rows those too, with fits of whole layers whole layers. The
choice is made once, for static sizes. Source: Parm, section V, algorithm 1; `deepspeed` for small layers, and two
halves, are our additions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from moe_jax.cluster import Cluster, cluster_named
from moe_jax.cluster.layer_seconds import LayerShape, layer_seconds, moving_seconds
from moe_jax.moe.schedule import LayerSizes, Schedule, build_schedule, find_schedule, layout_of, register
from moe_jax.moe.schedules.s2 import PauseAfterGate, choose_gather
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.block_schedule import Prefetch, Times, stage_seconds

_RULES = {
    "links": "Parm's equations 13 and 14 on the links of {!r}, which has no fits",
    "equations": "Parm's equations 13 and 14 on the fits of {!r}",
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
    cluster = cluster_named(sizes.config.cluster, roles.device_kind)
    cluster = cluster.on_mesh(roles.num_devices, roles.config.devices_per_node)
    rule = rule_of(cluster)
    # without MP s1 and s2 are one, and without ESP deepspeed is the same too
    if roles.size(roles.model) == 1 and (roles.size(roles.expert_shard) == 1 or rule != "layers"):
        return "s1", ""
    seconds = choose(roles, sizes, cluster)
    schedule = min(seconds, key=seconds.__getitem__)
    listed = ", ".join(f"{name} {value:.4g} s" for name, value in seconds.items())
    less = "" if _waits(cluster, sizes) is float else ", of exchanges what outlasts the other half's computation"
    return schedule, (
        f"schedule 'parm' takes {schedule} by {_RULES[rule].format(cluster.name)}{less}: {listed} in one layer"
    )


def rule_of(cluster: Cluster) -> str:
    """Return by which of `_RULES` a choice is made."""
    known = {name for name, _ in cluster.fits}
    if not known >= {"gate", "regroup", "expert_step", "call"}:
        return "equations" if known else "links"
    return "layers" if known >= {"layer:s1", "layer:deepspeed"} else "parts"


def choose(roles: Roles, sizes: LayerSizes, cluster: Cluster) -> dict[str, float]:
    """Return {schedule: seconds of one layer, forward and backward}, of which the least is taken, of equal ones s1.

    By exchanges alone, rules 'links' and 'equations', s1 and s2 both have two of x and one gather, so without SAA
    start-ups are alike and only what is gathered counts: N M bytes under s1, E C M = K f N M under s2. s2 is then taken
    where K f < 1, in no layer of Parm's table III (f of 1.2 and 2.4). With SAA it gains where its gathers run on other
    links than its rounds, as inside nodes while rows cross them.

    Rules 'parts' and 'layers' compare the whole step but for the experts, which do the same work under all: s2 gates
    every token on each device of its MP group, and that may cost more than it saves. Only 'layers' has `deepspeed`.
    There calibrations timed s2 with SAA, and the start of its layers belongs to that: under 'auto' s2 is judged so,
    even where it will run with AAS.

    Where something computes next to the exchanges and the cluster has `flops`, what it hides of them is no cost.

    Args:
      sizes: of the whole MP group's tokens, with the bytes of a row.

    Raises:
      UserError: the cluster lacks a fit.
    """
    rule, config = rule_of(cluster), sizes.config
    timed_with = "saa" if rule == "layers" and config.gather == "auto" else config.gather
    far_rows = layout_of(roles, PauseAfterGate.bucket_rows(sizes, roles)).rows.far
    gather = choose_gather(timed_with, roles, far_rows, sizes.row_bytes, cluster, config.transport)[0]
    how, seconds = (cluster, gather, config.transport, _waits(cluster, sizes)), {}
    for name in ("s1", "s2", "deepspeed") if rule == "layers" else ("s1", "s2"):
        shape = layer_shape(name, roles, sizes)
        by_exchanges = rule in ("links", "equations")
        seconds[name] = moving_seconds(shape, *how) if by_exchanges else sum(layer_seconds(shape, None, *how))
    return seconds


def _waits(cluster: Cluster, sizes: LayerSizes) -> Callable[[float], float]:
    """Return a function of the seconds of one half's exchanges in one direction: those that a layer waits for.

    All of them, or in two halves, where the rate of computation is known, what outlasts the other half's computation,
    in the mean of forward and backward and with what the backward exchanges again. There and back count as equally
    long. What an MP group gathers before or after counts whole, though it may fit next to the other half's exchange.
    """
    if sizes.other_half is None or cluster.flops is None:
        return float
    work, halves = sizes.other_half, Prefetch(halves=True)
    alone = Times(attention=work.attention / cluster.flops, experts=work.experts / cluster.flops)

    def waits(seconds: float) -> float:
        with_it = dataclasses.replace(alone, exchange=seconds / 2)
        return float(stage_seconds(halves, with_it, work.recompute) - stage_seconds(halves, alone, work.recompute)) / 2

    return waits


def layer_shape(schedule: str, roles: Roles, sizes: LayerSizes, groups: int = 1) -> LayerShape:
    """Return the cost formulas' inputs, in bytes, for a layer under a schedule ('pairwise' in `groups`)."""
    mp_size, ep_size, esp_size = (roles.size(axes) for axes in (roles.model, roles.expert, roles.expert_shard))
    record = find_schedule(schedule).on_mesh(mp_size, esp_size)
    shared = record.shared_rows(sizes, roles)
    layout = layout_of(roles, record.bucket_rows(sizes, roles) if shared is None else shared[0])
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
