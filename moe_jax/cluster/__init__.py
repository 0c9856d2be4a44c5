"""The machines: sizes, links, speeds, fitted collectives, and the presets of the papers' clusters."""

from moe_jax.cluster.cluster import HOST, UNNAMED, Cluster, cluster_named, cluster_of, read_cluster, write_cluster
from moe_jax.cluster.collectives import Links
from moe_jax.cluster.fits import Fit, fit_alpha_beta, fit_layers

__all__ = ["Cluster", "Fit", "HOST", "Links", "UNNAMED", "cluster_named", "cluster_of", "fit_alpha_beta"]
__all__ += ["fit_layers", "read_cluster", "write_cluster"]
