"""Which of the three all-to-alls a generating program takes where `MoEConfig.transport` is 'auto'.

Inputs: a layer's config, its mesh and its tokens, and the cluster file that `MoEConfig.cluster` names. Outputs: the
config with the transport that is predicted to take least time. Prompts and single tokens are decided by themselves:
bytes count for the one, messages for the other.
"""

from __future__ import annotations

import dataclasses
import logging

from moe_jax.cluster import read_named_cluster
from moe_jax.cluster.all_to_all import KINDS, messages
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles
from moe_jax.moe import MoEConfig

_LOG = logging.getLogger(__name__)
COORDINATED = ("s1", "s2")  # schedules that have it


def settle_transport(config: MoEConfig, roles: Roles, tokens: int, row_bytes: int) -> MoEConfig:
    """Return the config with another transport than 'auto'; every other one stays.

    Args:
      tokens: of an MP group; row_bytes: of one row of M elements.

    Raises:
      UserError: 'auto' without a cluster file, or one that lacks a latency or bandwidth.
    """
    if config.transport != "auto":
        return config
    if not config.cluster:
        raise UserError(
            "MoEConfig.transport ('auto') chooses by a cluster's latencies and bandwidths; set MoEConfig.cluster to "
            f"its file, such as configs/cluster/h200.gin, or name one of {', '.join(KINDS)}"
        )
    shards, devices = roles.size(roles.expert_shard), roles.size(roles.expert + roles.expert_shard)
    near = min(roles.config.devices_per_node, devices)
    if devices % near or near % shards:
        return dataclasses.replace(config, transport="all_to_all")
    cluster = read_named_cluster(config.cluster).sized(None, near)
    sent = -(-tokens // roles.size(roles.model)) * config.top_k * row_bytes * shards
    seconds = {
        kind: messages(kind, devices, near, shards, sent).seconds(cluster)
        for kind in KINDS
        if kind != "coordinated" or config.schedule in COORDINATED
    }
    chosen = min(seconds, key=lambda kind: seconds[kind])
    listed = ", ".join(f"{kind} {value:.3g} s" for kind, value in seconds.items())
    _LOG.warning("transport 'auto' is %r for %d tokens of a group: %s", chosen, tokens, listed)
    return dataclasses.replace(config, transport=chosen)
