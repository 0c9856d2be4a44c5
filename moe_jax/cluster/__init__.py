"""The machines: sizes, links, speeds, fitted collectives, and the presets of the papers' clusters."""

from moe_jax.cluster.cluster import (
    HOST,
    UNNAMED,
    Cluster,
    cluster_named,
    cluster_of,
    read_cluster,
    write_cluster,
)
from moe_jax.cluster.collectives import (
    Group,
    exchange_seconds,
    group_of,
    received_seconds,
    start_up,
    uniform_seconds,
)
from moe_jax.cluster.fits import Fit, fit_alpha_beta, fit_layers

__all__ = [
    "Cluster",
    "Fit",
    "Group",
    "HOST",
    "UNNAMED",
    "cluster_named",
    "cluster_of",
    "exchange_seconds",
    "fit_alpha_beta",
    "fit_layers",
    "group_of",
    "read_cluster",
    "received_seconds",
    "start_up",
    "uniform_seconds",
    "write_cluster",
]
