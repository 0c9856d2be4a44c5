"""Devices, the groups they form, and how arrays lie on them. See README.md."""

from moe_jax.mesh.roles import MeshConfig, Roles, build_mesh

__all__ = ["MeshConfig", "Roles", "build_mesh"]
