"""How much an expert FFN computes, reads and writes on one device, as numbers. Host side; no arrays of JAX.

Letters: docs/notation.md.
"""

from __future__ import annotations

import typing

import numpy as np

from moe_jax.grouped_matmul.blocked import choose_heights
from moe_jax.grouped_matmul.row_blocks import rows_computed


class ExpertWork(typing.NamedTuple):
    """FLOPs and bytes of a forward, and bytes of forward and backward together (their FLOPs are three times)."""

    forward_flops: float
    forward_bytes: float
    step_bytes: float


def expert_work(group_sizes, rows: int, model_dim: int, hidden_dim: int, item: int = 4) -> ExpertWork:
    """Return the work of the blocked implementations.

    Args:
      group_sizes: int [G], rows in use, as far as known; rows: R; item: bytes of a number.

    A forward reads weights and rows once and writes rows and hidden rows; a backward does so twice and writes gradients
    of the weights. Buffers are cleared whole, padding included.
    """
    groups = len(group_sizes)
    computed = rows_computed(np.asarray(group_sizes), choose_heights(rows, groups, model_dim * hidden_dim))
    weights = 2 * groups * model_dim * hidden_dim
    moved = rows * (model_dim + hidden_dim)
    flops = 4.0 * computed * model_dim * hidden_dim
    return ExpertWork(flops, float(item * (weights + moved)), float(item * (4 * weights + 3 * moved)))
