"""Steps that are not finite: left out on the device, counted, shown, and one too many ends the run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_run import bindings_of, run_here

from moe_jax.config import parse_run_config
from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import NonFiniteError, UserError
from moe_jax.observe import read_metrics, summarize_run
from moe_jax.parallel.mesh import to_devices
from moe_jax.training import loop
from moe_jax.training.checkpoint import Checkpointer
from moe_jax.training.feed import Feed
from moe_jax.training.program import build_session

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")

# the cosine ends at train.steps, so runs of several lengths compare at one rate
FLAT = ("train.learning_rate = 1e-3", "train.final_learning_rate = 1.0", "train.warmup_steps = 0")


@pytest.fixture
def poisoned(monkeypatch):
    """Batches 3 and 5 (from 1) weigh one token by NaN, in the last microbatch."""
    read = Feed.read

    def read_poisoned(self, step, *arguments):
        batch = read(self, step, *arguments)
        if step in (2, 4):
            batch.weights[-1, -1, -1] = np.nan
        return batch

    monkeypatch.setattr(Feed, "read", read_poisoned)


def test_a_skipped_step_leaves_the_state_as_it_was(tmp_path, poisoned):
    """One of two microbatches is poisoned; every leaf but the step counter keeps its bits, and is donated."""
    changes = ("train.grad_accum_steps = 2", "train.max_skipped_steps = 1", "train.warmup_steps = 5")
    config, _, _ = parse_run_config((), bindings_of(tmp_path, *changes))
    session = build_session(config, jax.devices()[:2])
    step, _ = session.compile_step()
    state, before, rates = session.fresh_state(), None, []
    for index in range(4):
        given, before = state, jax.tree.map(jnp.copy, state)
        batch = to_devices(session.feed.read(index), session.state_shardings.batch)
        state, metrics = step(state, batch, session.tables, session.host_signals(0))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert bool(metrics["skipped"]) == (index == 2) == bool(np.isnan(metrics["grad_norm"]))
        assert int(state["step"]) == index + 1
        rates.append(float(metrics["learning_rate"]))
        same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, state)), strict=True)]
        assert sum(same) == (len(same) - 1 if index == 2 else 0)
    # from 3e-3 / 5 in a line to 3e-3 at update 5: what was left out does not count as one
    np.testing.assert_allclose(rates, [0.6e-3, 1.08e-3, 1.56e-3, 1.56e-3], rtol=1e-6)


@pytest.mark.slow
def test_skipped_steps_are_counted_and_outlive_a_stop(tmp_path, poisoned, capsys):
    """Six steps at once, and four then two: the same bits; both left out steps 3 and 5."""
    changes = (*FLAT, "train.max_skipped_steps = 2", "train.checkpoint_every = 0")
    assert run_here(tmp_path, tmp_path / "whole", *changes)
    out = capsys.readouterr().out
    assert "step 5: not finite, skipped (2 of at most 2)" in out and re.search(
        r"step 6/6 \| loss \S+ \| skipped 2", out
    )
    assert "skipped steps     2, whose loss or gradient was not finite" in out
    assert run_here(tmp_path, tmp_path / "parts", *changes, "train.steps = 4")
    assert run_here(tmp_path, tmp_path / "parts", *changes)
    whole, parts = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts")
    assert [record["skipped"] for record in whole] == [0, 0, 1, 0, 1, 0]
    assert [record["skipped_steps"] for record in whole] == [0, 0, 1, 1, 2, 2]
    assert np.isnan([record["loss"] for record in whole]).tolist() == [False, False, True, False, True, False]
    for name in ("loss", "grad_norm", "skipped", "skipped_steps"):
        np.testing.assert_array_equal([r[name] for r in whole], [r[name] for r in parts], err_msg=name)
    ends = [Checkpointer(tmp_path / name / "checkpoints", keep=1).read_arrays(6) for name in ("whole", "parts")]
    for name, leaf in ends[0].items():
        assert np.isfinite(leaf).all(), name
        np.testing.assert_array_equal(leaf, ends[1][name], err_msg=name)
    assert summarize_run(tmp_path / "whole")["skipped_steps"] == 2


def test_one_step_too_many_ends_the_run(tmp_path, poisoned, monkeypatch):
    """Every step is saved: the checkpoints of the skipped step and before the fatal one hold finite numbers only.

    The devices count their bytes here, more at every step, so that the metrics must show the count of their own step.
    """
    peaks = iter(range(100, 200))
    monkeypatch.setattr(loop, "memory_counts", lambda devices, name: [next(peaks)])
    changes = (*FLAT, "train.max_skipped_steps = 1", "train.checkpoint_every = 1", "train.keep_checkpoints = 9")
    words = (
        "step 5: the loss is nan, and gradient leaf 'bank/segment_0/w_in' is the first that is not finite; 2 such "
        "steps are more than train.max_skipped_steps (1); the checkpoint of step 4 is kept. Lower train.learning_rate, "
        "or raise train.warmup_steps"
    )
    with pytest.raises(NonFiniteError, match=f"^{re.escape(words)}$"):
        run_here(tmp_path, tmp_path / "work", *changes)
    checkpoints = Checkpointer(tmp_path / "work" / "checkpoints", keep=9)
    assert checkpoints.steps() == [1, 2, 3, 4]
    assert [checkpoints.read_host(step).get("skipped_steps", 0) for step in (2, 3, 4)] == [0, 1, 1]
    before, after = checkpoints.read_arrays(2), checkpoints.read_arrays(3)
    differing = [name for name in before if not np.array_equal(before[name], after[name])]
    assert differing == ["step"]
    assert all(np.isfinite(leaf).all() for leaf in checkpoints.read_arrays(4).values())
    assert [record["peak_device_bytes"] for record in read_metrics(tmp_path / "work")] == [100, 101, 102, 103]


def test_none_may_be_skipped_by_default(tmp_path):
    config, _, _ = parse_run_config((), bindings_of(tmp_path))
    session = build_session(config, jax.devices()[:1])
    assert "skipped" not in session.lower_train_step().out_info[1]
    with pytest.raises(UserError, match=r"train.max_skipped_steps \(-1\) must not be negative"):
        TrainConfig(max_skipped_steps=-1)


class Device:
    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_devices_that_count_no_memory_are_left_out():
    devices = [Device({"peak_bytes_in_use": 5}), Device(None), Device({"bytes_in_use": 3})]
    assert loop.memory_counts(devices, "peak_bytes_in_use") == [5]
    assert loop.memory_counts(jax.devices(), "peak_bytes_in_use") == []  # CPUs do not count
