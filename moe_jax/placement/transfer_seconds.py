"""The time of a sparse transfer as the executor carries it out, and the cheaper of its two forms.

Inputs: a cluster, sizes (numbers or arrays), bytes of one chunk. Outputs: seconds of one Trans; its Agg takes as long.
Planners, replay, hysteresis and the split of a transfer over windows all read this file. A calibration's fits of the
collectives are taken where it has all that a form needs, else the links (`cluster/link_seconds.py`).

    flat      two all-to-alls over D devices, of X and of m chunks
    by node   three: X chunks over the G devices of a node, Cp of each node pair in G slices over Nn nodes, m over G

Letters: docs/notation.md; G devices of a node, X offers, m slots, Cp crossing.
"""

from __future__ import annotations

import dataclasses
import functools
import typing

import numpy as np

from moe_jax.cluster import Cluster, uniform_seconds
from moe_jax.cluster.fit_names import strided_name
from moe_jax.collectives.transfer_shape import sent_by_collective
from moe_jax.placement.transfer_sizes import TransferSizes

FORMS = ("auto", "flat", "by_node")


class TransferRates(typing.NamedTuple):
    """Seconds of one Trans as a straight line: start where anything moves, and for each offer, slot and crossing."""

    start: float
    offer: float
    slot: float
    crossing: float

    def seconds(self, sizes: TransferSizes) -> np.ndarray:
        """Return the seconds of sizes [...]."""
        moving = np.asarray(sizes.slots) > 0
        line = self.offer * sizes.offers + self.slot * sizes.slots + self.crossing * sizes.crossing
        return np.where(moving, self.start + line, 0.0)


@functools.lru_cache(maxsize=64)
def transfer_rates(
    cluster: Cluster, chunk_bytes: float, devices: int, devices_per_node: int, requested_by: str, form: str, stride: int
) -> TransferRates:
    """Return the rates of one form.

    Args:
      chunk_bytes: bytes of one expert as it travels; devices: D, of one expert-parallel group.
      form: 'flat' or 'by_node'.
      stride: devices between neighbours of the group (N_ESP), which decides the names of fits.

    Raises:
      AbsentFigureError: neither fits nor links are known; it names the figure and `requested_by`.
    """
    by_node, fitted = form == "by_node", dict(cluster.fits)
    nodes = devices // devices_per_node
    if by_node:  # what a device hands in for one chunk of each collective, its own slices included
        inside = strided_name("all_to_all", devices_per_node, stride)
        across = strided_name("all_to_all", nodes, devices_per_node * stride)
        names, handed = [inside, across, inside], [1.0, nodes / devices_per_node, 1.0]
    else:
        names, handed = [strided_name("all_to_all", devices, stride)] * 2, [1.0, 1.0]
    if set(names) <= set(fitted):
        fits = [fitted[name] for name in names]
        lines = [(fit.alpha, fit.beta * part * chunk_bytes) for fit, part in zip(fits, handed, strict=True)]
    else:
        sizes = {"devices": devices, "devices_per_node": devices_per_node, "by_node": by_node}
        latency = dataclasses.replace(cluster, intra_latency=None, inter_latency=None)
        lines = []
        for part in sent_by_collective(1, 1, 1, **sizes):
            sent = (part.inside * chunk_bytes, part.across * chunk_bytes)
            moving = float(uniform_seconds(latency, *sent, requested_by))
            lines.append((float(uniform_seconds(cluster, *sent, requested_by)) - moving, moving))
    each = [line[1] for line in lines]
    crossing = each[1] if by_node else 0.0
    return TransferRates(sum(line[0] for line in lines), each[0], each[-1], crossing)


def trans_seconds(
    cluster: Cluster,
    sizes: TransferSizes,
    chunk_bytes: float,
    devices: int,
    devices_per_node: int,
    requested_by: str,
    *,
    form: str = "auto",
    stride: int = 1,
) -> np.ndarray:
    """Return the seconds of one Trans: sizes [...] -> [...]; with form 'auto' of the cheaper form, element by element.

    The other arguments are those of `transfer_rates`.
    """
    times = [
        transfer_rates(cluster, chunk_bytes, devices, devices_per_node, requested_by, name, stride).seconds(sizes)
        for name in forms_of(form, devices, devices_per_node)
    ]
    return times[0] if len(times) == 1 else np.minimum(*times)


def cheapest_form(
    cluster: Cluster, sizes: TransferSizes, chunk_bytes: float, devices: int, devices_per_node: int, stride: int = 1
) -> str:
    """Return 'flat' or 'by_node', whichever is shorter in sum over `sizes`; 'flat' where equal."""
    forms = forms_of("auto", devices, devices_per_node)
    group = (chunk_bytes, devices, devices_per_node, "the form of a transfer (PlannerConfig.transfer = 'auto')")
    times = [float(np.sum(transfer_rates(cluster, *group, form, stride).seconds(sizes))) for form in forms]
    return forms[-1] if times[-1] < times[0] * (1 - 1e-9) else "flat"


def forms_of(form: str, devices: int, devices_per_node: int) -> tuple[str, ...]:
    """Return the forms to compare: by node only with several nodes of several devices."""
    if form != "auto":
        return (form,)
    return ("flat", "by_node") if 1 < devices_per_node < devices else ("flat",)
