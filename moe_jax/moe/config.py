"""What one MoE layer is: sizes, gate, capacity and the way its tokens travel. Host side; no arrays."""

from __future__ import annotations

import dataclasses

from moe_jax import plugins
from moe_jax.errors import UserError
from moe_jax.kernels.float8 import COMPUTE, DTYPES, E4M3, bytes_of_row
from moe_jax.moe.routers import find, router_knobs
from moe_jax.moe.routers.options import RouterOptions
from moe_jax.parallel.exchange import TRANSPORTS

RESIDUALS = ("sum", "learned")
_KNOBS = (*router_knobs(), *(knobs for module in plugins.load("knobs") for knobs in module.KNOBS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(*_KNOBS, RouterOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """One MoE layer: its router and how it moves bytes.

    The attributes of `RouterOptions` come first, then the knobs that routers' files declare.

    Attributes:
      aux_loss_weight: weight of the load-balancing loss.
      z_loss_weight: weight of the squared log-partition loss of the gate.
      schedule: how the layer moves bytes; a name of `moe_jax.moe.schedules`; 'auto': as the planner `auto` chooses
        from observed loads.
      transport: how rows travel in an exchange: 'all_to_all', 'two_level', or with the schedules s1 and s2
        'coordinated', among devices of equal place in their groups (DeepSpeed-MoE); generation also takes 'auto', the
        shortest by `cluster`.
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
    """

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

    def __post_init__(self):
        super().__post_init__()
        for knobs in _KNOBS:
            if any(getattr(self, field.name) != field.default for field in dataclasses.fields(knobs)):
                knobs.check(self)
        find(self.router).check(self)
        if self.bucket_slack <= 0:
            raise UserError(f"MoEConfig.bucket_slack ({self.bucket_slack}) must be positive; 1.5 suits most runs")
        if not 0 <= self.overflow_chance < 1:
            raise UserError(
                f"MoEConfig.overflow_chance ({self.overflow_chance}) must be at least 0 and below 1; 0.001 suits "
                "optimistic steps of about ten layers, 0 takes MoEConfig.bucket_slack"
            )
        if self.gather not in ("auto", "saa", "aas"):
            raise UserError(f"MoEConfig.gather ({self.gather!r}) must be 'auto', 'saa' or 'aas'")
        if self.transport not in (*TRANSPORTS, "auto"):
            raise UserError(f"MoEConfig.transport ({self.transport!r}) must be one of {', '.join(TRANSPORTS)}")
        if self.transport == "coordinated" and self.gather == "saa":
            raise UserError(
                "MoEConfig.gather ('saa') cannot be used with MoEConfig.transport = 'coordinated', which returns rows "
                "by a reduce-scatter before its exchange; set MoEConfig.gather = 'auto'"
            )
        if self.pairwise_groups < 0:
            raise UserError(f"MoEConfig.pairwise_groups ({self.pairwise_groups}) must be 0 (by topology) or positive")
        for name in ("shared_experts", "shared_hidden_dim"):
            if getattr(self, name) < 0:
                raise UserError(f"MoEConfig.{name} ({getattr(self, name)}) must be 0 or positive")
        if self.shared_hidden_dim and not self.shared_experts:
            raise UserError(
                f"MoEConfig.shared_hidden_dim ({self.shared_hidden_dim}) needs MoEConfig.shared_experts of at least 1, "
                "not 0"
            )
        if self.dispatch_dtype not in DTYPES:
            raise UserError(f"MoEConfig.dispatch_dtype ({self.dispatch_dtype!r}) must be one of {', '.join(DTYPES)}")
        if self.residual not in RESIDUALS:
            raise UserError(f"MoEConfig.residual ({self.residual!r}) must be one of {', '.join(RESIDUALS)}")
        if self.residual == "learned" and not self.shared_experts:
            raise UserError(
                "MoEConfig.residual ('learned') mixes routed experts with shared ones, and MoEConfig.shared_experts is "
                "0; set it to 1, or MoEConfig.residual = 'sum'"
            )

    def shared_ffn_dim(self, hidden_dim: int) -> int:
        """Return the hidden dim of all shared experts together, 0 without any; hidden_dim: of a routed one."""
        return self.shared_experts * (self.shared_hidden_dim or hidden_dim)

    def sent_bytes(self, model_dim: int) -> int:
        """Return the bytes of a row on its way to experts where it travels as float8, else 0."""
        return bytes_of_row(model_dim) if self.dispatch_dtype == E4M3 else 0
