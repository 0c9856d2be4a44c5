"""The options of routing that every router reads: how many experts, how many a token takes, capacity, noise.

Host side; no arrays. `MoEConfig` is these, the knobs that routers' files declare, and what the rest of the layer needs,
so that users bind one class, which is the one that errors name.
"""

from __future__ import annotations

import dataclasses
import math

from moe_jax.errors import UserError

DROP_POLICIES = ("position", "probability")
BALANCE_OVER = ("batch", "sequence", "step")
ROUTER_DTYPES = ("auto", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """The router of one MoE layer.

    Attributes:
      num_experts: E, experts of the layer, all devices together.
      top_k: K, experts chosen per token.
      router: how experts are chosen; a name of `moe_jax.moe.routers`.
      capacity_factor: f; an expert takes at most max(min_capacity, ceil(K f t / E)) of the t tokens gated together.
        None is dropless: every choice reaches its expert, whatever the skew.
      min_capacity: least capacity, used with a capacity factor only.
      drop: which excess tokens are dropped: those that come last ('position') or those with the least gate
        probability ('probability').
      renormalize: divide the K chosen probabilities by their sum. With K = 1 every weight is then 1 and the gate learns
        from its own losses alone; set False there, as Switch Transformers do.
      routed_scale: what the weights are multiplied by, after they were divided by their sum if they are.
      gate_noise: standard deviation of normal noise on the gate's logits in training; 0 is none.
      balance_over: tokens over which the load-balancing loss is formed: 'batch', all those of the global microbatch;
        'sequence', each sequence by itself, and the mean of theirs (DeepSeek-V3, equations 17 to 20); or 'step', where
        each microbatch's probabilities meet the loads of all microbatches of the step up to it, so that with
        train.grad_accum_steps experts need not be even in each (Qiu et al. 2025, Demons in the Detail).
      cluster: file written by `python -m moe_jax.calibrate`, by which the schedule 'parm' and `gather` 'auto' choose;
        without one by the devices at hand. The router 'topology' takes bandwidths from it, or from a preset's file.
      router_dtype: dtype in which logits are computed: 'float32', 'bfloat16', 'float64', or 'auto', the compute dtype's
        but at least float32. What follows is computed in at least float32.
    """

    num_experts: int = 8
    top_k: int = 2
    router: str = "topk"
    capacity_factor: float | None = None
    min_capacity: int = 4
    drop: str = "position"
    renormalize: bool = True
    routed_scale: float = 1.0
    gate_noise: float = 0.0
    router_dtype: str = "auto"
    balance_over: str = "batch"
    cluster: str = ""

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
        if self.routed_scale <= 0:
            raise UserError(f"MoEConfig.routed_scale ({self.routed_scale}) must be positive; 1 changes nothing")
        if self.gate_noise < 0:
            raise UserError(f"MoEConfig.gate_noise ({self.gate_noise}) must be at least 0; 0 is no noise")
        if self.balance_over not in BALANCE_OVER:
            raise UserError(f"MoEConfig.balance_over ({self.balance_over!r}) must be one of {', '.join(BALANCE_OVER)}")
        if self.router_dtype not in ROUTER_DTYPES:
            raise UserError(f"MoEConfig.router_dtype ({self.router_dtype!r}) must be one of {', '.join(ROUTER_DTYPES)}")

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
