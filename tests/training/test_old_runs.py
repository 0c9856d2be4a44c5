"""Run folders that the code wrote before `moe_jax/jobs` was there: they go on, write, and name what is gone.

old_runs.tar.xz holds three of commit 839fcba0, as step 4 of 6 left them, without pictures: `hecate`, whose experts have
moved, on four devices; `lora` on conversations, and its `base`. Their metrics.jsonl has the two steps that followed.
"""

import json
import pathlib
import tarfile

import numpy as np
import pytest
from support import chat_cases
from support.commands import run_command_here
from support.tiny_run import write_corpus

from moe_jax.errors import UserError
from moe_jax.observe.metrics_file import read_metrics
from moe_jax.storage.checkpoint import HostData


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The folders beside their text; what they name is relative."""
    with tarfile.open(pathlib.Path(__file__).with_name("old_runs.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    write_corpus(tmp_path / "corpus")
    chat_cases.write_chats(tmp_path)
    monkeypatch.chdir(tmp_path)


def train(name, *bindings):
    moved = ["--init_from=base"] * (name == "lora")  # the run has the path of the machine that wrote it
    flags = [f"--gin_bindings={line}" for line in ("MeshConfig.data = 2", *bindings)]  # they were written on 4 devices
    run_command_here("train", f"--gin_file={name}/config.gin", f"--workdir={name}", *moved, *flags)


@pytest.mark.parametrize("name", ["hecate", "lora"])
def test_an_old_run_goes_on_as_it_did_and_writes(old, name, capsys):
    want = [record["loss"] for record in read_metrics(name)]
    train(name)
    assert "resuming at step 4" in capsys.readouterr().out
    got = [record["loss"] for record in read_metrics(name)]
    assert len(got) == len(want) == 6
    np.testing.assert_allclose(got, want, rtol=1e-6)
    run_command_here("generate", f"--workdir={name}", "--prompt=7 apples", "--max_new_tokens=3", "--temperature=0")
    assert len(capsys.readouterr().out) > len("7 apples")


def test_what_is_gone_names_its_successor(old):
    for line, words in (
        ("train.copy_every = 5", "checkpoint_every"), ("train.decay_shape = '1-sqrt'", "a line"),
        ("PlannerConfig.overlap_degree = 'executor'", "is Hecate.overlap_degree now"),
        ("MoEConfig.bias_rate = 0.1", "is SigmoidBias.bias_rate now"),
        ("PlannerConfig.horizon = 7", "within 100 steps"),
        ("MoEConfig.expert_dtype = 'float8_e4m3'", "MoEConfig.dispatch_dtype stays"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words) as error:
            train("hecate", line)
        assert "\n" not in str(error.value)


def test_overflows_of_an_older_checkpoint_are_read():
    read = HostData.from_json({"overflows": {"steps": [3, 4], "run_again": 2}})
    assert (list(read.overflowed), read.run_again) == ([3, 4], 2)
    assert HostData.from_json(json.loads(json.dumps(read.to_json()))) == read
