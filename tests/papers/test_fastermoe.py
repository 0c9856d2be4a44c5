"""FasterMoE's tables: its formulas against numbers by hand."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest

from moe_jax.cluster import read_cluster
from moe_jax.papers import fastermoe
from moe_jax.papers.table import Inputs

SETTING = dataclasses.replace(  # by the figures of the file alone
    fastermoe.setting_of(Inputs(trace="W0_balanced"), "GPT-S"),
    cluster=read_cluster("configs/cluster/johnny.gin"),
)


def test_seconds_are_those_of_the_paper_s_formulas():
    """johnny and MoE-GPT-S: P 12.6 TFLOP/s, W 6.25 GB/s; 1,024 rows of 4 KB and two choices on each of 16 devices."""
    token, row, expert = 4 * 1024 * 2048 / 12.6e12, 4096 / 6.25e9, 2 * 1024 * 2048 * 4 / 6.25e9
    assert fastermoe.prices(SETTING) == pytest.approx((token, row, expert))
    # a ring of 16: 15/16 of 16 experts, three times in stage 3, next to a shorter computation
    assert fastermoe.zero_seconds(SETTING, 3) == pytest.approx(3 * 15 * expert)
    assert fastermoe.zero_seconds(SETTING, 1) == pytest.approx(3 * 2048 * token + 2 * 15 * expert)
    # 128 rows of every pair: 8 x 8 of them leave a node by its card; a shadow moves there and back
    pairs = np.full((1, 1, 16, 16), 128)
    experts, moved = fastermoe.in_turn(SETTING, pairs, expert)
    assert experts.item() == pytest.approx(3 * 16 * 128 * token)
    assert moved.item() == pytest.approx(4 * 64 * 128 * row + 2 * expert)


def test_smart_schedule_exposes_its_first_and_last_transfer():
    """Experts of a second for the rows of a pair of devices hide all but S_0 and S'_7; without any the links set it."""
    slow, fast = (
        dataclasses.replace(SETTING, cluster=dataclasses.replace(SETTING.cluster, flops=flops))
        for flops in (4.0 * 1024 * 2048 * 128 * 2, 1e30)
    )
    pairs, shadows = np.full((1, 1, 16, 16), 128), np.full((1, 1), 0.5)
    first, last = 128 * 4096 / 15.75e9, 4 * 128 * 4096 / 6.25e9  # one row's device away; one group of two out of a node
    assert fastermoe.smart(slow, pairs).item() == pytest.approx(3 * 8 + 2 * (first + last), rel=1e-9)
    assert fastermoe.smart(slow, pairs, shadows).item() == pytest.approx(3 * 8 + 2 * (first + last) + 1, rel=1e-9)
    # out of a node step 1 and 7 send one group, 2 and 6 two, 3 and 5 three, 4 all four
    out = (first + (1 + 2 + 3 + 4 + 3 + 2 + 1) * last) * 4
    assert fastermoe.smart(fast, pairs).item() == pytest.approx(out, rel=1e-6)


ROOT = pathlib.Path(__file__).parents[2]


def test_steps_of_a_gate_are_those_at_the_capacity_that_is_timed():
    """An expert takes 1.2 of a device's tokens, which of two choices over as many experts as devices is 0.6 of even."""
    names = {"GShard": f"gshard at capacity {fastermoe.GSHARD_CAPACITY / fastermoe.TOP_K:g}", "BASE": "base"}
    table = (ROOT / "docs/results.md").read_text()
    for gate, name in names.items():
        (row,) = re.findall(rf"^\| {name} \| .* \| ([\d.]+)", table, re.MULTILINE)
        assert float(row) == fastermoe.STEPS[gate], gate
