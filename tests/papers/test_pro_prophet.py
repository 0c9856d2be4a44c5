"""Pro-Prophet's rows: which system stands in which column, and what each experiment changes and leaves."""

import numpy as np
import pytest

from moe_jax.observe.loads import LoadsTrace
from moe_jax.papers.loads import SHIPPED, find_loads, with_loads_before
from moe_jax.papers.pro_prophet import TORCH_SEARCH, Row, released_seconds, setting_of, speedups, step_of
from moe_jax.papers.systems import DEEPSPEED, FASTERMOE, PRO_PROPHET, run
from moe_jax.papers.table import Inputs

INPUTS, ROW = Inputs(trace="drifting"), Row(1)


def test_speedups_stand_in_the_order_of_their_columns():
    plain, shadowed, ours = (
        run(one, setting_of(INPUTS, ROW)).iterations.mean() for one in (DEEPSPEED, FASTERMOE, PRO_PROPHET)
    )
    expected = [plain / shadowed, plain / ours, min(plain, shadowed) / ours]
    assert shadowed != ours
    np.testing.assert_allclose(speedups(INPUTS, ROW), expected)


def test_the_iteration_before_is_the_recorded_one_or_lies_a_tenth_of_the_way_back():
    loads = np.zeros((3, 1, 1, 2), np.int64)
    loads[:, 0, 0, 0] = (0, 100, 400)
    between = with_loads_before(LoadsTrace(loads, np.array([0, 10, 20])))
    assert between.loads[:, 0, 0, 0].tolist() == [90, 100, 370, 400]
    assert between.iterations.tolist() == [9, 10, 19, 20]
    recorded = with_loads_before(LoadsTrace(loads, np.array([0, 9, 10])))
    assert recorded.loads[:, 0, 0, 0].tolist() == [0, 100, 400]
    assert len(run(DEEPSPEED, setting_of(INPUTS, ROW)).records.sample) == 49


def test_whole_iterations_have_the_head_and_the_sums_of_dense_gradients():
    """MoE-GPT-M, 1,024 tokens on each of 16 GPUs: 6 M V FLOPs a token; 4 L M^2 + V M gradients of 16 bits, twice."""
    layers, whole = (step_of(INPUTS, DEEPSPEED, ROW, change).iterations for change in ("", "whole"))
    head = 6 * 1024 * 50304 * 1024 / (0.7 * 71e12)
    sums = 2 * 15 / 16 * 2 * (4 * 12 * 1024**2 + 50304 * 1024) / (0.86 * 12.5e9)
    np.testing.assert_allclose(whole - layers, head + sums, rtol=1e-9)


def test_the_released_search_waits_for_an_all_gather_and_a_copy_of_each_count():
    """4 nodes of 4: a start, 12 messages to other nodes and 3 inside; 17 copies of 5 us, one to the host."""
    waited = 45e-6 + 12 * 1.0e-6 + 3 * 1.1e-6 + 17 * 5e-6
    np.testing.assert_allclose(released_seconds(setting_of(INPUTS, ROW)), TORCH_SEARCH + waited)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_traces_have_the_step_before_each_sample(name):
    steps = find_loads(name).iterations
    assert steps[np.isin(steps - 1, steps)].tolist() == list(range(10, 501, 10))
