"""The machines: sizes, links, speeds, fitted collectives, and the presets of the papers' clusters."""

from moe_jax.cluster.cluster import AbsentFigureError, Cluster, read_cluster, read_named_cluster, write_cluster
from moe_jax.cluster.collectives import (
    LinkTraffic,
    all_reduce_bytes,
    exchange_seconds,
    link_traffic,
    overlap_bound,
    received_seconds,
    uniform_seconds,
)
from moe_jax.cluster.fits import Fit, ParmChoice, fit_alpha_beta, fit_layers, fit_saa, parm_choice, split_saa

__all__ = [
    "AbsentFigureError",
    "Cluster",
    "Fit",
    "LinkTraffic",
    "ParmChoice",
    "all_reduce_bytes",
    "exchange_seconds",
    "fit_alpha_beta",
    "fit_layers",
    "fit_saa",
    "link_traffic",
    "overlap_bound",
    "parm_choice",
    "read_cluster",
    "read_named_cluster",
    "received_seconds",
    "split_saa",
    "uniform_seconds",
    "write_cluster",
]
