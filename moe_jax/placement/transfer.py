"""What a transfer of replicas costs in bytes, by the skeleton's method alone.

Inputs: a skeleton and the bytes of one expert. Outputs: bytes on the wire, and bytes of the operands as they stand in a
compiled program. Every round and slot of the skeleton costs its bytes, used or not. Trans (parameters to the replicas)
and Agg (gradients to the homes) cost the same, but under `gather` and `broadcast` in 16 bits: their collectives sum in
float32, so there Agg is twice Trans. Letters: docs/notation.md.
"""

from __future__ import annotations

from moe_jax.placement.placement import Placement
from moe_jax.placement.tables import Skeleton, build_skeleton


def transfer_bytes(skeleton: Skeleton, expert_bytes: float, layer: int = 0) -> float:
    """Return the most bytes that one device sends in one layer's Trans.

    `shift` and `permute`: T Z. `gather`: (D - 1) X Z, its offer to all others. `broadcast`: 2 (D - 1) / D Y Z, a ring's
    all-reduce.
    """
    devices = skeleton.devices
    if skeleton.method in ("shift", "permute"):
        return _rounds(skeleton, layer) * expert_bytes
    if skeleton.method == "gather":
        return (devices - 1) * skeleton.gather_slots * expert_bytes
    return 2 * (devices - 1) / devices * skeleton.broadcast_slots * expert_bytes


def operand_bytes(skeleton: Skeleton, expert_bytes: float, layer: int = 0, reduce: bool = False) -> dict[str, float]:
    """Return {collective: bytes of its operands on one device} of one layer's Trans, or of its Agg with `reduce`."""
    if skeleton.method in ("shift", "permute"):
        return {"collective_permute": _rounds(skeleton, layer) * expert_bytes}
    if skeleton.method == "gather" and reduce:
        return {"reduce_scatter": skeleton.devices * skeleton.gather_slots * expert_bytes}
    if skeleton.method == "gather":
        return {"all_gather": skeleton.gather_slots * expert_bytes}
    return {"all_reduce": skeleton.broadcast_slots * expert_bytes}


def cheapest_method(placement: Placement, methods: tuple[str, ...] = ("shift", "gather", "broadcast")) -> str:
    """Return the method whose skeleton for this placement sends the fewest bytes; of equals the first."""
    if not len(placement.replicas):
        return methods[0]
    return min(methods, key=lambda method: transfer_bytes(build_skeleton(placement, method=method), 1.0))


def _rounds(skeleton: Skeleton, layer: int) -> int:
    if not skeleton.rounds:
        return 0
    return len(skeleton.rounds[layer if len(skeleton.rounds) > 1 else 0])
