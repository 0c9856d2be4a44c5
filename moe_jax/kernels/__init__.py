"""Grouped matmuls and float8: one contract, a portable form, Hopper kernels."""

import functools

from moe_jax.kernels import blocked, hopper  # noqa: F401  they register their implementations
from moe_jax.kernels.float8 import Float8Matmul
from moe_jax.kernels.grouped import FLOAT8, implementations, register

for _name in implementations():
    register(FLOAT8 + _name)(functools.partial(Float8Matmul, _name))
