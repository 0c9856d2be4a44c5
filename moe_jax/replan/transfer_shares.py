"""How a block-wise schedule cuts its transfers, from calibrated times.

Inputs: the run's config, its planner's cost, and the transfer that a step is compiled for. Outputs: the shares of Trans
and Agg that run beside attention. Host side; no arrays on devices.
"""

from __future__ import annotations

import functools
import logging

from moe_jax.cluster import AbsentFigureError
from moe_jax.collectives.slices import PARTS
from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.config.run_config import RunConfig
from moe_jax.overlap import Times, shares
from moe_jax.planner import Cost

_LOG = logging.getLogger(__name__)


def split_shares(config: RunConfig, cost: Cost, transfer: TransferShape) -> dict[str, float]:
    """Return {'trans_share', 'agg_share'} for a `PlanShape`, in eighths; {} where the schedule splits nothing.

    Without a cluster file that has FLOP/s and links, half of each runs beside attention, logged once.
    """
    model = config.model
    if model.prefetch != "pro_prophet" or model.prefetch_case != "split":
        return {}
    try:
        seconds = cost.shape_seconds(transfer, "the split of a transfer")
    except AbsentFigureError:
        seconds = None
    if seconds is None or cost.attention_seconds is None:
        _say_half()
        return {"trans_share": 0.5, "agg_share": 0.5}
    times = Times(attention=cost.attention_seconds, experts=0.0, trans=seconds, agg=seconds)
    cut = (round(share * PARTS) / PARTS for share in shares(times, model.refetch_replicas))
    return dict(zip(("trans_share", "agg_share"), cut, strict=True))


@functools.cache
def _say_half() -> None:
    _LOG.warning(
        "ModelConfig.prefetch_case = 'split' runs half of each transfer (0.5) beside attention: PlannerConfig.cluster "
        "names no file with flops and a bandwidth, from which the split would follow"
    )
