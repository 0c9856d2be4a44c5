"""Rows sorted by group times the weights of their groups, by several implementations. See README.md."""

from moe_jax.grouped_matmul.contract import GroupedWeights, implementations, register
from moe_jax.grouped_matmul.matmul import choose_implementation, default_implementation, grouped_matmul

__all__ = [
    "GroupedWeights",
    "choose_implementation",
    "default_implementation",
    "grouped_matmul",
    "implementations",
    "register",
]
