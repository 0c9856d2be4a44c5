"""How a block-wise schedule cuts its transfers, from calibrated times.

Inputs: the run's config, its mesh, and the transfer, which says how many bytes a layer's Trans moves. Outputs: the
shares of Trans and Agg that run beside attention. Host side; no arrays on devices.
"""

from __future__ import annotations

import functools
import logging

from moe_jax.cluster import Cluster, read_named_cluster
from moe_jax.collectives.slices import PARTS
from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.config.run_config import RunConfig
from moe_jax.mesh.roles import Roles
from moe_jax.models.memory import itemsize
from moe_jax.moe.experts import weight_names
from moe_jax.overlap import Times, shares

_LOG = logging.getLogger(__name__)


def attention_seconds(config: RunConfig, roles: Roles, flops: float) -> float:
    """Return the forward time of one block's attention: projections, scores and mixing of one device's tokens."""
    model, length = config.model, config.data.sequence_length
    tokens = config.train.batch_size * length / config.train.grad_accum_steps / roles.num_devices
    return tokens * (8 * model.model_dim**2 + 4 * length * model.model_dim) / flops


def split_shares(config: RunConfig, roles: Roles, transfer: TransferShape) -> dict[str, float]:
    """Return {'trans_share', 'agg_share'} for a `PlanShape`, in eighths; {} where the schedule splits nothing.

    Without a cluster file that has FLOP/s and a bandwidth, half of each runs beside attention, logged once.
    """
    model = config.model
    if model.prefetch != "pro_prophet" or model.prefetch_case != "split":
        return {}
    cluster = read_named_cluster(config.planner.cluster) if config.planner.cluster else Cluster(name="")
    bandwidths = [w for w in (cluster.intra_bandwidth, cluster.inter_bandwidth) if w is not None]
    if cluster.flops is None or not bandwidths:
        _say_half()
        return {"trans_share": 0.5, "agg_share": 0.5}
    one = len(weight_names(model.activation)) * model.model_dim * model.hidden_dim * itemsize(model.dtype)
    seconds = sum(transfer.sent()) * one / min(bandwidths)
    times = Times(attention=attention_seconds(config, roles, cluster.flops), experts=0.0, trans=seconds, agg=seconds)
    cut = (round(share * PARTS) / PARTS for share in shares(times, model.refetch_replicas))
    return dict(zip(("trans_share", "agg_share"), cut, strict=True))


@functools.cache
def _say_half() -> None:
    _LOG.warning(
        "ModelConfig.prefetch_case = 'split' runs half of each transfer (0.5) beside attention: PlannerConfig.cluster "
        "names no file with flops and a bandwidth, from which the split would follow"
    )
