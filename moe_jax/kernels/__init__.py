"""Grouped matmuls and float8: one contract, a portable form, Hopper kernels."""

from moe_jax.kernels import blocked, hopper  # noqa: F401  they register their implementations
