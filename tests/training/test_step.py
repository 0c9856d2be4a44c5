"""What a step does: its gradients, the moving average, steps that are not finite, and what its record holds."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_volumes import collectives
from support.tiny_run import one_step, run_here, session_of

from moe_jax.errors import NonFiniteError
from moe_jax.observe.metrics_file import read_metrics
from moe_jax.observe.report import summarize_run
from moe_jax.parallel.mesh import to_devices
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.training import loop
from moe_jax.training.feed import Feed
from moe_jax.training.loop import check_finite
from moe_jax.training.recorder import step_record
from moe_jax.training.step import make_gradients

SIZES = (
    "ModelConfig.layers = 1",  # so that the bank of any mesh is in the order of one device's
    "train.batch_size = 16",
    "MoEConfig.schedule = 's1'",
    "MoEConfig.aux_loss_weight = 0.0",  # the balance losses are of each microbatch, and these differ
    "MoEConfig.z_loss_weight = 0.0",
)


def gradients_of(session, params):
    """Return the gradient of step 0, as NumPy, with a loss that is scaled so."""
    train, length = session.config.train, session.config.data.sequence_length
    gradients = jax.jit(make_gradients(session.model, train, length))
    params = to_devices(params, session.state_shardings.state["params"])
    batch = to_devices(session.feed.read(0), session.state_shardings.batch)
    return jax.device_get(gradients(params, batch, session.tables, jax.random.key(0))[0])


@pytest.mark.parametrize(("zero", "microbatches"), [(1, 1), (3, 4)])
def test_gradients_are_those_of_one_device(zero, microbatches, tmp_path):
    with jax.enable_x64(True):
        sizes = (*SIZES, "ModelConfig.dtype = 'float64'")
        one = session_of(tmp_path, 1, *sizes)
        params = jax.device_get(one.fresh_state()["params"])
        mesh = ("MeshConfig.data = 2", "MeshConfig.model = 2", f"train.zero_stage = {zero}")
        several = session_of(tmp_path, 4, *sizes, f"train.grad_accum_steps = {microbatches}", *mesh)
        want, got = gradients_of(one, params), gradients_of(several, params)
    for name, leaf in jax.tree.leaves_with_path(want):
        other = dict(jax.tree.leaves_with_path(got))[name]
        np.testing.assert_allclose(other, leaf, rtol=1e-10, atol=1e-12, err_msg=str(name))


def test_no_microbatch_sums_gradients_over_devices(tmp_path):
    """In one microbatch the model sums the gradients of all layers; of two, statistics alone.

    The embedding's is scattered while it is summed: ZeRO-1 needs a part on each device.
    """
    found = []
    for microbatches in (1, 2):
        session = session_of(tmp_path, 4, *SIZES, f"train.grad_accum_steps = {microbatches}")
        table = session.model.vocab_size, session.config.model.model_dim
        held = collectives(session.trace_step().lower(), session.roles, permutes=())
        floats = [(kind, size, calls) for (is_float, kind, _, size), calls in held.items() if is_float]
        found.append(sum(size * calls for kind, size, calls in floats if kind == "all_reduce"))
        assert math.prod(table) in [size for kind, size, _ in floats if kind == "reduce_scatter"]
    layers = sum(leaf.size for leaf in jax.tree.leaves(session.model.shapes()["dense"]["units"]))
    assert layers <= found[0] < layers + math.prod(table) / 100 and found[1] < math.prod(table) / 100, found


# The moving average of the parameters.

EMA = "train.ema_decay = 0.75"


def test_average_follows_the_parameters(tmp_path):
    """After each step 3/4 of the average and 1/4 of the new parameters; split like moments."""
    session = session_of(tmp_path, 2, EMA)
    step, _ = session.compile_step()
    state = session.fresh_state()
    want = jax.tree.map(np.array, jax.device_get(jax.tree.map(jnp.copy, state["params"])))
    for index in range(3):
        state, _ = one_step(session, step, state, index)
        new = jax.device_get(jax.tree.map(jnp.copy, state["params"]))
        want = jax.tree.map(lambda old, value: 0.75 * old + 0.25 * value, want, new)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), want, dict(state["ema"]))
    mu = session.state_shardings.state["opt_state"][1][0].mu
    assert jax.tree.leaves(session.state_shardings.state["ema"]) == jax.tree.leaves(mu)
    assert mu["dense"]["embedding"]["tokens"] != session.state_shardings.state["params"]["dense"]["embedding"]["tokens"]


# Steps that are not finite.

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
    session = session_of(tmp_path, 2, *changes)
    step, _ = session.compile_step()
    state, before, rates = session.fresh_state(), None, []
    for index in range(4):
        given, before = state, jax.tree.map(jnp.copy, state)
        state, metrics = one_step(session, step, state, index)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert bool(metrics["skipped"]) == (index == 2) == bool(np.isnan(metrics["grad_norm"]))
        assert int(state["step"]) == index + 1
        rates.append(float(metrics["learning_rate"]))
        same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, state)), strict=True)]
        assert sum(same) == (len(same) - 1 if index == 2 else 0)
    # from 3e-3 / 5 in a line to 3e-3 at update 5: what was left out does not count as one
    np.testing.assert_allclose(rates, [0.6e-3, 1.08e-3, 1.56e-3, 1.56e-3], rtol=1e-6)


def test_skipped_steps_are_counted_over_a_stop_and_one_too_many_ends_the_run(tmp_path, poisoned, monkeypatch, capsys):
    """Every step is saved: the checkpoints of the skipped step and before the fatal one hold finite numbers only.

    The devices count their bytes here, more at every step, so that the metrics must show the count of their own step.
    """
    peaks, work = iter(range(100, 200)), tmp_path / "work"
    monkeypatch.setattr(loop, "memory_counts", lambda devices, name: [next(peaks)])
    changes = (*FLAT, "train.max_skipped_steps = 1", "train.checkpoint_every = 1", "train.keep_checkpoints = 9")
    assert run_here(tmp_path, work, *changes, "train.steps = 4")
    out = capsys.readouterr().out
    assert "step 3: not finite, skipped (1 of at most 1)" in out
    assert re.search(r"step 4/4 \| loss \S+ \| skipped 1", out)
    assert "skipped steps     1, whose loss or gradient was not finite" in out
    assert summarize_run(work)["skipped_steps"] == 1
    words = (
        "step 5: the loss is nan, and gradient leaf 'bank/segment_0/w_in' is the first that is not finite; 2 such "
        "steps are more than train.max_skipped_steps (1); the checkpoint of step 4 is the last finite one. "
        "Lower train.learning_rate, or raise train.warmup_steps"
    )
    with pytest.raises(NonFiniteError, match=f"^{re.escape(words)}$"):
        run_here(tmp_path, work, *changes)
    checkpoints, records = Checkpointer(work / "checkpoints", keep=9), read_metrics(work)
    assert checkpoints.steps() == [1, 2, 3, 4]
    assert [checkpoints.read_host(step).get("skipped_steps", 0) for step in (2, 3, 4)] == [0, 1, 1]
    before, after = checkpoints.read_arrays(2), checkpoints.read_arrays(3)
    assert [name for name in before if not np.array_equal(before[name], after[name])] == ["step"]
    assert all(np.isfinite(leaf).all() for leaf in checkpoints.read_arrays(4).values())
    for name, want in {"skipped": [0, 0, 1, 0], "skipped_steps": [0, 0, 1, 1]}.items():
        assert [record[name] for record in records] == want
    assert np.isnan([record["loss"] for record in records]).tolist() == [False, False, True, False]
    assert [record["peak_device_bytes"] for record in records] == [100, 101, 102, 103]


def test_check_finite_names_the_first_leaf():
    def check(step, loss, square_norms):
        metrics = {"loss": np.float32(loss), "square_norms": np.float32(square_norms)}
        check_finite(step, metrics, ["bank/w_in", "bank/w_out", "dense/norm/scale"], None)

    check(3, 1.5, [0.0, 1.0, 1e30])
    words = r"step 7: the loss is 2.5, and gradient leaf 'bank/w_out' is the first .* or let train.max_skipped_steps"
    with pytest.raises(NonFiniteError, match=words):
        check(7, 2.5, [1.0, np.inf, np.nan])
    with pytest.raises(NonFiniteError, match="the loss is inf, and every gradient is finite; there is no checkpoint"):
        check(2, np.inf, [1.0, 1.0, 1.0])


def test_step_record():
    """Two layers, two sources, four experts on two devices; every figure by hand."""
    loads = np.array([[[4, 0, 2, 2], [2, 0, 3, 3]], [[8, 0, 0, 0], [8, 0, 0, 0]]], np.int32)
    numbers = {"loss": 2.0, "aux_loss": 1.25, "z_loss": 0.5, "learning_rate": 0.25, "grad_norm": 4.0}
    metrics = {name: np.float32(value) for name, value in numbers.items()}
    metrics |= {"dropped": np.int32([3, 1]), "passes": np.int32([1, 2]), "gate_entropy": np.float32([1.0, 0.5])}
    # two segments of a layer each
    homes = {"segment_0": np.array([[0, 0, 1, 1]]), "segment_1": np.array([[0, 1, 0, 1]])}
    own = dict(zip(homes, loads[:, None], strict=True))
    record = step_record(metrics, own, homes)  # 8 tokens, 2 each, 2 layers
    assert record.pop("passes") is metrics["passes"] and record.pop("gate_entropy") is metrics["gate_entropy"]
    # layer 0: devices compute 6 and 10 of 16; layer 1: 16 and 0
    np.testing.assert_array_equal(record.pop("device_load_max_over_mean"), [10 / 8, 2])
    np.testing.assert_array_equal(record.pop("dead_experts"), [1, 3])
    assert record == {**numbers, "dropped_fraction": 4 / 32, "overflow_steps": 1}
