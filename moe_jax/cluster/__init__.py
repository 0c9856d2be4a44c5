"""The machines: sizes, links, speeds, fitted collectives, and the presets of the papers' clusters."""

from moe_jax.cluster.cluster import AbsentFigureError, Cluster, read_cluster, write_cluster
from moe_jax.cluster.collectives import exchange_seconds, received_seconds, uniform_seconds
from moe_jax.cluster.fits import Fit, ParmChoice, fit_alpha_beta, fit_layers, parm_choice

__all__ = [
    "AbsentFigureError",
    "Cluster",
    "Fit",
    "ParmChoice",
    "exchange_seconds",
    "fit_alpha_beta",
    "fit_layers",
    "parm_choice",
    "read_cluster",
    "received_seconds",
    "uniform_seconds",
    "write_cluster",
]
