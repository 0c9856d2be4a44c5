"""How large a model is and what one token costs, in closed form: every leaf's shape, parameter counts, FLOPs.

Inputs: ModelConfig, MoEConfig, vocabulary size, sequence length. Outputs: plain numbers. No array is made and no device
is needed; a test compares the table of leaves with the tree that `LanguageModel` makes.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import math

from moe_jax.cluster.layer_work import HalfWork, matrices_of, preceding_flops
from moe_jax.models.config import ModelConfig
from moe_jax.models.segments import Segment, path_of, segments_of, with_experts
from moe_jax.moe.config import MoEConfig
from moe_jax.routers import build_router

GROUPS: tuple[str, ...] = (
    "embedding",
    "attention",
    "feed_forward",
    "shared_experts",
    "gate",
    "norm",
    "bias",
    "experts",
)
PAPER_GROUPS = ("attention", "feed_forward", "shared_experts", "experts")


@dataclasses.dataclass(frozen=True)
class LeafSize:
    """One leaf of the parameter tree.

    Attributes:
      path: keys, as in the tree: ('dense', 'units', 'attention', 'qkv').
      shape: global; leaves of units and bank are stacked over units or slots in their first dim.
      group: one of `GROUPS`.
      model_dim: the dim that a model-parallel group splits, not counting the stacked one; -1 for none.
      operand: it is read in the compute dtype alone, so ZeRO-3 gathers it in that.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    group: str
    model_dim: int = -1
    operand: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """True for a dense leaf with a leading layer dim."""
        return self.path[:2] == ("dense", "units")


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Three ways to count, and the parts.

    Attributes:
      total: all parameters.
      active: those that one token uses: all, but of each MoE layer K experts only; under `expert_choice` the mean over
        tokens, K f, where f is MoEConfig.capacity_factor.
      as_papers: without embeddings (and an output head of its own), biases, gates and norms, which is how Hecate's
        table 1 counts.
      by_group: group -> parameters, over `GROUPS`.
    """

    total: int
    active: int
    as_papers: int
    by_group: dict[str, int]


def _norm(path: tuple[str, ...], stack: tuple[int, ...], config: ModelConfig) -> list[LeafSize]:
    names = ("scale",) if config.norm == "rms" else ("scale", "bias")
    return [LeafSize((*path, "norm", name), (*stack, config.model_dim), "norm") for name in names]


def _attention(path: tuple[str, ...], config: ModelConfig) -> list[LeafSize]:
    units, dim, heads, head_size = config.units, config.model_dim, config.heads, config.head_size
    leaves = _norm(path, (units,), config)
    for name, shape in config.qkv_matrices.items():
        shape = (*shape, head_size)
        leaves.append(LeafSize((*path, name), (units, dim, *shape), "attention", len(shape) - 1, operand=True))
        if config.attention_bias:
            leaves.append(LeafSize((*path, f"{name}_bias"), (units, *shape), "bias", model_dim=len(shape) - 2))
    if config.qk_norm != "none":
        for name, own in (("q_norm", heads), ("k_norm", config.key_value_heads)):
            shape, split = ((own, head_size), 0) if config.qk_norm == "width" else ((head_size,), -1)
            leaves.append(LeafSize((*path, name, "scale"), (units, *shape), "norm", model_dim=split))
    leaves.append(LeafSize((*path, "out"), (units, heads, head_size, dim), "attention", 0, operand=True))
    if config.attention_bias:
        leaves.append(LeafSize((*path, "out_bias"), (units, dim), "bias"))
    return leaves


def _feed_forward(path: tuple[str, ...], config: ModelConfig) -> list[LeafSize]:
    units, dim, hidden = config.units, config.model_dim, config.ffn_dim
    names = ("w_in", "w_gate") if config.activation == "swiglu" else ("w_in",)
    leaves = _norm(path, (units,), config)
    leaves += [LeafSize((*path, name), (units, dim, hidden), "feed_forward", 1, operand=True) for name in names]
    leaves.append(LeafSize((*path, "w_out"), (units, hidden, dim), "feed_forward", 0, operand=True))
    if config.ffn_bias:
        leaves.append(LeafSize((*path, "in_bias"), (units, hidden), "bias", model_dim=0))
        leaves.append(LeafSize((*path, "out_bias"), (units, dim), "bias"))
    return leaves


def _shared_experts(path: tuple[str, ...], config: ModelConfig, moe: MoEConfig) -> list[LeafSize]:
    layers, dim, hidden = config.moe_layers, config.model_dim, moe.shared_ffn_dim(config.hidden_dim)
    if not hidden:
        return []
    names = ("w_in", "w_gate") if config.activation == "swiglu" else ("w_in",)
    leaves = [LeafSize((*path, name), (layers, dim, hidden), "shared_experts", 1, operand=True) for name in names]
    leaves.append(LeafSize((*path, "w_out"), (layers, hidden, dim), "shared_experts", 0, operand=True))
    if moe.residual == "learned":
        leaves.append(LeafSize((*path, "w_mix"), (layers, dim, 2), "gate"))
    return leaves


def leaf_sizes(config: ModelConfig, moe: MoEConfig, vocab_size: int) -> list[LeafSize]:
    """Return every leaf of the parameter tree {'dense': ..., 'bank': ...}."""
    segments, dim = segments_of(config, moe), config.model_dim
    learned = config.positions == "learned"
    leaves = [LeafSize(("dense", "embedding", "tokens"), (vocab_size, dim), "embedding", operand=not learned)]
    if learned:
        leaves.append(LeafSize(("dense", "embedding", "positions"), (config.max_length, dim), "embedding"))
    if not config.tied_head:
        leaves.append(LeafSize(("dense", "embedding", "head"), (vocab_size, dim), "embedding", operand=True))
    for segment in segments:
        leaves += _of_units(("dense", "units", *path_of(segment, segments)), segment)
    leaves += _norm(("dense",), (), config)
    in_bank = with_experts(segments)
    for segment in in_bank:
        leaves += _of_bank(("bank", *path_of(segment, in_bank)), segment)
    return leaves


def _of_units(path: tuple[str, ...], segment: Segment) -> list[LeafSize]:
    config, leaves = segment.config, []
    if config.moe_every != 1:
        leaves += _attention((*path, "dense_attention"), config) + _feed_forward((*path, "dense"), config)
    if segment.has_experts:
        gate = (segment.units, config.model_dim, segment.moe.num_experts)
        leaves += _attention((*path, "attention"), config) + _norm((*path, "gate"), gate[:1], config)
        leaves.append(LeafSize((*path, "gate", "w_gate"), gate, "gate"))
        for name, shape in build_router(segment.moe).leaves(config.model_dim).items():
            group = "gate" if len(shape) > 1 else "bias"
            leaves.append(LeafSize((*path, "gate", name), (segment.units, *shape), group))
        leaves += _shared_experts((*path, "shared"), config, segment.moe)
    return leaves


def _of_bank(path: tuple[str, ...], segment: Segment) -> list[LeafSize]:
    config = segment.config
    slots, dim, hidden = config.moe_layers * segment.moe.num_experts, config.model_dim, config.hidden_dim
    names = ("w_in", "w_gate") if config.activation == "swiglu" else ("w_in",)
    leaves = [LeafSize((*path, name), (slots, dim, hidden), "experts") for name in names]
    return [*leaves, LeafSize((*path, "w_out"), (slots, hidden, dim), "experts")]


def parameter_counts(config: ModelConfig, moe: MoEConfig, vocab_size: int) -> ParameterCounts:
    """Count the parameters of a model."""
    by_group = dict.fromkeys(GROUPS, 0)
    for leaf in leaf_sizes(config, moe, vocab_size):
        by_group[leaf.group] += leaf.size
    total = sum(by_group.values())
    idle = by_group["experts"] - _chosen(config, moe)
    return ParameterCounts(
        total=total,
        active=total - idle,
        as_papers=sum(by_group[group] for group in PAPER_GROUPS),
        by_group=by_group,
    )


def _chosen(config: ModelConfig, moe: MoEConfig) -> int:
    """Return the parameters of the experts that one token meets in all MoE layers, the mean over tokens."""
    return sum(
        round(leaf.size // segment.moe.num_experts * build_router(segment.moe).experts_per_token)
        for segment in with_experts(segments_of(config, moe))
        for leaf in _of_bank((), segment)
    )


def choices_per_token(config: ModelConfig, moe: MoEConfig) -> float:
    """Return how many experts one token chooses, all layers together, the mean over tokens."""
    parts = with_experts(segments_of(config, moe))
    return sum(build_router(part.moe).experts_per_token * part.config.moe_layers for part in parts)


def forward_flops_per_token(config: ModelConfig, moe: MoEConfig, vocab_size: int, length: int) -> int:
    """Return the forward FLOPs of one token.

    Two per parameter of every matrix that the token is multiplied with (attention, dense FFN, gate, K experts and the
    shared ones, the output head V M), and 4 H Dh Sq per block for attention's scores and their sum of values, over all
    Sq positions: the causal half is counted too, as is usual. Norms, activations, softmax and look-ups are not counted.
    """
    groups = parameter_counts(config, moe, vocab_size).by_group
    chosen = _chosen(config, moe)
    always = sum(groups[name] for name in ("attention", "feed_forward", "shared_experts", "gate"))
    matrices = always + chosen + vocab_size * config.model_dim
    return 2 * matrices + 4 * config.layers * config.heads * config.head_size * length


def training_flops_per_token(config: ModelConfig, moe: MoEConfig, vocab_size: int, length: int) -> int:
    """Return the model FLOPs of one token in training: three times the forward, whatever is recomputed."""
    return 3 * forward_flops_per_token(config, moe, vocab_size, length)


def flops_before_moe(config: ModelConfig, length: int) -> int:
    """Return the forward FLOPs of one token between two MoE layers; length: Sq."""
    return preceding_flops(
        model_dim=config.model_dim,
        length=length,
        moe_every=config.moe_every,
        matrices=matrices_of(config.activation),
        dense_hidden_dim=config.ffn_dim,
    )


def half_work(config: ModelConfig, moe: MoEConfig, tokens: int, length: int) -> HalfWork:
    """Return what a device computes of a layer for one half of its tokens, beside the other half's exchanges.

    Args:
      tokens: of this device in one half; length: Sq.
    """
    expert = 2 * matrices_of(config.activation) * config.model_dim * config.hidden_dim
    return HalfWork(
        attention=tokens * flops_before_moe(config, length),
        experts=tokens * moe.top_k * expert,
        recompute=config.recomputes,
    )
