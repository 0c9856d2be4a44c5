"""DeepSpeed-MoE's tables: sizes and equal loss against numbers by hand, and the gate's two forms compared."""

import json

import jax
import numpy as np
import pytest

from moe_jax.errors import UserError
from moe_jax.moe.config import MoEConfig
from moe_jax.papers import deepspeed_moe
from moe_jax.papers.deepspeed_moe import TABLES, one_hot_gate, tables_gate
from moe_jax.papers.table import Inputs

INPUTS = Inputs(trace=None)


def test_sizes_are_those_of_a_count_by_hand():
    """Sections 3, 4: a block has 4 M^2 of attention, an FFN and an expert 8 M^2; M = 1024, every second FFN is MoE."""
    square = 1024**2
    moe = 24 * 4 + 12 * 8 + 12 * 128 * 8
    pyramid = 24 * 4 + 12 * 8 + 12 * 8 + (10 * 32 + 2 * 64) * 8  # the third term: residual FFNs
    student = 21 * 4 + 11 * 8 + 10 * 8 + (8 * 32 + 2 * 64) * 8
    found = {row[0]: row[1] for row in TABLES["sizes"](INPUTS).rows}
    names = ("350M+MoE-128", "350M+PR-MoE-32/64", "350M+PR-MoE+MoS")
    np.testing.assert_allclose([found[name] for name in names], [n * square / 1e9 for n in (moe, pyramid, student)])


@pytest.mark.parametrize("capacity", [0.5, 8.0])
def test_one_hot_einsums_do_what_index_tables_do(capacity):
    """With tokens dropped and without: both keep the first ones of each expert."""
    config = MoEConfig(num_experts=8, top_k=1, renormalize=False, capacity_factor=capacity, drop="position")
    x, w_gate = (jax.random.normal(jax.random.key(n), (n, m)) for n, m in ((64, 16), (16, 8)))
    ours, theirs = (np.asarray(form(x, w_gate, config)) for form in (tables_gate, one_hot_gate))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    dropped = (theirs == 0).all(axis=1).sum()
    assert (dropped > 0) == (capacity < 1)


def test_equal_loss_lies_between_dense_models_seed_by_seed(tmp_path, monkeypatch):
    """Losses 4, 3, 2, 1 at FLOPs 1, 4, 16, 64: a loss of 2.5 is that of 8, between 4 and 16 on a log scale."""
    dense = {"dense_64": (1, 4.0), "dense_96": (4, 3.0), "dense_128": (16, 2.0), "dense_192": (64, 1.0)}
    moe = {"moe_64": (2, 2.5, 2.0), "moe_96": (4, 0.5, 3.0)}  # 0.5: better than the largest, which stands for it
    kinds = {
        name: {
            "flops_per_token": flops,
            "parameters": 1,
            "curves": [[[0, 9.0], [9, loss]] for loss in (*own, *own)[:2]],
        }
        for name, (flops, *own) in {**dense, **moe}.items()
    }
    monkeypatch.setattr(deepspeed_moe, "TRAINED", tmp_path / "train_sizes.json")
    with pytest.raises(UserError, match="lacks dense_64, .*train_sizes.py"):
        TABLES["equal_loss"](INPUTS)
    (tmp_path / "train_sizes.json").write_text(json.dumps({"kinds": kinds}))
    small, large = TABLES["equal_loss"](INPUTS).claims
    np.testing.assert_allclose([small.ours, large.ours], [(4, 8), (16, 1)])
