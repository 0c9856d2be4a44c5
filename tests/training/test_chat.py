"""Training on conversations: packed they give loss and gradients as each alone; and the example, up to a talk."""

import io
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import chat_cases
from support.commands import run_command_here
from support.equality_cases import assert_close
from support.tiny_run import session_of

from moe_jax.config.gin_files import parse_run_config
from moe_jax.data.chat import ChatTemplate
from moe_jax.errors import UserError
from moe_jax.inference import Generator
from moe_jax.jobs.hosts import Hosts
from moe_jax.models import make_loss
from moe_jax.training.run import banner, run

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

FLOAT64 = (
    "ModelConfig.dtype = 'float64'", "ModelConfig.max_length = 128", "ModelConfig.layers = 1",
    "DataConfig.sequence_length = 128",
)  # fmt: skip


def test_packing_changes_neither_loads_nor_losses_nor_gradients(tmp_path):
    bindings, found = (*chat_cases.write_chats(tmp_path), *FLOAT64), {}
    with jax.enable_x64(True):
        for packed in (True, False):
            bound = (*bindings, f"ModelConfig.document_mask = {packed}")
            windows = sum(session_of(tmp_path, 2, *bound).feed.stream.windows)
            session = session_of(tmp_path, 2, *bound, f"train.batch_size = {windows}")  # a step is an epoch
            model, batch = session.model, jax.tree.map(lambda leaf: leaf[0], session.feed.read(0))
            loss = jax.jit(jax.value_and_grad(make_loss(model, model.layout(), session.rows, 128), has_aux=True))
            params = session.fresh_state()["params"]
            total, counted = np.sum(batch.weights), int(np.sum(batch.weights))
            (value, stats), gradients = loss(params, batch, model.even_tables(), None, np.int32(0), total)
            found[packed] = windows, counted, np.sum(stats.loads, axis=1), float(value), gradients
            assert session.feed.stream.told() in banner(session, type("Folder", (), {"path": "runs/x"}), None)
    (few, counted, loads, value, gradients), (many, also, other_loads, want, others) = found[True], found[False]
    np.testing.assert_array_equal(loads, other_loads)
    assert 2 * few < many and counted == also > 50
    assert value == pytest.approx(want, rel=1e-12) and value > 1
    assert_close(gradients, others)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradients)) > 1e-3


def test_the_example_from_its_data_to_a_talk(tmp_path, monkeypatch, capsys):
    """A question goes in with all that was said before, by the template that the run folder keeps."""
    root, data, workdir = Path(__file__).parents[2], tmp_path / "data", str(tmp_path / "run")
    command = [sys.executable, root / "scripts" / "chat_data.py", f"--out={data}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "200 conversations" in done.stdout and "\033[32mA bird lives in a nest.<|im_end|>\033[0m" in done.stdout
    bindings = (
        f"DataConfig.path = {str(data / 'chats.jsonl')!r}", f"DataConfig.tokenizer = {str(data / 'tokenizer.json')!r}",
        f"DataConfig.cache_dir = {str(tmp_path / 'cache')!r}", "ModelConfig.layers = 1", "ModelConfig.model_dim = 16",
        "ModelConfig.hidden_dim = 16", "train.steps = 2", "train.warmup_steps = 1", "train.evaluate_every = 0",
        "ModelConfig.heads = 2",
    )  # fmt: skip
    assert run(*parse_run_config([str(root / "configs" / "run" / "chat.gin")], bindings), Hosts(), workdir=workdir)
    assert "2,325 tokens are answers; 94 windows" in capsys.readouterr().out
    (data / "tokenizer.json").unlink()  # the run folder has its own
    generate, calls = Generator.generate, []

    def recorded(self, prompts, *args, **named):
        found = generate(self, prompts, *args, **named)
        calls.append((prompts, found, self))
        return found

    monkeypatch.setattr(Generator, "generate", recorded)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Where does a bee live?\n\nHow much is 1 and 2?\n"))
    common = ("--chat", f"--workdir={workdir}", "--max_new_tokens=3", "--temperature=0")
    run_command_here("generate", *common)
    generator, messages = calls[0][2], []
    template = ChatTemplate(generator.tokenizer)
    assert generator.end_ids[-1] == generator.tokenizer.encode_batch(["<|im_end|>"])[0][0]
    for (prompts, found, _), question in zip(calls, ("Where does a bee live?", "How much is 1 and 2?"), strict=True):
        messages.append({"role": "user", "content": question})
        assert prompts == [template.prompt(messages)]
        messages.append({"role": "assistant", "content": found.text[0]})
    assert capsys.readouterr().out == "".join(f"{found.text[0]}\n" for _, found, _ in calls)
    run_command_here("generate", *common, "--prompt=Where does a bee live?", "--prompt=a")
    first, second = calls[2][1].text
    assert calls[2][0] == [template.prompt([{"role": "user", "content": c}]) for c in ("Where does a bee live?", "a")]
    assert first == calls[0][1].text[0] and capsys.readouterr().out == f"{first}\n---\n{second}\n"
    for flags, words in (
        (["--prompt_ids=x"], "--chat takes no --prompt_ids"),
        (["--out=x.json"], "only with --prompt"),
    ):
        with pytest.raises(UserError, match=words):
            run_command_here("generate", *common, *flags)
