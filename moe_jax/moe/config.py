"""What one MoE layer is: sizes, gate, capacity and the way its tokens travel. Host side; no arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from moe_jax.errors import UserError, check_bounds, check_choices
from moe_jax.kernels.float8 import COMPUTE, DTYPES, E4M3, bytes_of_row
from moe_jax.parallel.exchange import TRANSPORTS
from moe_jax.registry import ROUTERS

BALANCE_OVER = ("batch", "sequence", "step")
CHOICES = {
    "drop": ("position", "probability"),
    "router_dtype": ("auto", "bfloat16", "float32", "float64"),
    "balance_over": BALANCE_OVER,
    "transport": TRANSPORTS,
    "gather": ("auto", "saa", "aas"),
    "dispatch_dtype": DTYPES,
    "residual": ("sum", "learned"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer: its router and how it moves bytes. What one router alone reads are its own options, in its file.

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
      router_dtype: dtype in which logits are computed: 'float32', 'bfloat16', 'float64', or 'auto', the compute dtype's
        but at least float32. What follows is computed in at least float32.
      balance_over: tokens over which the load-balancing loss is formed: 'batch', all those of the global microbatch;
        'sequence', each sequence by itself, and the mean of theirs (DeepSeek-V3, equations 17 to 20); or 'step', where
        each microbatch's probabilities meet the loads of all microbatches of the step up to it, so that with
        train.grad_accum_steps experts need not be even in each (Qiu et al. 2025, Demons in the Detail).
      expert_groups: equal groups of consecutive experts, inside a few of which a token chooses: with even homes and as
        many groups as nodes it then visits few nodes (DeepSeek-V2, section 2.1.3); 0 is none.
      kept_groups: groups inside which a token chooses its K experts.
      cluster: file written by `python -m moe_jax.calibrate`, by which the schedule 'parm' and `gather` 'auto' choose;
        without one by the devices at hand. The router 'topology' takes bandwidths from it, or from a preset's file.
      record_choices: let every token's choices leave with the statistics of a microbatch (`StepStats.choices`), for
        `Batch.choices` to replay them.
      aux_loss_weight: weight of the load-balancing loss.
      z_loss_weight: weight of the squared log-partition loss of the gate.
      schedule: how the layer moves bytes; a name of `moe_jax.moe.schedules`; 'auto': as the planner `auto` chooses
        from observed loads.
      transport: how rows travel in an exchange: 'all_to_all', 'two_level', or with the schedules s1 and s2
        'coordinated', among devices of equal place in their groups (DeepSpeed-MoE).
      pairwise_groups: groups of the schedule 'pairwise'; 0 makes one of the expert-parallel devices of each node.
      gather: how the schedule 's2' returns: 'saa' (all-to-all and all-gather at the same time), 'aas' (in turn), or
        'auto', the one that `cluster` finds shorter; without it 'aas'. Sums are the same; their last bits may
        differ.
      grouped_matmul: implementation of the grouped matmul; 'auto' takes the device's default.
      bucket_slack: dropless only: rows of one (source, destination) bucket over the mean number of rows.
      overflow_chance: dropless only: instead of a slack, as many rows as even loads need when drawn at random: the
        chance that one exchange (a layer's in a microbatch, all pairs of devices) overflows; 0 takes the slack. With a
        planner the loads are those that it predicts. A router that is more skewed than that overflows more often, and
        steps are run again, or straight by the complete program: for routers that are kept even, or planned for.
      shared_experts: n, experts that every token goes to, besides those it chooses; 0 is none.
      shared_hidden_dim: hidden dim of each of them; 0 takes that of the routed ones.
      dispatch_dtype: of the rows that travel to experts: 'compute', ModelConfig.dtype; or 'float8_e4m3' with a scale
        for each block of 128, about half of bfloat16's bytes; the way back and all gradients travel in the compute
        dtype (`moe/schedule.py`).
      residual: with shared experts: 'sum' adds them to the routed ones, 'learned' mixes the two by a softmax over each
        token.
      options: of routers and schedules, those that are not the defaults; gin binds them by their own names
        (`registry.py`).
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
    expert_groups: int = 0
    kept_groups: int = 1
    cluster: str = ""
    record_choices: bool = False
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.001
    schedule: str = "deepspeed"
    transport: str = "all_to_all"
    pairwise_groups: int = 0
    gather: str = "auto"
    grouped_matmul: str = "auto"
    bucket_slack: float = 1.5
    overflow_chance: float = 0.0
    shared_experts: int = 0
    shared_hidden_dim: int = 0
    dispatch_dtype: str = COMPUTE
    residual: str = "sum"
    options: tuple[Any, ...] = ()

    def __post_init__(self):
        ones = dict.fromkeys(("num_experts", "top_k", "min_capacity", "kept_groups"), 1)
        zeros = "gate_noise overflow_chance expert_groups pairwise_groups shared_experts shared_hidden_dim".split()
        above = dict.fromkeys(("capacity_factor", "routed_scale", "bucket_slack"), 0)
        check_bounds(self, ones | dict.fromkeys(zeros, 0), above)
        check_choices(self, CHOICES)
        if self.top_k > self.num_experts:
            raise UserError(
                f"MoEConfig.top_k ({self.top_k}) must be at most MoEConfig.num_experts ({self.num_experts})"
            )
        # groups that divide the experts, and hold enough for a token
        groups, kept = self.expert_groups, self.kept_groups
        if groups and self.num_experts % groups:
            raise UserError(
                f"MoEConfig.expert_groups ({groups}) must divide MoEConfig.num_experts ({self.num_experts}), or be 0 "
                "for no groups"
            )
        if groups and kept > groups:
            raise UserError(f"MoEConfig.kept_groups ({kept}) must be at most MoEConfig.expert_groups ({groups})")
        if groups and self.top_k > (inside := kept * self.num_experts // groups):
            raise UserError(
                f"MoEConfig.top_k ({self.top_k}) must be at most the {inside} experts of MoEConfig.kept_groups "
                f"({kept}) groups; raise kept_groups or lower MoEConfig.expert_groups"
            )
        ROUTERS.find(self.router).check(self)
        if self.overflow_chance >= 1:
            raise UserError(
                f"MoEConfig.overflow_chance ({self.overflow_chance}) must be below 1; 0.001 suits optimistic steps of "
                "about ten layers, 0 takes MoEConfig.bucket_slack"
            )
        if self.transport == "coordinated" and self.gather == "saa":
            raise UserError(
                "MoEConfig.gather ('saa') cannot be used with MoEConfig.transport = 'coordinated', which returns rows "
                "by a reduce-scatter before its exchange; set MoEConfig.gather = 'auto'"
            )
        if not self.shared_experts and self.shared_hidden_dim:
            raise UserError(
                f"MoEConfig.shared_hidden_dim ({self.shared_hidden_dim}) needs MoEConfig.shared_experts of at least 1, "
                "not 0"
            )
        if not self.shared_experts and self.residual == "learned":
            raise UserError(
                "MoEConfig.residual ('learned') mixes routed experts with shared ones, and MoEConfig.shared_experts is "
                "0; set it to 1, or MoEConfig.residual = 'sum'"
            )

    @property
    def dropless(self) -> bool:
        """Whether every choice reaches its expert."""
        return self.capacity_factor is None

    def capacity(self, tokens: int) -> int:
        """Return the most of `tokens` tokens that each expert takes when they are gated together.

        Source: DeepSpeed-MoE's top-k gate, capacity = max(min_capacity, ceil(K f t / E)).
        """
        if self.capacity_factor is None:
            return tokens
        capacity = math.ceil(self.top_k * self.capacity_factor * tokens / self.num_experts)
        return min(tokens, max(self.min_capacity, capacity))

    def shared_ffn_dim(self, hidden_dim: int) -> int:
        """Return the hidden dim of all shared experts together, 0 without any; hidden_dim: of a routed one."""
        return self.shared_experts * (self.shared_hidden_dim or hidden_dim)

    def sent_bytes(self, model_dim: int) -> int:
        """Return the bytes of a row on its way to experts where it travels as float8, else 0."""
        return bytes_of_row(model_dim) if self.dispatch_dtype == E4M3 else 0
