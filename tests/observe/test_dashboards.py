"""TensorBoard and Weights & Biases: equal tags in groups and pictures of loads."""

import math
import sys
import types
from contextlib import closing

import numpy as np

from moe_jax.observe.dashboards import Dashboards, load_picture

RECORD = {"step": 1, "loss": 1.5, "passes": [1.0, 2.0], "plan_id": "even", "none": None, "empty": [], "replicas": 3}


def test_events_hold_grouped_tags_and_pictures(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with closing(Dashboards(tmp_path)) as boards:
        boards.write(1, RECORD)
        boards.write(2, {"loss": math.nan, "grad_norm": math.inf})
        boards.write_loads(2, "segment_0", np.ones((2, 4, 3)))
    (events,) = (tmp_path / "tensorboard").iterdir()
    data = events.read_bytes()
    tags = (
        b"loss/loss",
        b"balance/passes/mean",
        b"balance/passes/max",
        b"plan/replicas",
        b"balance/expert_load/segment_0",
    )
    assert all(tag in data for tag in (*tags, b"PNG"))
    assert not any(tag in data for tag in (b"plan_id", b"none", b"empty"))
    assert caplog.records == []  # tensorboardX has a line for each NaN


def test_wandb_gets_the_same_tags_and_a_run_of_its_own_folder(tmp_path, monkeypatch):
    """A run that is started again goes on under its id; two folders are two runs."""
    said, made = [], []
    online = types.SimpleNamespace(
        log=lambda values, step: said.append((step, values)), finish=lambda: said.append("end")
    )
    fake = types.SimpleNamespace(init=lambda **given: made.append(given) or online, Image=lambda picture: picture.shape)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "moe")
    for folder in ("a", "a", "b"):
        with closing(Dashboards(tmp_path / folder, config="train.steps = 3\nModelConfig.kind = 'gpt'")) as boards:
            boards.write(1, RECORD)
            boards.write_loads(1, "segment_0", np.ones((2, 4, 3)))
    assert made[0]["id"] == made[1]["id"] != made[2]["id"] and made[0]["resume"] == "allow"
    assert made[0]["config"] == {"train.steps": "3", "ModelConfig.kind": "'gpt'"}
    means = {f"balance/passes/{key}": value for key, value in (("mean", 1.5), ("min", 1.0), ("max", 2.0))}
    assert said[:3] == [
        (1, {"loss/loss": 1.5, "plan/replicas": 3.0} | means),
        (1, {"balance/expert_load/segment_0": (16, 24, 3)}),
        "end",
    ]


def test_a_picture_shows_loads_over_their_layers_mean():
    """Mean, twice and four times it (all red), half, nothing; a layer without tokens is white."""
    picture = load_picture(np.array([[4.0, 8.0, 16.0, 2.0, 0.0, 0.0, 0.0, 2.0], [0.0] * 8]))[::8, ::8]
    white, red, half_red, blue_half, black = [255] * 3, [255, 0, 0], [255, 128, 128], [128, 128, 255], [0] * 3
    assert picture.shape == (2, 8, 3) and picture[1].tolist() == [white] * 8
    assert picture[0].tolist()[:5] == [white, half_red, red, blue_half, black]
