"""The MoE layer: gate, experts and what lies between them. See README.md."""

from moe_jax.kernels.grouped import GroupedWeights, grouped_matmul
from moe_jax.moe.build import make_moe
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.flax_layer import MoELayer
from moe_jax.moe.reference import reference_moe
from moe_jax.moe.routers import GateStats, balance_loss, choose_experts

__all__ = [
    "GateStats",
    "GroupedWeights",
    "MoEConfig",
    "MoELayer",
    "balance_loss",
    "choose_experts",
    "grouped_matmul",
    "make_moe",
    "reference_moe",
]
