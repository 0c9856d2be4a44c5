"""Pro-Prophet's rows: which system stands in which column, and what each experiment changes and leaves."""

import numpy as np

from moe_jax.papers.pro_prophet import Row, setting_of, speedups
from moe_jax.papers.systems import DEEPSPEED, FASTERMOE, PRO_PROPHET, run
from moe_jax.papers.table import Inputs

INPUTS, ROW = Inputs(trace="drifting", track=lambda items, label: items), Row(1)


def test_speedups_stand_in_the_order_of_their_columns():
    plain, shadowed, ours = (
        run(one, setting_of(INPUTS, ROW)).iterations.mean() for one in (DEEPSPEED, FASTERMOE, PRO_PROPHET)
    )
    expected = [plain / shadowed, plain / ours, min(plain, shadowed) / ours]
    assert shadowed != ours
    np.testing.assert_allclose(speedups(INPUTS, ROW), expected)
    seen = speedups(INPUTS, ROW, "seen")
    assert seen[0] == speedups(INPUTS, ROW)[0] and seen[1] != expected[1]


def test_float32_doubles_the_bytes_and_takes_the_gpus_float32_rate():
    """An RTX 3090 has 71 TFLOP/s in float16 and 35.6 in float32 (GA102 whitepaper)."""
    half, whole = setting_of(INPUTS, ROW), setting_of(INPUTS, ROW, "float32")
    assert (half.item, whole.item) == (2, 4)
    assert (half.cluster.flops, whole.cluster.flops) == (71e12, 35.6e12)
    np.testing.assert_allclose(run(DEEPSPEED, whole).records.exchange, 2 * run(DEEPSPEED, half).records.exchange)
