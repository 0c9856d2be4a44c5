"""What one MoE layer is: sizes, gate, capacity and the way its tokens travel. Host side; no arrays."""

from __future__ import annotations

import dataclasses
import math

from moe_jax.errors import UserError

DROP_POLICIES = ("position", "probability")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer.

    Attributes:
      num_experts: E, experts of the layer, all devices together.
      top_k: K, experts chosen per token.
      capacity_factor: f; an expert takes at most max(min_capacity, ceil(K f t / E)) of the t tokens gated together.
        None is dropless: every token reaches all its experts, whatever the skew.
      min_capacity: least capacity, used with a capacity factor only.
      drop: which excess tokens are dropped: those that come last ('position') or those with the least gate
        probability ('probability').
      renormalize: divide the K chosen probabilities by their sum. With K = 1 every weight is then 1 and the gate learns
        from its own losses alone; set False there, as Switch Transformers do.
      gate_noise: standard deviation of normal noise on the gate's logits in training; 0 is none.
      aux_loss_weight: weight of the load-balancing loss.
      z_loss_weight: weight of the squared log-partition loss of the gate.
      schedule: how the layer moves bytes; a name of `moe_jax.schedules`.
      transport: how rows travel in an exchange: 'all_to_all', 'ppermute', 'two_level' or 'ragged'.
      pairwise_groups: groups of the schedule 'pairwise'; 0 makes one of the expert-parallel devices of each node.
      gather: how the schedule 's2' returns: 'saa' (all-to-all and all-gather at the same time), 'aas' (in turn), or
        'auto', the one that `cluster` finds shorter; without it 'aas' (a modelled step of 61.9 ms, not 73.7:
        docs/bench/inspect.md). Sums are the same; their last bits may differ.
      cluster: file written by `python -m moe_jax.calibrate`, by which 'parm' and `gather` 'auto' choose; without one
        'parm' compares bytes.
      grouped_matmul: implementation of the grouped matmul; 'auto' takes the device's default.
      bucket_slack: dropless only: rows of one (source, destination) bucket over the mean number of rows.
    """

    num_experts: int = 8
    top_k: int = 2
    capacity_factor: float | None = None
    min_capacity: int = 4
    drop: str = "position"
    renormalize: bool = True
    gate_noise: float = 0.0
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.001
    schedule: str = "deepspeed"
    transport: str = "all_to_all"
    pairwise_groups: int = 0
    gather: str = "auto"
    cluster: str = ""
    grouped_matmul: str = "auto"
    bucket_slack: float = 1.5

    def __post_init__(self):
        if self.num_experts < 1:
            raise UserError(f"MoEConfig.num_experts ({self.num_experts}) must be at least 1")
        if not 1 <= self.top_k <= self.num_experts:
            raise UserError(
                f"MoEConfig.top_k ({self.top_k}) must lie between 1 and MoEConfig.num_experts ({self.num_experts})"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise UserError(
                f"MoEConfig.capacity_factor ({self.capacity_factor}) must be positive, or None to drop no token"
            )
        if self.drop not in DROP_POLICIES:
            raise UserError(f"MoEConfig.drop ({self.drop!r}) must be one of {', '.join(DROP_POLICIES)}")
        if self.min_capacity < 1:
            raise UserError(f"MoEConfig.min_capacity ({self.min_capacity}) must be at least 1")
        if self.bucket_slack <= 0:
            raise UserError(f"MoEConfig.bucket_slack ({self.bucket_slack}) must be positive; 1.5 suits most runs")

    @property
    def dropless(self) -> bool:
        return self.capacity_factor is None

    def capacity(self, tokens: int) -> int:
        """Return the most of `tokens` tokens that each expert takes when they are gated together.

        Source: DeepSpeed-MoE's top-k gate, capacity = max(min_capacity, ceil(K f t / E)).
        """
        if self.capacity_factor is None:
            return tokens
        capacity = math.ceil(self.top_k * self.capacity_factor * tokens / self.num_experts)
        return min(tokens, max(self.min_capacity, capacity))
