"""From a run folder to text: `load` on any mesh, `python -m moe_jax.generate`, and the mistakes of both."""

import json
import sys

import jax
import pytest
from support.commands import run_command_here
from support.tiny_run import finish, free_port, run_here, start

from moe_jax.errors import UserError
from moe_jax.inference import Sampling, load

GREEDY = Sampling(temperature=0)


def on_mesh(**sizes):
    """Return bindings of these sizes, and of 1 where none is named."""
    return [f"MeshConfig.{name} = {sizes.get(name, 1)}" for name in ("data", "expert", "expert_shard", "model")]


ONE = {"bindings": on_mesh(expert=1), "devices": jax.devices()[:1]}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The folder of a run on 8 devices."""
    folder = tmp_path_factory.mktemp("run")
    run_here(folder, folder / "run", "train.steps = 3", "train.evaluate_every = 100", "train.ema_decay = 0.5")
    return folder / "run"


@pytest.fixture(scope="module")
def many(workdir):
    """The run's model on its own mesh."""
    return load(workdir)


def test_load_reads_a_run_on_another_mesh(workdir, many):
    """Text of a run on 8 devices is the same on 8 and on 2 x 2 with tensor slicing; averaged parameters are read."""
    few = load(workdir, bindings=on_mesh(expert=2, expert_shard=2, model=2), devices=jax.devices()[:4])
    texts = many.generate(["12 apples", "7"], 6, GREEDY, experts=True)
    again = few.generate(["12 apples", "7"], 6, GREEDY, experts=True)
    assert texts.token_ids == again.token_ids and texts.text == again.text
    assert all((a == b).all() for a, b in zip(texts.experts, again.experts, strict=True))
    assert many.generate("12 apples", 1, GREEDY, experts=True).experts[0].shape == (9, 2, 2)
    assert max(map(max, texts.token_ids)) < 258  # the model's vocabulary is rounded up to 384
    assert many.end_ids == (256,)
    load(workdir, averaged=True, step=3, **ONE)


def test_prompts_are_checked_before_anything_runs(many, monkeypatch):
    """Longer than the model's 16 positions, empty, and ids that its bytes lack."""
    monkeypatch.setattr(many, "program", lambda *_: pytest.fail("compiled"))
    for prompts, new, words in (
        ([[1] * 17], 4, r"^prompt 0 has 17 tokens, and the model has ModelConfig.max_length \(16\).*[^\n]$"),
        ("apples " * 3, 4, "has 21 tokens"),
        ([[]], 4, "prompt 0 is empty"),
        ("", 4, "prompt 0 is empty"),
        ([[258]], 4, "holds the id 258; this model has 0 to 257"),
        ([[-1]], 4, "holds the id -1"),
        ([], 4, "no prompt"),
        ("a", 0, "must be at least 1"),
    ):
        with pytest.raises(UserError, match=words):
            many.generate(prompts, new, GREEDY)


def test_mistakes_are_one_line(workdir, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.gin").write_text((workdir / "config.gin").read_text())
    cases = [
        (tmp_path / "none", {}, "does not exist"),
        (tmp_path, {}, "holds no config.gin"),
        (empty, {}, "has no finished checkpoint"),
        (workdir, {"step": 2}, "has no checkpoint of step 2, only of 3"),
        (workdir, {"devices": jax.devices()[:4], "bindings": on_mesh(expert=4, model=4)}, r"ModelConfig.heads \(2\)"),
        (workdir, {**ONE, "bindings": on_mesh(expert=2)}, "but there are 1 devices"),
        (workdir, {**ONE, "bindings": [*ONE["bindings"], "ModelConfig.layers = 4"]}, "not of this model"),
    ]
    for folder, options, words in cases:
        with pytest.raises(UserError, match=words) as error:
            load(folder, **options)
        assert "\n" not in str(error.value)


def started(workdir, folder, *flags):
    """Start the command on two prompts, which writes `out.json` of a folder."""
    (folder / "ids.json").write_text("[[49, 50], [55]]")
    given = [f"--workdir={workdir}", f"--prompt_ids={folder / 'ids.json'}", f"--out={folder / 'out.json'}", *flags]
    fixed = ["--host_devices=2", "--max_new_tokens=5", "--temperature=0"]
    return start([sys.executable, "-m", "moe_jax.generate", *given, *fixed])


def test_command_writes_json_and_refuses(workdir, many, tmp_path):
    asked = started(workdir, tmp_path)
    common = [sys.executable, "-m", "moe_jax.generate", f"--workdir={workdir}", "--host_devices=2"]
    empty = start([*common, "--prompt="])
    long = start([*common, "--prompt=12", "--prompt=7", "--max_new_tokens=99", "--temperature=0", "--ignore_eos"])
    code, text, errors = finish(asked)
    assert code == 0, errors
    found, want = json.loads((tmp_path / "out.json").read_text()), many.generate([[49, 50], [55]], 5, GREEDY)
    assert found == {name: getattr(want, name) for name in ("prompt_ids", "token_ids", "text", "stopped")}
    assert text == f"{want.text[0]}\n---\n{want.text[1]}\n"
    code, text, errors = finish(long)
    new = many.generate(["12", "7"], 99, GREEDY, ignore_eos=True).text
    assert code == 0 and text == f"12{new[0]}\n---\n7{new[1]}\n"
    assert [f"prompt {index} ends at the model's length, {many.longest} tokens" in errors for index in (0, 1)] == [
        True
    ] * 2
    code, _, errors = finish(empty)
    assert code == 2 and errors.strip().splitlines()[-1].startswith("error: prompt 0 is empty")


@pytest.mark.slow
def test_two_processes_write_what_one_does(workdir, many, tmp_path):
    job = ["--num_processes=2", f"--coordinator=127.0.0.1:{free_port()}"]
    both = [started(workdir, tmp_path, *job, f"--process_id={index}") for index in range(2)]
    (code, text, errors), (other, quiet, more) = map(finish, both)
    # Gloo says who is there, and its threads break each other's lines
    quiet = "".join(line for line in quiet.splitlines(True) if "[Gloo]" not in line and " peer ranks" not in line)
    assert (code, other) == (0, 0), errors + more
    assert text and not quiet, quiet
    want = many.generate([[49, 50], [55]], 5, GREEDY)
    assert json.loads((tmp_path / "out.json").read_text())["token_ids"] == want.token_ids


def test_bad_flags_are_refused(tmp_path):
    cases = [(["--prompt=a"], "--workdir is needed"), (["--workdir=x"], "give either --prompt")]
    for name, value in {"temperature": -1.0, "top_k": -1, "top_p": 0.0, "seed": -1}.items():
        cases.append((["--workdir=x", "--prompt=a", f"--{name}={value}"], rf"^{name} \({value}"))
    for flags, words in cases:
        with pytest.raises(UserError, match=words):
            run_command_here("generate", *flags)
    file = tmp_path / "ids.json"
    for text in ("[[1, 2", "[1, 2]", '{"a": 1}', "[[1, 2.5]]", "[[true]]"):
        file.write_text(text)
        with pytest.raises(UserError, match="--prompt_ids"):
            run_command_here("generate", "--workdir=none", f"--prompt_ids={file}")
