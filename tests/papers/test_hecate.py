"""Hecate's tables against numbers worked out by hand from the paper's text."""

import dataclasses
import math

import numpy as np
import pytest

from moe_jax.papers import hecate
from moe_jax.papers.loads import find_loads, sharpened
from moe_jax.papers.systems import run
from moe_jax.papers.table import Inputs

INPUTS = Inputs("stationary")
MATMULS, LINKS = 0.7, 0.86  # shares of a data sheet at the middle level


def test_t_is_the_papers_formula_and_a_zero_says_why():
    rows = hecate.overlap_degree(INPUTS, lambda row: dataclasses.replace(row, batch=3)).rows
    flops = {"hecate_a": MATMULS * 125e12, "hecate_b": MATMULS * 312e12}
    links = {"hecate_a": LINKS * 12.5e9, "hecate_b": LINKS * 50e9}
    sizes = {"GPT-MoE-S": (768, 2048), "GPT-MoE-L": (1536, 2048), "BERT-MoE": (1024, 512), "BERT-MoE-Deep": (1024, 512)}
    for cluster, devices, name, *_, t, said in rows:
        dim, length = sizes[name]
        attention = 3 * length * (8 * dim**2 + 4 * length * dim) / flops[cluster]
        expert = 2 * dim * (2 * dim) * 2 / links[cluster]  # section 4.2: expert_size / bw
        assert t == math.floor(attention / expert), (cluster, devices, name)
        assert (f"attention takes {1e3 * attention:.3g} ms" in said) == (t == 0)
    assert {t for *_, t, _ in rows} >= {0, 2}


def test_what_does_not_hide_behind_attention_is_exposed(monkeypatch):
    """Sections 3.1 and 3.2: t experts cross each node's link, next to attention, and twice under re-materialization."""
    monkeypatch.setitem(hecate.CHANGES, "t = 10", lambda of: dataclasses.replace(of, overlap_degree=10))
    changed = dataclasses.replace(hecate.SMALL, batch=1, change="t = 10", every=24)
    attention = 2048 * (8 * 768**2 + 4 * 2048 * 768) / (MATMULS * 312e12)
    trans = 10 * (2 * 768 * 1536 * 2) / (LINKS * 50e9)
    steps = [hecate.step_of(INPUTS, changed, name) for name in ("Hecate", "Hecate-RM")]
    exposed = [step.parts["place"] + step.parts["reduce"] for step in steps]
    assert trans > 2 * attention
    np.testing.assert_allclose(exposed[0], (trans - attention) + (trans - 2 * attention), rtol=1e-9)
    np.testing.assert_allclose(exposed[1], (trans - attention) + (2 * trans - 2 * attention), rtol=1e-9)
    # with fewer slots than t, an expert still crosses once to each node that holds it
    setting = dataclasses.replace(hecate.setting_of(INPUTS, changed), replica_slots=2)
    step = run(hecate.SYSTEMS["Hecate"], setting)
    replicas = step.records.expert_replicas
    crossing = (np.minimum(replicas + 1, 4) * (replicas > 0)).sum(axis=2) / 4 * trans / 10
    assert (crossing > 0.8 * trans).all() and replicas.max() < 31
    np.testing.assert_allclose(step.parts["place"], np.maximum(0.0, crossing - attention), rtol=1e-9)
    # parameters of the fullest device: 2 experts of its own and the 10 that it does not home; one layer's again
    states, fits = zip(*(hecate.memory_of(INPUTS, changed, name) for name in ("Hecate", "Hecate-RM")), strict=True)
    of_layer = 2 * 768 * 1536 * 2
    replicas = steps[0].records.device_replicas.mean(axis=1).max()
    assert 9 <= replicas <= 10 and all(fits)
    np.testing.assert_allclose([one[0] for one in states], [12 * of_layer * (2 + replicas), of_layer * (24 + replicas)])


@pytest.mark.parametrize(("name", "share"), [("drifting", 0.75), ("W0_balanced", 5 / 32)])
def test_sharpened_loads_give_ten_of_sixty_four_experts_three_quarters(name, share):
    trace = find_loads(name)
    after = sharpened(trace, 10 / 64, 0.75).loads
    totals = np.sort(after.sum(axis=2), axis=2)
    top = (totals[..., -5:].sum(axis=2) / totals.sum(axis=2)).mean()  # of 32
    assert top == pytest.approx(share, rel=0.01)
    np.testing.assert_array_equal(after.sum(axis=3), trace.loads.sum(axis=3))
