"""Which collectives are timed, and in which groups. Host side; no arrays.

Enters: a number of devices, or the sizes of one mesh. Leaves: `Timed` collectives. A group is n devices a stride apart
(see `cluster/fit_names.py`); on every mesh MP, ESP and EP&ESP are neighbours and EP stands N_ESP apart.
"""

from __future__ import annotations

import typing

from moe_jax.cluster.fit_names import fit_name, strided_name

EXCHANGES = ("all_to_all", "pairwise", "permute")  # an exchange in one move, one in rounds, and one round


class Timed(typing.NamedTuple):
    """One collective in one kind of group: n devices, `stride` apart; SAA also has N_MP and N_ESP."""

    collective: str
    size: int
    stride: int = 1
    copies: int = 1
    shards: int = 1

    @property
    def name(self) -> str:
        """Name of its fit in a cluster file."""
        if self.collective == "saa":
            return fit_name("saa", self.size, self.copies, self.shards)
        return strided_name(self.collective, self.size, self.stride)


def mesh_groups(members: int, shards: int, copies: int, per_node: int = 0) -> list[Timed]:
    """Return what one mesh needs: N_EP, N_ESP, N_MP, and devices of a node (0: all stand in one)."""
    both = members * shards
    found = [Timed(kind, both) for kind in EXCHANGES]
    found += [Timed(kind, members, shards) for kind in EXCHANGES]
    found += [Timed("all_gather", both), Timed("reduce_scatter", both)]
    inside = per_node if 0 < per_node < both and both % per_node == 0 and per_node % shards == 0 else shards
    found += [
        Timed("all_to_all", inside),
        Timed("permute", both // inside, inside),
    ]  # `pairwise`: in and between groups
    for size in (copies, shards):
        found += [Timed(kind, size) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    found.append(Timed("all_gather", copies // shards))  # of integers, where an MP group of s2 spans EP members
    if copies > 1 and both > 1:
        found.append(Timed("saa", both, 1, copies, shards))
    return sorted({timed for timed in found if timed.size > 1})


def machine_groups(devices: int, per_node: int, largest: int = 4) -> list[Timed]:
    """Return what every mesh of the machine needs whose N_MP and N_ESP are powers of two up to `largest`.

    Groups of one replica of the experts are there for all numbers of replicas; SAA for one replica only.
    """
    powers = [2**p for p in range((devices).bit_length()) if devices % 2**p == 0 and 2**p <= largest]
    found: set[Timed] = set()
    for shards in powers:
        for copies in powers:
            members = devices // shards
            found |= set(mesh_groups(members, shards, copies, per_node))
            for replicas in powers[1:]:
                if members % replicas == 0:
                    fewer = mesh_groups(members // replicas, shards, copies, per_node)
                    found |= {timed for timed in fewer if timed.collective in EXCHANGES}
    if 1 < per_node < devices:
        found |= {Timed("permute", per_node), Timed("permute", devices // per_node, per_node)}
    return sorted(found)
