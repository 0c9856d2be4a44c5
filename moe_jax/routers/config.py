"""What a router is: how many experts, how many of them a token takes, capacity, noise. Host side; no arrays.

`MoEConfig` is this and what the rest of the layer needs, so that users bind one class; errors name that class.
"""

from __future__ import annotations

import dataclasses
import math

from moe_jax.errors import UserError

DROP_POLICIES = ("position", "probability")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The router of one MoE layer.

    Attributes:
      num_experts: E, experts of the layer, all devices together.
      top_k: K, experts chosen per token.
      router: how experts are chosen; a name of `moe_jax.routers`.
      capacity_factor: f; an expert takes at most max(min_capacity, ceil(K f t / E)) of the t tokens gated together.
        None is dropless: every token reaches all its experts, whatever the skew.
      min_capacity: least capacity, used with a capacity factor only.
      drop: which excess tokens are dropped: those that come last ('position') or those with the least gate
        probability ('probability').
      renormalize: divide the K chosen probabilities by their sum. With K = 1 every weight is then 1 and the gate learns
        from its own losses alone; set False there, as Switch Transformers do.
      gate_noise: standard deviation of normal noise on the gate's logits in training; 0 is none.
    """

    num_experts: int = 8
    top_k: int = 2
    router: str = "topk"
    capacity_factor: float | None = None
    min_capacity: int = 4
    drop: str = "position"
    renormalize: bool = True
    gate_noise: float = 0.0

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
