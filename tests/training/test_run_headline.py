"""The headline that a run prints at its end."""

import types

import pytest

from moe_jax.training import run


@pytest.mark.parametrize("below, words", [(0.314, "ends 31.4% below it"), (-0.749, "ends 74.9% above it")])
def test_the_held_out_loss_is_below_or_above_the_entropy(monkeypatch, capsys, below, words):
    summary = types.SimpleNamespace(
        held_out_loss_first=None,
        held_out_loss_last=None,
        held_out_loss_ema=None,
        unigram_entropy=3.0,
        below_unigram_entropy=below,
        skipped_steps=None,
        steps_run_again=None,
    )
    monkeypatch.setattr(run, "draw_all", lambda folder: [])
    monkeypatch.setattr(run, "write_report", lambda folder, pictures: "report.html")
    monkeypatch.setattr(run, "summarize_run", lambda folder: summary)
    run.report(types.SimpleNamespace(path="runs/try"))
    assert f"3.0000 of the held-out text; the held-out loss {words}\n" in capsys.readouterr().out
