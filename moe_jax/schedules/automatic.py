"""`parm`: s1 or s2, whichever is predicted to take less time; with a calibration of whole layers also the baseline.

Inputs: what every schedule gets. Outputs: what the chosen one returns. Without a calibration file the two are compared
by bytes, at one speed on all links; with one, by fitted times of the collectives on the groups of this mesh. The choice
is made once, for static sizes. Source: Parm, section V, algorithm 1; that a small layer, bound by the start of its
collectives, may run under `deepspeed` is our addition.
"""

from __future__ import annotations

import logging

from moe_jax.cluster import Cluster, Fit, ParmChoice, parm_choice, read_cluster
from moe_jax.cluster.fit_names import fit_name
from moe_jax.cluster.layer_seconds import layer_name, layer_seconds
from moe_jax.cluster.volumes import LayerShape
from moe_jax.mesh.roles import Roles
from moe_jax.schedules.baseline import build_deepspeed
from moe_jax.schedules.contract import LayerSizes, ScheduleOptions, layout_of, register
from moe_jax.schedules.expert_parallel import build_s1
from moe_jax.schedules.pause_after_gate import build_s2, whole_bucket_rows

_LOG = logging.getLogger(__name__)
_REQUESTED_BY = "MoEConfig.schedule 'parm'"


@register("parm")
def build_parm(roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
    """Build the schedules to choose from; the bytes of a row, known at the first call, decide which one runs."""
    cluster = None
    if options.cluster:
        cluster = read_cluster(options.cluster)
        cluster.check_devices(roles.num_devices, "MeshConfig")
        fits_of(cluster, roles, options.gather, options.transport)
    alone = roles.size(roles.model) == 1  # then s1 and s2 are one, and without ESP deepspeed too
    if alone and (roles.size(roles.expert_shard) == 1 or not _knows_layers(cluster)):
        return build_s1(roles, sizes, options)
    builders = {"s1": build_s1, "s2": build_s2, "deepspeed": build_deepspeed}
    built = {name: build(roles, sizes, options) for name, build in builders.items() if not (alone and name == "s2")}
    said = set()

    def schedule(x, token_ids, gate, placed):
        row_bytes = x.shape[-1] * x.dtype.itemsize
        choice = choose(roles, sizes, row_bytes, cluster, options.gather, options.transport, options.split_tokens)
        if choice not in said:
            said.add(choice)
            _LOG.warning(_sentence(choice, cluster))
        return built[choice.schedule](x, token_ids, gate, placed)

    return schedule


def choose(
    roles: Roles,
    sizes: LayerSizes,
    row_bytes: int,
    cluster: Cluster | None,
    gather: str = "saa",
    transport: str = "all_to_all",
    split_tokens: bool = False,
) -> ParmChoice:
    """Return Parm's choice for one layer.

    Without a cluster its 'seconds' are bytes of a forward. With the fits of collectives alone they are the paper's, of
    a forward too. With a file that also has fits of gating and moving rows the whole step is compared but for the
    experts, which do the same work under both: s2 gates every token on each device of its MP group, and that may cost
    more than it saves. With one that has whole layers too `deepspeed` is compared as well. Where tokens come split over
    the MP group, s1 needs no all-gather at its end, and the others need one at their start.

    Args:
      sizes: of the whole MP group's tokens; row_bytes: bytes of one row of M elements.
    """
    known = set() if cluster is None else {name for name, _ in cluster.fits}
    if {"gate", "regroup", "expert_step", "call"} <= known:
        assert cluster is not None
        candidates = ["s1", "s2"]
        if _knows_layers(cluster):
            candidates.append("deepspeed")
        seconds = {}
        for name in candidates:
            shape = layer_shape(name, roles, sizes, row_bytes, split_tokens, transport=transport)
            asked = layer_seconds(
                name, shape, None, cluster, gather=gather, transport=transport, item=1, requested_by=_REQUESTED_BY
            )
            seconds[name] = asked.total
        fastest = min(candidates, key=lambda name: seconds[name])
        return ParmChoice(fastest, seconds["s1"], seconds["s2"], seconds.get("deepspeed"))
    mp_size, ep_size = roles.size(roles.model), roles.size(roles.expert)
    esp_size = roles.size(roles.expert_shard)
    x1 = layout_of(roles, sizes.split(mp_size).bucket_rows(ep_size), transport).total * esp_size * row_bytes
    whole = layout_of(roles, whole_bucket_rows(sizes, roles), transport).total * row_bytes
    x2 = whole * esp_size // mp_size
    gathered = sizes.tokens * row_bytes
    if cluster is None:
        per_byte = Fit(0.0, 1.0)
        a2a, gather_fit, saa = per_byte, per_byte, None
    else:
        a2a, gather_fit, saa = fits_of(cluster, roles, gather, transport)
    # buckets are rounded up differently, so each schedule has its own x
    s1 = parm_choice(x1, whole, gathered, a2a, gather_fit, saa).s1_seconds
    s2 = parm_choice(x2, whole, gathered, a2a, gather_fit, saa).s2_seconds
    if split_tokens:
        s1, s2 = s1 - gather_fit.seconds(gathered), s2 + gather_fit.seconds(gathered)
    return ParmChoice("s1" if s1 <= s2 else "s2", s1, s2)


def _knows_layers(cluster: Cluster | None) -> bool:
    return cluster is not None and {layer_name("s1"), layer_name("deepspeed")} <= {name for name, _ in cluster.fits}


def layer_shape(
    schedule: str, roles: Roles, sizes: LayerSizes, model_dim: int, split_tokens: bool = False, groups: int = 1,
    transport: str = "all_to_all",
) -> LayerShape:  # fmt: skip
    """Return the cost formulas' inputs for a layer under 's1', 's2', 'deepspeed' or 'pairwise' (in `groups`)."""
    mp_size, ep_size = roles.size(roles.model), roles.size(roles.expert)
    if schedule == "s2" and mp_size > 1:
        rows = whole_bucket_rows(sizes, roles)
    elif schedule == "deepspeed" and mp_size * roles.size(roles.expert_shard) > 1:
        rows = sizes.bucket_rows(ep_size)
    else:
        rows = sizes.split(mp_size).bucket_rows(ep_size)
    layout = layout_of(roles, rows, transport)
    return LayerShape(
        tokens=sizes.tokens,
        model_dim=model_dim,
        rows=layout.rows.far,
        more_in_node=layout.piece("node"),
        more_own=layout.piece("own"),
        members_in_node=layout.near,
        ep_size=ep_size,
        esp_size=roles.size(roles.expert_shard),
        mp_size=mp_size,
        top_k=sizes.top_k,
        experts=sizes.num_experts,
        split_tokens=split_tokens,
        groups=groups,
    )


def fits_of(cluster: Cluster, roles: Roles, gather: str, transport: str = "all_to_all") -> tuple[Fit, Fit, Fit | None]:
    """Return the fitted times of the EP&ESP all-to-all, the MP all-gather, and of SAA if s2 uses it.

    Raises:
      UserError: the file lacks one of them.
    """
    size, mp_size = roles.size(roles.expert + roles.expert_shard), roles.size(roles.model)
    if size == 1 or mp_size == 1:
        none = Fit(0.0, 0.0)
        return none, none, None
    a2a = cluster.fit(fit_name(transport, size), _REQUESTED_BY)
    gathers = cluster.fit(fit_name("all_gather", mp_size), _REQUESTED_BY)
    saa = (
        cluster.fit(fit_name("saa", size, mp_size, roles.size(roles.expert_shard)), _REQUESTED_BY)
        if gather == "saa"
        else None
    )
    return a2a, gathers, saa


def _sentence(choice: ParmChoice, cluster: Cluster | None) -> str:
    unit, how = ("bytes", "bytes (no MoEConfig.cluster)") if cluster is None else ("s", f"the fits of {cluster.name!r}")
    others = "" if choice.deepspeed_seconds is None else f", deepspeed {choice.deepspeed_seconds:.4g} {unit}"
    return (
        f"schedule 'parm' takes {choice.schedule} by {how}: s1 {choice.s1_seconds:.4g} {unit}, "
        f"s2 {choice.s2_seconds:.4g} {unit}{others} in one layer"
    )
