"""The moving average of the parameters: its values, its evaluation, and what happens when it comes or goes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_run import one_step, session_of

from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError
from moe_jax.training.checkpoint import Checkpointer
from moe_jax.training.hosts import Hosts
from moe_jax.training.run import starting_state

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")

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


def test_average_may_come_and_go(tmp_path, capsys):
    """Saved without, it starts from the parameters of then; saved with, it comes back or is dropped; each is said."""
    without = session_of(tmp_path, 8)
    host = {"data": without.feed.stream.position(4)}
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=9)
    checkpointer.save(4, without.fresh_state(), without.home, host)
    checkpointer.wait()
    session = session_of(tmp_path, 8, EMA, "MeshConfig.data = 2")
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
    said = "train.ema_decay (0.0): the average that the checkpoint of step 5 holds is dropped"
    assert said in capsys.readouterr().out
    assert dropped.keys() == {"step", "params", "opt_state"}
    checkpointer.close()
    stored = checkpointer.read_arrays(5)
    assert stored["ema/bank/segment_0/w_in"].shape == (2, 8, 16, 16)  # by (layer, expert)


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^train.ema_decay \(1.0\) must be at least 0 \(no average\) and below 1$"):
        TrainConfig(ema_decay=1.0)
    session = session_of(tmp_path, 8)
    checkpointer = Checkpointer(tmp_path / "other" / "checkpoints", keep=1)
    with pytest.raises(UserError, match=r"^--init_from_ema needs --init_from=DIR"):
        starting_state(session, checkpointer, None, Hosts(), init_from_ema=True)
    checkpointer.save(2, session.fresh_state(), session.home, {})
    checkpointer.close()
    with pytest.raises(UserError, match=r"^--init_from_ema: the checkpoint of step 2 of .* holds no moving average"):
        starting_state(session, checkpointer, None, Hosts(), str(tmp_path / "other"), True)
