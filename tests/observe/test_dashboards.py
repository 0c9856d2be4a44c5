"""TensorBoard and Weights & Biases: equal tags in groups."""

import math
import sys
import types
from contextlib import closing

from moe_jax.observe.metrics_file import Dashboards

RECORD = {"step": 1, "loss": 1.5, "passes": [1.0, 2.0], "plan_id": "even", "none": None, "empty": [], "replicas": 3}


def test_events_hold_grouped_tags(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with closing(Dashboards(tmp_path)) as boards:
        boards.write(1, RECORD)
        boards.write(2, {"loss": math.nan, "grad_norm": math.inf})
    (events,) = (tmp_path / "tensorboard").iterdir()
    data = events.read_bytes()
    tags = (b"loss/loss", b"balance/passes/mean", b"balance/passes/max", b"plan/replicas")
    assert all(tag in data for tag in tags)
    assert not any(tag in data for tag in (b"plan_id", b"none", b"empty"))
    assert caplog.records == []  # tensorboardX has a line for each NaN


def test_wandb_gets_the_same_tags_and_a_run_of_its_own_folder(tmp_path, monkeypatch):
    """A run that is started again goes on under its id; two folders are two runs."""
    said, made = [], []
    online = types.SimpleNamespace(
        log=lambda values, step: said.append((step, values)), finish=lambda: said.append("end")
    )
    fake = types.SimpleNamespace(init=lambda **given: made.append(given) or online)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "moe")
    for folder in ("a", "a", "b"):
        with closing(Dashboards(tmp_path / folder, config="train.steps = 3\nModelConfig.kind = 'gpt'")) as boards:
            boards.write(1, RECORD)
    assert made[0]["id"] == made[1]["id"] != made[2]["id"] and made[0]["resume"] == "allow"
    assert made[0]["config"] == {"train.steps": "3", "ModelConfig.kind": "'gpt'"}
    means = {f"balance/passes/{key}": value for key, value in (("mean", 1.5), ("min", 1.0), ("max", 2.0))}
    assert said[:2] == [
        (1, {"loss/loss": 1.5, "plan/replicas": 3.0} | means),
        "end",
    ]
