"""Rows that even or stated loads need at random: against binomials summed exactly, and against draws."""

import math
import runpy

import pytest

from moe_jax.config.gin_files import parse_run_config
from moe_jax.errors import UserError
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import build_mesh
from moe_jax.planning.sizes import expected_rows, overflow_chance

BINDINGS = (
    "ModelConfig.layers = 2", "ModelConfig.moe_every = 1", "MoEConfig.num_experts = 8", "MoEConfig.top_k = 2",
    "DataConfig.sequence_length = 256", "ModelConfig.max_length = 256", "train.batch_size = 8",
    "MeshConfig.expert = 4", "MeshConfig.devices_per_node = 2", "MeshConfig.data = 1",
)  # fmt: skip
BALANCED = (
    "PlannerConfig.name = 'balanced'", "PlannerConfig.replica_slots = 2", "PlannerConfig.when = 'ahead'",
    "PlannerConfig.cluster = 'configs/cluster/flat_3gbs_30tflops.gin'",
)  # fmt: skip


@pytest.mark.parametrize(("choices", "share", "rows"), [(40, 0.1, 9), (100, 0.3, 45), (20, 0.5, 19), (30, 0.0, 0)])
def test_the_chance_is_that_of_the_binomial(choices, share, rows):
    exact = sum(math.comb(choices, k) * share**k * (1 - share) ** (choices - k) for k in range(rows + 1, choices + 1))
    got = overflow_chance([choices * share] * 3, choices, rows)
    assert 3 * exact <= got * (1 + 1e-9) and got <= 3 * 1.05 * exact + 1e-250
    assert overflow_chance([choices * share], choices, choices) == 0.0


def test_rows_are_the_fewest_that_hold_it():
    """GPT-MoE-S on 32 devices, 12 layers, one batch and its halves; and unequal means, one of them certain."""
    for mean, choices, chance in ((1024, 32768, 0.01 / 12288), (512, 16384, 0.01 / 24576)):
        rows = expected_rows([mean], choices, chance)
        assert rows % 8 == 0 and overflow_chance([mean], choices, rows) <= chance
        assert overflow_chance([mean], choices, rows - 8) > chance
        assert 1.15 < rows / mean < 1.25
    assert expected_rows([10, 200, 90], 200, 1e-3, step=24) == 216  # all 200 choices may go there
    assert expected_rows([0.0], 64, 1e-3) == 8


@pytest.mark.parametrize("planner", [(), (*BALANCED, "ModelConfig.overlap = 'halves'")])
def test_draws_overflow_no_more_often_than_asked(planner):
    """600 steps of 2 exchanges, in halves of 4, with at most 2% each, and with fewer rows many."""
    script = runpy.run_path("scripts/bench/overflow_chance.py", run_name="overflow_chance")
    for chance, least, most in ((0.02, 0.0, 0.09), (0.9, 0.1, 1.0)):
        config, *_ = parse_run_config((), [*BINDINGS, *planner, f"MoEConfig.overflow_chance = {chance}"])
        rate, fullest, rows, _ = script["overflow_rate"](
            config, build_mesh(config.mesh, 4), skew=0.5, draws=600, seed=1
        )
        assert least <= rate <= most, (chance, rows)
        assert 1 < fullest < 3


def test_a_chance_is_a_chance():
    with pytest.raises(UserError, match=r"MoEConfig.overflow_chance \(1.0\) must be at least 0 and below 1"):
        MoEConfig(overflow_chance=1.0)
