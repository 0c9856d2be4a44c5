"""Grouped matmuls and float8: one contract, a portable form, Hopper kernels."""

from moe_jax.kernels import matmul  # noqa: F401  it imports all files that register an implementation
