"""A model in float8, in two halves and whole: the same loss and gradients."""

import dataclasses

import jax
import numpy as np
import pytest
from support import prefetch_cases
from support.prefetch_cases import model_config, moe_config, placements_of, run

E4M3 = "float8_e4m3"


@pytest.mark.slow
def test_halves_equal_the_whole(monkeypatch):
    in_float8 = lambda name: dataclasses.replace(moe_config(name), dispatch_dtype=E4M3, expert_dtype=E4M3)  # noqa: E731
    config = model_config(layers=1)
    placements, shape = placements_of(False, config.moe_layers, 2, number=1)
    monkeypatch.setattr(prefetch_cases, "moe_config", in_float8)
    with jax.enable_x64(True):
        whole, halves = (
            run(dataclasses.replace(config, overlap=overlap), "s1", {"expert": 2}, shape, placements)[0]
            for overlap in ("none", "halves")
        )
    for got, want in zip(jax.tree.leaves(halves[:2]), jax.tree.leaves(whole[:2]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-10 * max(1.0, np.abs(want).max()))
