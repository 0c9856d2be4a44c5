"""Training on conversations: packed they give the loss and gradients that each gives in a window of its own."""

import json

import jax
import numpy as np
import pytest
from support import chat_cases
from support.equality_cases import assert_close
from support.tiny_run import bindings_of, session_of

from moe_jax.config.gin_files import parse_run_config
from moe_jax.errors import UserError
from moe_jax.models import make_loss
from moe_jax.training.program import build_session
from moe_jax.training.run import banner

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

FLOAT64 = (
    "ModelConfig.dtype = 'float64'", "MoEConfig.aux_loss_weight = 0.0",
    "MoEConfig.z_loss_weight = 0.0", "ModelConfig.max_length = 128", "DataConfig.sequence_length = 128",
)  # fmt: skip


def chat_bindings(folder):
    turns = [("x" * (3 + 2 * i), "the" * (1 + i % 5)) for i in range(20)]
    roles = ("user", "assistant")
    records = [{"messages": [dict(role=r, content=c) for r, c in zip(roles, t, strict=True)]} for t in turns]
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    path = chat_cases.write_tokenizer(folder / "tokenizer", chat_cases.CHATML)
    return (
        "DataConfig.kind = 'chat'", f"DataConfig.path = {str(folder / 'chats.jsonl')!r}",
        f"DataConfig.tokenizer = {str(path)!r}", "DataConfig.held_out_fraction = 0.2",
    )  # fmt: skip


def test_packing_changes_neither_loss_nor_gradients(tmp_path):
    bindings, found = (*chat_bindings(tmp_path), *FLOAT64), {}
    with jax.enable_x64(True):
        for packed in (True, False):
            bound = (*bindings, f"ModelConfig.document_mask = {packed}")
            windows = sum(session_of(tmp_path, 2, *bound).feed.stream.windows)
            session = session_of(tmp_path, 2, *bound, f"train.batch_size = {windows}")  # a step is an epoch
            model, batch = session.model, jax.tree.map(lambda leaf: leaf[0], session.feed.read(0))
            loss = jax.jit(jax.value_and_grad(make_loss(model, model.layout(), session.rows, 128), has_aux=True))
            params = session.fresh_state()["params"]
            total, counted = np.sum(batch.weights), int(np.sum(batch.weights))
            (value, _), gradients = loss(params, batch, model.even_tables(), None, np.int32(0), total)
            found[packed] = windows, counted, float(value), gradients
            assert session.feed.stream.told() in banner(session, type("Folder", (), {"path": "runs/x"}), None)
    (few, counted, value, gradients), (many, also, want, others) = found[True], found[False]
    assert 2 * few < many and counted == also > 50
    assert value == pytest.approx(want, rel=1e-12) and value > 1
    assert_close(gradients, others)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradients)) > 1e-3


def test_a_masked_model_learns_no_answers(tmp_path):
    config = parse_run_config((), bindings_of(tmp_path, *chat_bindings(tmp_path), "ModelConfig.kind = 'bert'"))[0]
    with pytest.raises(UserError, match=r"ModelConfig.kind \('bert'\) learns no answers"):
        build_session(config, jax.devices()[:1])
