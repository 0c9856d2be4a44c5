"""Simulation past the papers: loads by seed, and systems' steps under even and uneven ones."""

import numpy as np

from moe_jax.papers.scale import PLANNED, TOKENS, costs, step, zipf_loads


def test_loads_repeat_by_seed_and_keep_their_order_from_sample_to_sample():
    one, two = (zipf_loads(64, 128, TOKENS, 1.5, sample) for sample in (1, 2))
    np.testing.assert_array_equal(one, zipf_loads(64, 128, TOKENS, 1.5, 1))
    assert (one != two).any() and one.sum(axis=(0, 1)).argmax() == two.sum(axis=(0, 1)).argmax()
    np.testing.assert_allclose(one.sum(axis=2).mean(), TOKENS, rtol=0.05)


def test_replicas_pay_by_skew_and_a_plan_without_any_costs_nothing():
    found = {}
    for skew in (0.0, 1.5):
        loads = [zipf_loads(64, 128, TOKENS, skew, sample) for sample in (1, 2)]
        found[skew] = {system: step(system, cost, loads) for system, cost in costs(64, "middle").items()}
    assert found[0.0]["FasterMoE"][0] == found[0.0]["EP"][0] and found[0.0]["FasterMoE"][2] == 4 * 128
    for name in PLANNED:
        assert found[1.5][name][0] < found[1.5]["EP"][0] and found[1.5][name][2] > 4 * 128
