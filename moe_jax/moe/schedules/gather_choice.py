"""Times of the collectives of `s1` and `s2` on a mesh, and how `s2` returns: by SAA or by AAS.

SAA is all-to-all and all-gather at the same time, AAS one after the other; both add the same numbers. Where 'auto' has
no fits to compare, it is 'aas': in GPT-MoE-S cut to 4 layers, modelled on 4 x 8 H200, a step takes 61.9 ms with AAS and
73.7 ms with SAA (docs/results.md, `pairwise` and `s2`). Source: Parm, section III-D.
"""

from __future__ import annotations

from moe_jax.cluster import Cluster, Fit, read_cluster, uniform_seconds
from moe_jax.cluster.fits import fit_name
from moe_jax.parallel.mesh import Roles


class LinkSeconds:
    """Stands for a `Fit` of a collective where a cluster has links and no fits; sizes are bytes.

    Args:
      share: what a device sends of a byte of x, to its own node and to others; gathered: likewise of y.
      rounds, gathers: of SAA, x in `rounds` rounds of messages with y in `gathers` all-gathers beside them, each after
        the round that it needs: all share the links but the last one, beside which nothing is left.
    """

    def __init__(self, cluster: Cluster, share, gathered=(0.0, 0.0), rounds: int = 1, gathers: int = 1):
        self.cluster, self.share, self.gathered, self.rounds, self.gathers = cluster, share, gathered, rounds, gathers

    def seconds(self, x: float, y: float = 0.0) -> float:
        """Return the time of sizes x and y, with a start-up for each round where the cluster has one."""
        start = (self.cluster.inter_latency if self.share[1] else self.cluster.intra_latency) or 0.0
        last, total = y / self.gathers, (self.rounds - 1) * start
        for of_x, of_y in ((x, y - last), (0.0, last)):
            inside, across = (a * of_x + b * of_y for a, b in zip(self.share, self.gathered, strict=True))
            total += float(uniform_seconds(self.cluster, inside, across, "MoEConfig.schedule 'parm'"))
        return total


def read_cluster_of(path: str, roles: Roles) -> Cluster:
    """Return a cluster file's record for this mesh, checked; one of links without a number of nodes fits any mesh."""
    cluster = read_cluster(path)
    if cluster.nodes is None and not cluster.fits:
        per_node = roles.config.devices_per_node
        cluster = cluster.sized(roles.num_devices // per_node, per_node)
    cluster.check_devices(roles.num_devices, "MeshConfig")
    return cluster


def choose_gather(
    gather: str, roles: Roles, far_rows: int, row_bytes: int, cluster: Cluster | None, transport: str = "all_to_all"
) -> tuple[str, str]:
    """Return how s2 brings its rows home, 'saa' or 'aas', and why, as the rest of a sentence.

    It is what was asked for, or under 'auto' the shorter one by the fits. Compared is what differs: the rows that a
    whole EP&ESP group exchanges; those that stay in a node go by an exchange and a gather in both forms. AAS is taken
    when equal.

    far_rows: C, rows of a whole bucket that the whole group exchanges.
    """
    if gather != "auto":
        return gather, "as MoEConfig.gather says"
    if cluster is None:
        return "aas", "MoEConfig.gather 'auto' without MoEConfig.cluster"
    ep_size, esp_size = roles.size(roles.expert), roles.size(roles.expert_shard)
    mp_size, size = roles.size(roles.model), ep_size * esp_size
    names = fit_name(transport, size), fit_name("all_gather", mp_size), fit_name("saa", size, mp_size, esp_size)
    known = dict(cluster.fits)
    missing = [name for name in names if name not in known]
    if missing:
        return "aas", f"MoEConfig.gather 'auto', and {cluster.name!r} has no fit {missing[0]!r}"
    y = ep_size * far_rows * row_bytes
    x = y * esp_size // mp_size
    a2a, gathers, saa = (known[name] for name in names)
    together, in_turn = saa.seconds(x, y), a2a.seconds(x) + gathers.seconds(y)
    why = f"MoEConfig.gather 'auto' on the fits of {cluster.name!r}: saa {together:.4g} s, aas {in_turn:.4g} s"
    return "saa" if together < in_turn else "aas", why


def fits_of(
    cluster: Cluster, roles: Roles, gather: str, transport: str, requested_by: str
) -> tuple[Fit | LinkSeconds, Fit | LinkSeconds, Fit | LinkSeconds | None]:
    """Return the times of the EP&ESP all-to-all, the MP all-gather, and of SAA if s2 uses it.

    By the cluster's fits; where it has none at all, by its links, whatever the transport.

    Raises:
      UserError: the file has fits, but lacks one of them.
    """
    size, mp_size = roles.size(roles.expert + roles.expert_shard), roles.size(roles.model)
    if size == 1 or mp_size == 1:
        none = Fit(0.0, 0.0)
        return none, none, None
    if not cluster.fits:
        per_node = cluster.need("devices_per_node", requested_by)
        near, near_mp = min(per_node, size), min(per_node, mp_size)
        share, across = ((near - 1) / size, (size - near) / size), (mp_size - near_mp) / (mp_size * near_mp)
        gathered = ((mp_size - 1) / mp_size - across, across)  # a ring over the nodes, each device with its part
        saa = LinkSeconds(cluster, share, gathered, size - 1, roles.size(roles.expert)) if gather == "saa" else None
        return LinkSeconds(cluster, share), LinkSeconds(cluster, gathered), saa
    a2a = cluster.fit(fit_name(transport, size), requested_by)
    gathers = cluster.fit(fit_name("all_gather", mp_size), requested_by)
    if gather != "saa":
        return a2a, gathers, None
    return a2a, gathers, cluster.fit(fit_name("saa", size, mp_size, roles.size(roles.expert_shard)), requested_by)
