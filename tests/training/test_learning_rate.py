"""The learning rate at warm-up, corner and end, derived by hand."""

import math

import jax
import numpy as np
import pytest

from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError
from moe_jax.training.optimizer import build_learning_rate

# peak 2, final share 0.1: with W = 10 from 2 / 10 at update 0 in a line to 2 at update 10
RISE = {0: 0.2, 5: 1.1, 10: 2.0}
CASES = {
    # by a cosine to 2 x 0.1: step 55 is half way down
    "cosine": ({}, {**RISE, 55: 1.1, 100: 0.2, 150: 0.2}),
    "cosine_without_rise": ({"warmup_steps": 0}, {0: 2.0, 50: 1.1, 100: 0.2}),
    # no room for 20 steps: three are left
    "cosine_short": ({"steps": 4, "warmup_steps": 20}, {0: 2 / 3, 3: 2.0, 4: 0.2}),
    "cosine_of_one": ({"steps": 1, "warmup_steps": 20}, {0: 2.0}),
    "constant": ({"learning_rate_schedule": "constant"}, {**RISE, 11: 2.0, 100: 2.0, 150: 2.0}),
    # 90 updates for a fall of 1.8: 0.02 each
    "linear": ({"learning_rate_schedule": "linear"}, {**RISE, 11: 1.98, 55: 1.1, 100: 0.2, 150: 0.2}),
    # stable up to update 80, then 20 updates for 1.8: 0.09 each
    "wsd": (
        {"learning_rate_schedule": "wsd", "decay_steps": 20},
        {**RISE, 11: 2.0, 80: 2.0, 81: 1.91, 90: 1.1, 100: 0.2, 150: 0.2},
    ),
    # after 5 of 20 half of the fall is done, after 1 the share sqrt(1 / 20)
    "wsd_1_sqrt": (
        {"learning_rate_schedule": "wsd", "decay_steps": 20, "decay_shape": "1-sqrt"},
        {**RISE, 80: 2.0, 81: 2 - 1.8 * math.sqrt(0.05), 85: 1.1, 100: 0.2, 150: 0.2},
    ),
    # a tenth of 100 steps
    "wsd_tenth": ({"learning_rate_schedule": "wsd"}, {**RISE, 90: 2.0, 95: 1.1, 100: 0.2}),
}


@pytest.mark.parametrize("case", CASES)
def test_schedules(case):
    fields, values = CASES[case]
    fields = {"steps": 100, "warmup_steps": 10, "learning_rate": 2.0, "final_learning_rate": 0.1, **fields}
    schedule = build_learning_rate(TrainConfig(**fields))
    traced = jax.jit(schedule)
    for step, value in values.items():
        np.testing.assert_allclose([schedule(step), traced(np.int32(step))], value, rtol=1e-6, err_msg=str(step))


@pytest.mark.parametrize(
    "fields, text",
    [
        (
            {"learning_rate_schedule": "wsd", "steps": 30, "decay_steps": 11},
            "train.warmup_steps (20) and train.decay_steps (11) must fit into train.steps (30) under 'wsd'; lower "
            "one of the two",
        ),
        (
            {"decay_steps": 5},
            "train.decay_steps (5) needs train.learning_rate_schedule = 'wsd'; under 'cosine' leave it 0",
        ),
    ],
)
def test_mistakes_are_one_line(fields, text):
    with pytest.raises(UserError) as caught:
        TrainConfig(**fields)
    assert str(caught.value) == text
