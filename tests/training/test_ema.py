"""The moving average of the parameters: its values, its evaluation, and what happens when it comes or goes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_run import bindings_of, evaluate_here, run_here

from moe_jax.config import parse_run_config
from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError
from moe_jax.observe import read_metrics, summarize_run
from moe_jax.parallel.mesh import to_devices
from moe_jax.training.checkpoint import Checkpointer
from moe_jax.training.program import build_session
from moe_jax.training.run import starting_state
from moe_jax.training.watchdog import Hosts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")

EMA = "train.ema_decay = 0.75"


def session_of(folder, *changes, devices=8):
    config, text, _ = parse_run_config((), bindings_of(folder, *changes))
    return build_session(config, jax.devices()[:devices]), text


def test_average_follows_the_parameters(tmp_path):
    """After each step 3/4 of the average and 1/4 of the new parameters; split like moments."""
    session, _ = session_of(tmp_path, EMA, devices=2)
    step, _ = session.compile_step()
    state = session.fresh_state()
    want = jax.tree.map(np.array, jax.device_get(jax.tree.map(jnp.copy, state["params"])))
    for index in range(3):
        batch = to_devices(session.feed.read(index), session.state_shardings.batch)
        state, _ = step(state, batch, session.tables, session.host_signals(0))
        new = jax.device_get(jax.tree.map(jnp.copy, state["params"]))
        want = jax.tree.map(lambda old, value: 0.75 * old + 0.25 * value, want, new)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), want, dict(state["ema"]))
    mu = session.state_shardings.state["opt_state"][1][0].mu
    assert jax.tree.leaves(session.state_shardings.state["ema"]) == jax.tree.leaves(mu)
    assert mu["dense"]["embedding"]["tokens"] != session.state_shardings.state["params"]["dense"]["embedding"]["tokens"]


def test_a_run_evaluates_both_and_starts_another(tmp_path, capsys):
    work = tmp_path / "work"
    assert run_here(tmp_path, work, EMA, "train.steps = 3", "train.learning_rate = 0.03")
    first, last = read_metrics(work, file_name="evaluations.jsonl")
    assert first["held_out_loss_ema"] == first["held_out_loss"]
    assert abs(last["held_out_loss_ema"] - last["held_out_loss"]) > 1e-3
    shown = f"{last['held_out_loss']:.4f}, {last['held_out_loss_ema']:.4f} with averaged parameters"
    assert f"step 3: held-out loss {shown}" in capsys.readouterr().out
    assert summarize_run(work)["held_out_loss_ema"] == last["held_out_loss_ema"]
    evaluate_here(tmp_path, work, EMA, "train.steps = 3", "train.learning_rate = 0.03")
    assert f"step 3: held-out loss {shown}" in capsys.readouterr().out
    # a new run from the average, on another mesh: its parameters are that average
    session, _ = session_of(tmp_path, "MeshConfig.data = 2")
    state = starting_state(session, Checkpointer(tmp_path / "new", keep=1), None, Hosts(), str(work), True)
    assert f"starting from the averaged parameters of {work}, step 3" in capsys.readouterr().out
    want = Checkpointer(work / "checkpoints", keep=1).restore_params(
        3, session.abstract_state()["params"], session.home, "ema"
    )
    jax.tree.map(np.testing.assert_array_equal, state["params"], want)


def test_average_may_come_and_go(tmp_path, capsys):
    """Saved without, it starts from the parameters of then; saved with, it comes back or is dropped; each is said."""
    without, text = session_of(tmp_path)
    folder = tmp_path / "checkpoints"
    host = {"config": text, "data": without.feed.stream.position(4)}
    checkpointer = Checkpointer(folder, keep=9)
    checkpointer.save(4, without.fresh_state(), without.home, host)
    checkpointer.wait()
    session, _ = session_of(tmp_path, EMA, "MeshConfig.data = 2")
    state = starting_state(session, checkpointer, 4, Hosts())
    assert "train.ema_decay (0.75): the average starts from the parameters of step 4" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, state["ema"], state["params"])
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == session.state_shardings.state
    spoiled = {**state, "ema": jax.tree.map(lambda leaf: 2 * leaf, state["ema"])}
    checkpointer.save(5, spoiled, session.home, host)
    checkpointer.wait()
    back = starting_state(session, checkpointer, 5, Hosts())
    jax.tree.map(np.testing.assert_array_equal, back, spoiled)
    assert "average" not in capsys.readouterr().out
    dropped = starting_state(without, checkpointer, 5, Hosts())
    assert (
        "train.ema_decay (0.0): the average that the checkpoint of step 5 holds is dropped" in capsys.readouterr().out
    )
    assert dropped.keys() == {"step", "params", "opt_state"}
    checkpointer.close()
    stored = checkpointer.read_arrays(5)
    assert stored["ema/bank/segment_0/w_in"].shape == (2, 8, 16, 16)  # by (layer, expert)


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^train.ema_decay \(1.0\) must be at least 0 \(no average\) and below 1$"):
        TrainConfig(ema_decay=1.0)
    session, text = session_of(tmp_path)
    checkpointer = Checkpointer(tmp_path / "other" / "checkpoints", keep=1)
    with pytest.raises(UserError, match=r"^--init_from_ema needs --init_from=DIR"):
        starting_state(session, checkpointer, None, Hosts(), init_from_ema=True)
    checkpointer.save(2, session.fresh_state(), session.home, {"config": text})
    checkpointer.close()
    with pytest.raises(UserError, match=r"^--init_from_ema: the checkpoint of step 2 of .* holds no moving average"):
        starting_state(session, checkpointer, None, Hosts(), str(tmp_path / "other"), True)
