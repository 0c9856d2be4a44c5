"""How `s2` returns: by SAA (all-to-all and all-gather at the same time) or by AAS (one after the other).

Inputs: `MoEConfig.gather`, the mesh, the rows of a bucket, and a cluster with fits, if there is one. Outputs: 'saa' or
'aas' and why. Where 'auto' has no fits to compare, it is 'aas': in GPT-MoE-S cut to 4 layers, modelled on 4 x 8 H200,
a step takes 61.9 ms with AAS and 73.7 ms with SAA (docs/bench/inspect.md, `pairwise` and `s2`). Both forms add the same
numbers. Source: Parm, section III-D.
"""

from __future__ import annotations

from typing import NamedTuple

from moe_jax.cluster import Cluster, Fit
from moe_jax.cluster.fit_names import fit_name
from moe_jax.mesh.roles import Roles

WITHOUT_FITS = "aas"


class GatherChoice(NamedTuple):
    """'saa' or 'aas', and why, as the rest of a sentence."""

    gather: str
    why: str


def choose_gather(
    gather: str, roles: Roles, far_rows: int, row_bytes: int, cluster: Cluster | None, transport: str = "all_to_all"
) -> GatherChoice:
    """Return how s2 brings its rows home: what was asked for, or under 'auto' the shorter one by the fits.

    Compared is what differs: the rows that a whole EP&ESP group exchanges; those that stay in a node go by an exchange
    and a gather in both forms. AAS is taken when equal.

    Args:
      gather: 'auto', 'saa' or 'aas'; far_rows: C, rows of a whole bucket that the whole group exchanges.
      row_bytes: bytes of one row; transport: as in `MoEConfig`, looked up under its name.
    """
    if gather != "auto":
        return GatherChoice(gather, "as MoEConfig.gather says")
    if cluster is None:
        return GatherChoice(WITHOUT_FITS, "MoEConfig.gather 'auto' without MoEConfig.cluster")
    ep_size, esp_size = roles.size(roles.expert), roles.size(roles.expert_shard)
    mp_size, size = roles.size(roles.model), ep_size * esp_size
    names = fit_name(transport, size), fit_name("all_gather", mp_size), fit_name("saa", size, mp_size, esp_size)
    known = dict(cluster.fits)
    missing = [name for name in names if name not in known]
    if missing:
        return GatherChoice(WITHOUT_FITS, f"MoEConfig.gather 'auto', and {cluster.name!r} has no fit {missing[0]!r}")
    y = ep_size * far_rows * row_bytes
    x = y * esp_size // mp_size
    a2a, gathers, saa = (known[name] for name in names)
    together, in_turn = saa.seconds(x, y), a2a.seconds(x) + gathers.seconds(y)
    return GatherChoice(
        "saa" if together < in_turn else "aas",
        f"MoEConfig.gather 'auto' on the fits of {cluster.name!r}: saa {together:.4g} s, aas {in_turn:.4g} s",
    )


def fits_of(
    cluster: Cluster, roles: Roles, gather: str, transport: str, requested_by: str
) -> tuple[Fit, Fit, Fit | None]:
    """Return the fitted times of the EP&ESP all-to-all, the MP all-gather, and of SAA if s2 uses it.

    Raises:
      UserError: the file lacks one of them.
    """
    size, mp_size = roles.size(roles.expert + roles.expert_shard), roles.size(roles.model)
    if size == 1 or mp_size == 1:
        none = Fit(0.0, 0.0)
        return none, none, None
    a2a = cluster.fit(fit_name(transport, size), requested_by)
    gathers = cluster.fit(fit_name("all_gather", mp_size), requested_by)
    if gather != "saa":
        return a2a, gathers, None
    return a2a, gathers, cluster.fit(fit_name("saa", size, mp_size, roles.size(roles.expert_shard)), requested_by)
