"""A run on a transport that changes gradients does not start."""

import jax
import pytest
from tiny_run import bindings_of

from moe_jax.collectives import exchange
from moe_jax.config import parse_run_config
from moe_jax.errors import UserError
from moe_jax.training.session import build_session
from moe_jax.training.transport_check import UNPROVEN, check_first_step, compare_gradients


def session_of(folder, *changes):
    small = ("MeshConfig.expert = 2", "ModelConfig.layers = 1", "MoEConfig.grouped_matmul = 'reference'")
    config, _, _ = parse_run_config((), bindings_of(folder, *small, *changes))
    return build_session(config, jax.devices()[:2])


def test_a_wrong_transport_is_refused(tmp_path, monkeypatch):
    """Rounds that go the wrong way round in the backward alone: the loss is right, and every gradient wrong."""
    session = session_of(tmp_path, "MoEConfig.transport = 'pairwise'")
    state = session.fresh_state()
    assert compare_gradients(session, state) < 1e-5

    def wrong(move):
        @jax.custom_vjp
        def exchange(x):
            return move(x)

        exchange.defvjp(lambda x: (move(x), None), lambda _, d: (move(d)[::-1],))
        return exchange

    real = exchange._own_transpose
    monkeypatch.setattr(
        exchange, "_own_transpose", lambda move: wrong(move) if move.func is exchange._rounds else real(move)
    )
    with pytest.raises(UserError) as caught:
        compare_gradients(session, state)
    message = str(caught.value)
    assert message.startswith(
        "MoEConfig.transport ('pairwise') gives other gradients than 'all_to_all' before the first"
    )
    assert (
        message.endswith("more than 0.0001 (float32); set MoEConfig.transport = 'all_to_all'") and "\n" not in message
    )


def test_only_unproven_transports_are_compared(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("moe_jax.training.transport_check.compare_gradients", lambda *a: asked.append(a))
    check_first_step(session_of(tmp_path), {})
    assert not asked and UNPROVEN == ("ragged",)


def test_ragged_is_refused_on_a_cpu(tmp_path):
    with pytest.raises(
        UserError, match=r"MoEConfig.transport \('ragged'\) needs GPUs; XLA has no such exchange on cpu"
    ):
        session_of(tmp_path, "MoEConfig.transport = 'ragged'")
