import pytest

from moe_jax.observe import summarize, summarize_run


def test_summarize_run_by_hand(finished_run):
    summary = summarize_run(finished_run)
    assert (summary.steps, summary.held_out_loss_first, summary.held_out_loss_last) == (30, 5.0, 2.4)
    # Step 1 compiled: its 1 token/s is not in the median.
    assert summary.tokens_per_second == 1000.0 and summary.model_flops_per_second == 2.5e9
    assert (summary.compilations, summary.compile_seconds) == (1, 4.5)
    assert summary.overflow_steps == 1 and summary.dropped_fraction == 0.0
    assert summary.below_unigram_entropy == pytest.approx(0.25)  # 1 - 2.4 / 3.2
    assert summary.rejit_stall_seconds is None
    assert 1.0 < summary.device_load_mean < summary.device_load_worst < 2.0


def test_summarize_without_records_guesses_nothing():
    summary = summarize([], [])
    assert summary.steps is None and summary.loss_last is None and summary.below_unigram_entropy is None
    assert summary.compilations == 0 and summary.overflow_steps is None


def test_summarize_of_one_compiling_step_uses_it():
    summary = summarize([{"step": 1, "tokens_per_second": 5.0, "compile_seconds": 2.0, "loss": float("nan")}], [])
    assert summary.tokens_per_second == 5.0 and summary.loss_last is None
