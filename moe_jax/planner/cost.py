"""The cost of a layer under a placement, in seconds and bytes.

Inputs: a cluster, the layer's sizes, tokens computed H and received R per device, and which device holds what. Outputs:
seconds by the papers' formulas. Nothing is searched here.

Letters: docs/notation.md; `...` stands for any leading dims; W, P, v as in the papers' formulas.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from moe_jax.cluster import Cluster, all_reduce_bytes
from moe_jax.errors import UserError
from moe_jax.overlap import Prefetch, Times, exposed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Hold all inputs of a planner but loads and placement.

    Attributes:
      model_dim, hidden_dim: M and F of one expert (two matrices M x F).
      dtype_bytes: bytes of one number of activations, parameters and gradients.
      optimizer_bytes: bytes of optimizer state per parameter (two float32 moments by default).
      replica_slots: mu; overlap_degree: tau, or None to derive it.
      attention_seconds: forward time of what precedes an MoE layer (T_FNEC); its backward takes twice that.
      layers_alive: layers whose replicas are in memory at the same time.
      load_error: relative error of the loads that are planned with, by layer; () where they are known.
      prefetch: the block-wise schedule that hides transfers; Pro-Prophet's is that of its equation 8.
    """

    cluster: Cluster
    model_dim: int
    hidden_dim: int
    dtype_bytes: int = 4
    optimizer_bytes: int = 8
    replica_slots: int = 4
    overlap_degree: int | None = None
    attention_seconds: float | None = None
    layers_alive: int = 1
    load_error: tuple[float, ...] = ()
    prefetch: Prefetch = Prefetch(schedule="pro_prophet")

    def __post_init__(self):
        for field in ("model_dim", "hidden_dim", "dtype_bytes", "layers_alive"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} ({getattr(self, field)}) must be at least 1")
        if self.replica_slots < 0 or (self.overlap_degree is not None and self.overlap_degree < 0):
            raise UserError(
                f"replica_slots ({self.replica_slots}) and overlap_degree ({self.overlap_degree}) must be at least 0"
            )
        memory = self.cluster.memory_bytes
        replicas = self.replica_slots * self.layers_alive * self.expert_bytes
        if memory is not None and replicas > memory:
            raise UserError(
                f"every device: {self.replica_slots} replica_slots x {self.layers_alive} layers alive x "
                f"{self.expert_bytes} bytes of an expert = {replicas} bytes exceed Cluster.memory_bytes ({memory:.0f}) "
                "(rule: replicas must fit in memory); use at most replica_slots = "
                f"{slots_in(memory, self.layers_alive, self.expert_bytes)}"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's activations."""
        return self.model_dim * self.dtype_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's parameters; its gradients take as much."""
        return 2 * self.model_dim * self.hidden_dim * self.dtype_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes that move when an expert changes its home: parameters and optimizer state."""
        return self.expert_bytes + 2 * self.model_dim * self.hidden_dim * self.optimizer_bytes

    def bandwidth(self, requested_by: str) -> float:
        """W in bytes/s."""
        return self.cluster.bandwidth(f"planner {requested_by!r}")

    def tokens_per_second(self, requested_by: str) -> float:
        """v: tokens per second that one device computes in an expert's forward, P / (4 M F)."""
        return self.cluster.need("flops", f"planner {requested_by!r}") / (4.0 * self.model_dim * self.hidden_dim)

    def overlap(self, requested_by: str) -> int:
        """tau: given, or floor(T_attention W / bytes of an expert) (Hecate 4.2)."""
        if self.overlap_degree is not None:
            return self.overlap_degree
        if self.attention_seconds is None:
            raise UserError(
                f"planner {requested_by!r} needs overlap_degree, or attention_seconds to derive it; set "
                "PlannerConfig.overlap_degree"
            )
        return math.floor(self.attention_seconds * self.bandwidth(requested_by) / self.expert_bytes)

    def exchange(self, received: np.ndarray, requested_by: str) -> np.ndarray:
        """T_A2A: R [..., D] -> seconds [...]. Source: Pro-Prophet, equation 1."""
        return received.max(axis=-1) * self.token_bytes / self.bandwidth(requested_by)

    def forward(self, computed: np.ndarray, requested_by: str) -> np.ndarray:
        """T_FEC: H [..., D] -> seconds [...]; the backward takes twice that. Source: Pro-Prophet, equations 2 and 3."""
        return computed.max(axis=-1) / self.tokens_per_second(requested_by)

    def transfer(self, holders: np.ndarray, devices: int, requested_by: str) -> np.ndarray:
        """T_Trans = T_Agg: seconds to send parameters to replicas, or to sum their gradients.

        That is the sum over replicated experts of holders / D x bytes of an expert / W.

        Args:
          holders: [...], devices that hold a replicated expert, home included, summed over the layer's replicated
            experts: s (D - n) when each of s experts skips n devices.

        Source: Pro-Prophet, equations 4 and 5.
        """
        return holders * self.expert_bytes / (devices * self.bandwidth(requested_by))

    def layer(
        self, computed: np.ndarray, received: np.ndarray, holders: np.ndarray, requested_by: str, scheduler: bool = True
    ) -> np.ndarray:
        """T of one layer, forward and backward: H, R [..., D], holders [...] -> seconds [...].

        Source: Pro-Prophet, equation 8 with the scheduler (and its split over attention and experts), 6 without.
        """
        parts = self.parts(computed, received, holders, requested_by, scheduler)
        return parts["place"] + parts["reduce"] + parts["others"]

    def parts(
        self, computed: np.ndarray, received: np.ndarray, holders: np.ndarray, requested_by: str, scheduler: bool = True
    ) -> dict[str, np.ndarray]:
        """Return the same time by purpose: place (Trans), reduce (Agg), others. Source: Pro-Prophet, table I."""
        forward = self.forward(computed, requested_by)
        transfer = self.transfer(holders, computed.shape[-1], requested_by)
        times = Times(attention=self.attention_seconds or 0.0, experts=forward, trans=transfer, agg=transfer)
        place, reduce = exposed(self.prefetch if scheduler else Prefetch(), times)
        return {
            "place": place,
            "reduce": reduce,
            "others": 4 * self.exchange(received, requested_by) + 3 * forward,
        }


def slots_in(free_bytes: float, layers_alive: int, expert_bytes: float) -> int:
    """mu: replicas of a device that fit, floor(free / (layers alive x bytes of an expert)) (Hecate 4.2)."""
    return int(free_bytes // (layers_alive * expert_bytes))


def standing_replica_bytes(replicas: np.ndarray, expert_bytes: float) -> np.ndarray:
    """Bytes of all-reduces over standing replicas: replicas [..., E] -> [...].

    They are the sum over experts i of 2 (n_i - 1) / n_i Z with n_i = replicas + 1 holders.

    Source: Hecate, equation 2, on what rearranging systems (FlexMoE) pay each step.
    """
    return all_reduce_bytes(expert_bytes, replicas + 1).sum(axis=-1)
