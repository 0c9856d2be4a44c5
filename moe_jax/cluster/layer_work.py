"""What a layer computes, for prices: matrices of an FFN, the FLOPs of its experts and of all that precedes them.

Inputs: sizes of the model. Outputs: counts; a run's prices, those of a replay and `parm`'s are of these.

Letters: docs/notation.md; Sq tokens of a sequence.
"""

from __future__ import annotations

import typing


class HalfWork(typing.NamedTuple):
    """What a device computes of a layer for one half of its tokens.

    Attributes:
      attention: FLOPs of a forward of what precedes the MoE layer; its backward takes twice that.
      experts: FLOPs of a forward of the experts, even loads; shared experts are not counted.
      recompute: whether the backward computes the MoE layer again.
    """

    attention: float
    experts: float
    recompute: bool = False


def matrices_of(activation: str) -> int:
    """Return the matrices of M x F in an expert or a dense FFN: three with SwiGLU, two else."""
    return 3 if activation == "swiglu" else 2


def preceding_flops(*, model_dim: int, length: int, moe_every: int, matrices: int, dense_hidden_dim: int) -> int:
    """Return the forward FLOPs of one token between two MoE layers.

    That is attention (projections, scores, mixing) and, where every second block is MoE, the block before it too, with
    its dense FFN.

    Args:
      length: Sq; matrices, dense_hidden_dim: of the dense FFN.
    """
    attention = 8 * model_dim**2 + 4 * length * model_dim
    dense = 2 * matrices * model_dim * dense_hidden_dim
    return moe_every * attention + (moe_every - 1) * dense
