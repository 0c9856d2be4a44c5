"""Steps without later passes, and those that overflow run again: the same curves and states as complete steps give."""

import dataclasses
import re
import threading

import jax
import numpy as np
import pytest
from support.marks import slow_but
from support.tiny_run import assert_same_run, config_of, run_here

from moe_jax.errors import UserError
from moe_jax.observe.metrics_file import read_metrics
from moe_jax.observe.report import summarize_run
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.training.feed import Feed
from moe_jax.training.program import Program, Session
from moe_jax.training.stepper import Stepper, build_stepper

# with one expert a token, buckets of 0.94 t rows for t tokens: only a batch of equal tokens overflows
SIZES = (
    "train.optimistic = True", "ModelConfig.dtype = 'float64'", "ModelConfig.positions = 'rotary'",
    "MoEConfig.top_k = 1", "MoEConfig.bucket_slack = 1.85", "ModelConfig.max_length = 64",
    "DataConfig.sequence_length = 64", "train.warmup_steps = 0",
)  # fmt: skip
EVERY = ("MoEConfig.bucket_slack = 0.4",)
OFTEN = ("train.grad_accum_steps = 2", "train.zero_stage = 3", "train.ema_decay = 0.9", "train.max_skipped_steps = 1")
CASES = {
    # name: (steps whose tokens are all alike, step with a NaN, bindings)
    "now_and_then": ((3, 4), 7, (*OFTEN, "MoEConfig.router = 'sigmoid_bias'")),
    "halves": ((3,), None, ("ModelConfig.overlap = 'halves'", "ModelConfig.stack = 'unrolled'")),
    # from step 4 to 10 the complete program runs at once; then the common one, as overflows are rare again
    "prefetch": ((0, 1, 11), None, ("ModelConfig.prefetch = 'pro_prophet'",)),
    "every": (range(12), None, EVERY),
}


@pytest.fixture
def three_in_flight(monkeypatch):
    """Metrics are read three steps late, so that two steps behind an overflow are in flight."""
    monkeypatch.setattr(Session, "lag", 3)


@pytest.fixture
def float64():
    """For all threads: one compiles in the background."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def fed(monkeypatch, alike=(), poisoned=None, rows=slice(None)):
    """Let some batches be of one token only, in some of their rows, and one weigh a token by NaN."""
    read = Feed.read

    def changed(self, step, *arguments):
        batch = read(self, step, *arguments)
        if step in alike:
            batch.inputs[:, rows] = 7
        if step == poisoned:
            batch.weights[-1, -1, -1] = np.nan
        return batch

    monkeypatch.setattr(Feed, "read", changed)


def agree(stepper: Stepper, other: Stepper, records, wanted, tolerance: float):
    """Losses and states to `tolerance`: where no common step took effect to the bit, else but for the last bits."""
    for name in ("loss", "loads", "passes", "dropped"):
        got, want = ([record[name] for record in side] for side in (records, wanted))
        np.testing.assert_allclose(got, want, rtol=tolerance if name == "loss" else 0, err_msg=name)
    for ours, theirs in zip(*map(jax.tree.leaves, (stepper.state, other.state)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", slow_but(CASES, "now_and_then"))
def test_curves_are_those_of_complete_steps(case, tmp_path, monkeypatch, three_in_flight, float64):
    alike, poisoned, changes = CASES[case]
    second = [2, 3, 6, 7]  # of two devices with four sequences each: what overflows is in the second half alone
    fed(monkeypatch, alike if case != "every" else (), poisoned, second if case == "halves" else slice(None))
    stepper = build_stepper(config_of(tmp_path, *SIZES, *changes), jax.devices()[:2])
    assert " conditional(" not in stepper.executable.as_text()
    assert " conditional(" in stepper.programs.complete.result().as_text()
    plain = Stepper(stepper.session, stepper.session.fresh_state())
    plain.programs = dataclasses.replace(stepper.programs, common=None)
    records, wanted = stepper.run(12), plain.run(12)
    agree(stepper, plain, records, wanted, 0.0 if case == "every" else 1e-10)
    overflowed = [int(record["passes"].max()) > 1 for record in records]
    assert overflowed == [step in alike for step in range(12)]
    again = [record["run_again"] for record in records]
    if case == "every":  # two known overflows are enough: those of steps 0 and 1, when step 4 is dispatched
        assert again == [1] * 4 + [0] * 8
    else:
        assert again == [int(step in alike) for step in range(12)]
    assert stepper.run_again == sum(again) and "run_again" not in wanted[0]


@pytest.mark.slow
def test_a_complete_program_that_cannot_be_compiled_ends_the_run_at_an_overflow(tmp_path, monkeypatch, three_in_flight):
    """It is compiled behind step 3, and the run goes on to step 8, which overflows; there it is saved."""
    begin, end, compile_step, read = *(threading.Event() for _ in range(2)), Program.compile_step, Feed.read

    def compile_later(self, shape=None, common=False):
        if common:
            return compile_step(self, shape, common)
        begin.wait(60)
        try:
            raise RuntimeError("INTERNAL: no such instruction\nmore of it")
        finally:
            end.set()

    def reads(self, step, *arguments):
        if step >= 5:  # read ahead of the step, by two at most
            begin.set()
            end.wait(60)
        return read(self, step, *arguments)

    mesh = ("MeshConfig.data = 4", "MeshConfig.expert = 2", "MoEConfig.bucket_slack = 1.7", "train.steps = 12")
    changes = ("ModelConfig.layers = 1", *SIZES[2:], *mesh)
    with monkeypatch.context() as broken:
        broken.setattr(Program, "compile_step", compile_later)
        broken.setattr(Feed, "read", reads)
        fed(broken, alike=(8,))
        said = r"could not be compiled \(INTERNAL: no such instruction\)"
        stops = rf"^step 8: a bucket overflowed, and the complete program {said}; saved and stopped; [^\n]*$"
        with pytest.raises(UserError, match=stops):
            run_here(tmp_path, tmp_path / "run", SIZES[0], *changes)
    folder = Checkpointer(tmp_path / "run" / "checkpoints", keep=1)
    assert folder.latest() == len(read_metrics(tmp_path / "run")) == 8
    assert run_here(tmp_path, tmp_path / "run", *changes)
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == list(range(1, 13))


@pytest.mark.slow
def test_a_run_that_overflows_goes_on_where_it_stopped(tmp_path, monkeypatch, three_in_flight, capsys):
    """Six steps at once, and four then two: the same bits, whatever was in flight at the stop."""
    fed(monkeypatch, alike=(1, 2, 5))
    mesh = ("MeshConfig.data = 4", "MeshConfig.expert = 2", "MoEConfig.bucket_slack = 1.7")
    flat = ("train.learning_rate = 1e-3", "train.final_learning_rate = 1.0")  # the cosine ends at train.steps
    changes = (SIZES[0], *SIZES[2:], *mesh, *flat, "train.checkpoint_every = 0", "ModelConfig.layers = 1")
    assert run_here(tmp_path, tmp_path / "whole", *changes)
    out = capsys.readouterr().out
    again = "steps run again   2, because a bucket overflowed"
    assert again in out and re.search(r"step 6/6 \| loss \S+ \| run again 2", out)
    for steps in (4, 6):
        assert run_here(tmp_path, tmp_path / "parts", *changes, f"train.steps = {steps}")
    fields = ("run_again", "steps_run_again", "overflow_steps")
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6, *fields)
    whole = read_metrics(tmp_path / "whole")
    assert [record["overflow_steps"] for record in whole] == [0, 1, 1, 0, 0, 1]
    assert summarize_run(tmp_path / "whole")["steps_run_again"] == whole[-1]["steps_run_again"]
