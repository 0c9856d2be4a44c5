"""Rows sorted by group times the weights of their groups, by several implementations. See README.md."""

from moe_jax.grouped_matmul.matmul import (
    GroupedWeights,
    choose_implementation,
    default_implementation,
    grouped_matmul,
    implementations,
    register,
)

__all__ = [
    "GroupedWeights",
    "choose_implementation",
    "default_implementation",
    "grouped_matmul",
    "implementations",
    "register",
]
