"""Replicas that come after the gate inside a block-wise schedule, which brings others ahead: equal to the reference.

Hecate's three parts at once: what is planned ahead comes beside attention, calibration adds more once the gate has
counted. float64, 1e-10 of the largest reference entry of each leaf.
"""

import pytest
from support.prefetch_cases import check

from moe_jax.moe.after_gate_rules import CalibrateRule, ShadowRule
from moe_jax.parallel.transfer_shape import TransferShape


def calibrated(shape):
    """Up to two replicas more on a device, by node, at a price that some layers pay."""
    sizes = {"devices": shape.devices, "devices_per_node": shape.devices_per_node, "offers": 2, "slots": 2}
    late = TransferShape(**sizes, by_node=True, crossing=3)
    rule = CalibrateRule(overlap_degree=3, compute=1.0, exchange=0.5, late_transfer=0.25)
    return {"late": late, "after_gate": rule, "candidates": shape.devices}


def shadowed(shape):
    """Shadows alone, flat: nothing is brought ahead."""
    late = TransferShape(devices=shape.devices, devices_per_node=shape.devices_per_node, offers=1, slots=2)
    return {"late": late, "ahead": None, "after_gate": ShadowRule(compute=1.0, exchange=0.5, shadow=8.0, residual=True)}


CASES = {
    "hecate": {"prefetch": "hecate", "late": calibrated},
    "shadows_pro_prophet_unrolled": {"prefetch": "pro_prophet", "stack": "unrolled", "late": shadowed},
    "again_block_data2": {
        "prefetch": "hecate", "refetch_replicas": True, "remat": "block", "mesh": {"expert": 4, "data": 2},
        "late": calibrated,
    },
    "halves": {"prefetch": "hecate", "overlap": "halves", "mesh": {"expert": 4}, "late": calibrated},
    "split_s1_mp2_esp2": {
        "prefetch": "pro_prophet", "schedule": "s1", "mesh": {"expert": 4, "expert_shard": 2, "model": 2},
        "late": calibrated,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in ("hecate", "halves") else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_equals_reference(name):
    check(**CASES[name])
