"""Which collectives are timed, and in which groups. Host side; no arrays.

Inputs: a number of devices, or the sizes of one mesh. Outputs: `Timed` collectives. A group is n devices a stride apart
(see `cluster/fit_names.py`); on every mesh MP, ESP and EP&ESP are neighbours and EP stands N_ESP apart.
"""

from __future__ import annotations

import typing

from moe_jax.cluster.fit_names import fit_name, strided_name

EXCHANGES = ("all_to_all", "ppermute", "permute")  # an exchange by one collective, one in rounds, and one round


class Timed(typing.NamedTuple):
    """One collective in one kind of group: n devices, `stride` apart; SAA also has N_MP and N_ESP."""

    collective: str
    size: int
    stride: int = 1
    mp_size: int = 1
    esp_size: int = 1

    @property
    def name(self) -> str:
        """Name of its fit in a cluster file."""
        if self.collective == "saa":
            return fit_name("saa", self.size, self.mp_size, self.esp_size)
        return strided_name(self.collective, self.size, self.stride)


def mesh_groups(ep_size: int, esp_size: int, mp_size: int, per_node: int = 0) -> list[Timed]:
    """Return what one mesh needs: N_EP, N_ESP, N_MP, and devices of a node (0: all are in one)."""
    both = ep_size * esp_size
    found = [Timed(kind, both) for kind in EXCHANGES]
    found += [Timed(kind, ep_size, esp_size) for kind in EXCHANGES]
    found += [Timed("all_gather", both), Timed("reduce_scatter", both)]
    inside = per_node if 0 < per_node < both and both % per_node == 0 and per_node % esp_size == 0 else esp_size
    found += [
        Timed("all_to_all", inside),
        Timed("permute", both // inside, inside),
    ]  # `pairwise`: in and between groups
    for size in (mp_size, esp_size):
        found += [Timed(kind, size) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    found.append(Timed("all_gather", mp_size // esp_size))  # of integers, where an MP group of s2 spans EP members
    if mp_size > 1 and both > 1:
        found.append(Timed("saa", both, 1, mp_size, esp_size))
    return sorted({timed for timed in found if timed.size > 1})


def machine_groups(devices: int, per_node: int, largest: int = 4) -> list[Timed]:
    """Return what every mesh of the machine needs whose N_MP and N_ESP are powers of two up to `largest`.

    Groups within one data-parallel group are there for all numbers of such groups; SAA for a single one only.
    """
    powers = [2**p for p in range((devices).bit_length()) if devices % 2**p == 0 and 2**p <= largest]
    found: set[Timed] = set()
    for esp_size in powers:
        for mp_size in powers:
            ep_size = devices // esp_size
            found |= set(mesh_groups(ep_size, esp_size, mp_size, per_node))
            for data_parallel in powers[1:]:
                if ep_size % data_parallel == 0:
                    fewer = mesh_groups(ep_size // data_parallel, esp_size, mp_size, per_node)
                    found |= {timed for timed in fewer if timed.collective in EXCHANGES}
    if 1 < per_node < devices:
        found |= {Timed("permute", per_node), Timed("permute", devices // per_node, per_node)}
    return sorted(found)
