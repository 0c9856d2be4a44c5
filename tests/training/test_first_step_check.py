"""A run on a transport or a kernel that changes gradients does not start."""

import dataclasses
import types

import jax
import pytest
from tiny_run import bindings_of

from moe_jax.collectives import exchange
from moe_jax.config import parse_run_config
from moe_jax.errors import UserError
from moe_jax.moe.grouped_matmul import choose_implementation
from moe_jax.training import first_step_check
from moe_jax.training.first_step_check import check_first_step, compare_gradients
from moe_jax.training.session import build_session

HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0")


def session_of(folder, *changes):
    small = ("MeshConfig.expert = 2", "ModelConfig.layers = 1", "MoEConfig.grouped_matmul = 'reference'")
    config, _, _ = parse_run_config((), bindings_of(folder, *small, *changes))
    return build_session(config, jax.devices()[:2])


def test_a_wrong_transport_is_refused(tmp_path, monkeypatch):
    """Rounds that go the wrong way round in the backward alone: the loss is right, and every gradient wrong."""
    session = session_of(tmp_path, "MoEConfig.transport = 'pairwise'")
    state = session.fresh_state()
    assert compare_gradients(session, state, "transport", "all_to_all") < 1e-5

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
        compare_gradients(session, state, "transport", "all_to_all")
    message = str(caught.value)
    assert message.startswith(
        "MoEConfig.transport ('pairwise') gives other gradients than 'all_to_all' before the first"
    )
    assert (
        message.endswith("more than 0.0001 (float32); set MoEConfig.transport = 'all_to_all'") and "\n" not in message
    )


@pytest.mark.parametrize("used", ["ragged", "hopper", "neither"])
def test_only_what_is_unproven_is_compared(tmp_path, monkeypatch, used):
    """On devices that claim to be Hopper GPUs 'auto' is the kernel for bfloat16, and for nothing else."""
    asked = []
    monkeypatch.setattr(first_step_check, "compare_gradients", lambda session, state, *field: asked.append(field))
    changes = ("MoEConfig.grouped_matmul = 'auto'", "ModelConfig.dtype = 'bfloat16'", "ModelConfig.hidden_dim = 128")
    session = session_of(tmp_path, "ModelConfig.model_dim = 64", *changes)
    if used == "ragged":
        moe = dataclasses.replace(session.config.moe, transport="ragged")
        session = dataclasses.replace(session, config=dataclasses.replace(session.config, moe=moe))
    if used == "hopper":
        monkeypatch.setattr(
            first_step_check,
            "choose_implementation",
            lambda wanted, device, *fits: choose_implementation(wanted, HOPPER, *fits),
        )
    check_first_step(session, {})
    wanted = {"ragged": [("transport", "all_to_all")], "hopper": [("grouped_matmul", "fused")], "neither": []}
    assert asked == wanted[used]


@pytest.mark.parametrize(
    "error, reason",
    [
        (jax.errors.JaxRuntimeError("INTERNAL: no such instruction\nsecond line"), "INTERNAL: no such instruction"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_a_kernel_that_fails_is_named(tmp_path, monkeypatch, error, reason):
    def failing(session, model):
        raise error

    session = session_of(tmp_path)
    monkeypatch.setattr(first_step_check, "_gradients", failing)
    with pytest.raises(UserError) as caught:
        compare_gradients(session, session.fresh_state(), "grouped_matmul", "fused")
    assert str(caught.value) == (
        f"MoEConfig.grouped_matmul ('reference') fails before the first step: {reason}; set MoEConfig.grouped_matmul = "
        "'fused'"
    )


def test_ragged_is_refused_on_a_cpu(tmp_path):
    with pytest.raises(
        UserError, match=r"MoEConfig.transport \('ragged'\) needs GPUs; XLA has no such exchange on cpu"
    ):
        session_of(tmp_path, "MoEConfig.transport = 'ragged'")
