"""The largest gain of a pipelined layer: transfers beside experts, as FasterMoE's `pairwise` schedule runs them.

Inputs: sizes of one layer, FLOPs of its experts, a cluster. Outputs: seconds of its transfers and of its experts, one
after the other, forward and backward, and the bound (comm + comp) / max(comm, comp) on the gain of overlapping the two.
Source: FasterMoE, section 4.2.
"""

from __future__ import annotations

import typing

from moe_jax.cluster.cluster import Cluster
from moe_jax.cluster.layer_seconds import ExpertLoad, transfer_fit, transfer_seconds
from moe_jax.cluster.link_seconds import overlap_bound, uniform_seconds
from moe_jax.cluster.volumes import LayerShape, Transfer, layer_transfers

_REQUESTED_BY = "the bound of MoEConfig.schedule 'pairwise'"


class PipelineSeconds(typing.NamedTuple):
    """Predicted seconds of one layer's transfers and experts, each alone, and what they are predicted by."""

    communication: float
    experts: float
    by: str

    @property
    def bound(self) -> float:
        """The most that the pipeline can gain over one after the other: from 1 to 2."""
        return overlap_bound(self.communication, self.experts)


def pairwise_seconds(shape: LayerShape, load: ExpertLoad, cluster: Cluster, item: int = 4) -> PipelineSeconds:
    """Predict what `pairwise` pipelines: by the fits of a calibration, else by bandwidths and FLOP/s of a preset.

    Args:
      shape: of the layer; load: of the experts of one device; item: bytes of a number.

    Raises:
      UserError: the cluster lacks a figure; it names the figure.
    """
    ways = layer_transfers("pairwise", shape)
    fitted = {name for name, _ in cluster.fits}
    steps = {transfer_fit(t, shape) for way in ways for t in way if t.group != "model"}
    if steps | {"expert_step"} <= fitted:
        moving = sum(transfer_seconds(way, shape, cluster, item, _REQUESTED_BY) for way in ways)
        return PipelineSeconds(
            moving, cluster.fit("expert_step", _REQUESTED_BY).seconds(load.flops, load.bytes), "its fits"
        )
    moving = sum(t.calls * _link_seconds(t, shape, cluster, item) for way in ways for t in way)
    return PipelineSeconds(moving, load.flops / cluster.need("flops", _REQUESTED_BY), "its bandwidth and FLOP/s")


def _link_seconds(transfer: Transfer, shape: LayerShape, cluster: Cluster, item: int) -> float:
    """Return the seconds of one call over the links: steps of the ring cross nodes, where there are some.

    Of an all-to-all within a group of n devices, 1 / n stays on its device, and so it is with what an MP group gathers.
    """
    size = {"pairwise_group": shape.ep_size * shape.esp_size // shape.groups, "model": shape.mp_size}
    away = 1.0 if transfer.group == "pairwise_ring" else 1 - 1 / size[transfer.group]
    sent = transfer.elements * item * away
    crosses = transfer.group == "pairwise_ring" and not cluster.flat and cluster.nodes != 1
    inside, across = (0.0, sent) if crosses else (sent, 0.0)
    return float(uniform_seconds(cluster, inside, across, _REQUESTED_BY))
