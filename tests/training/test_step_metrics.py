"""One step's arrays as one record, and the line that a loss which is not finite gets."""

import numpy as np
import pytest

from moe_jax.errors import NonFiniteError
from moe_jax.training.step_metrics import check_finite, step_record

NAMES = ["bank/w_in", "bank/w_out", "dense/norm/scale"]


def metrics_of(loss, square_norms):
    return {"loss": np.float32(loss), "square_norms": np.float32(square_norms)}


def test_check_finite_names_the_first_leaf():
    check_finite(3, metrics_of(1.5, [0.0, 1.0, 1e30]), NAMES, None)
    with pytest.raises(NonFiniteError) as caught:
        check_finite(7, metrics_of(2.5, [1.0, np.inf, np.nan]), NAMES, 4)
    assert str(caught.value) == (
        "step 7: the loss is 2.5, and gradient leaf 'bank/w_out' is the first that is not finite; the checkpoint of "
        "step 4 is kept. Lower train.learning_rate, or raise train.warmup_steps, or let train.max_skipped_steps "
        "leave out a few such steps"
    )
    with pytest.raises(NonFiniteError, match="the loss is inf, and every gradient is finite; there is no checkpoint"):
        check_finite(2, metrics_of(np.inf, [1.0, 1.0, 1.0]), NAMES, None)


def test_step_record():
    """Two layers, two sources, four experts on two devices; every figure by hand."""
    loads = np.array([[[4, 0, 2, 2], [2, 0, 3, 3]], [[8, 0, 0, 0], [8, 0, 0, 0]]], np.int32)
    metrics = {
        "loss": np.float32(2.0),
        "aux_loss": np.float32(1.25),
        "z_loss": np.float32(0.5),
        "learning_rate": np.float32(0.25),
        "grad_norm": np.float32(4.0),
        "dropped": np.int32([3, 1]),
        "passes": np.int32([1, 2]),
        "loads": loads,
        "gate_entropy": np.float32([1.0, 0.5]),
    }
    homes = [(np.array([[0, 0, 1, 1]]), 2), (np.array([[0, 1, 0, 1]]), 2)]  # two segments of a layer each
    record = step_record(metrics, 32, homes)  # 8 tokens, 2 each, 2 layers
    assert record.pop("passes") is metrics["passes"] and record.pop("gate_entropy") is metrics["gate_entropy"]
    # layer 0: devices compute 6 and 10 of 16; layer 1: 16 and 0
    np.testing.assert_array_equal(record.pop("device_load_max_over_mean"), [10 / 8, 2])
    np.testing.assert_array_equal(record.pop("dead_experts"), [1, 3])
    assert record == {
        "loss": 2.0,
        "aux_loss": 1.25,
        "z_loss": 0.5,
        "learning_rate": 0.25,
        "grad_norm": 4.0,
        "dropped_fraction": 4 / 32,
        "overflow_steps": 1,
    }
