import builtins
import math

import pytest

from moe_jax.observe import TensorBoardWriter
from moe_jax.observe.metrics_file import scalars


def test_scalars_flatten_lists_and_leave_text_out():
    found = scalars({"step": 3, "loss": 1.5, "load": [1.0, 2.0, 3.0], "plan_id": "even", "none": None, "empty": []})
    assert found == {"loss": 1.5, "load/mean": 2.0, "load/min": 1.0, "load/max": 3.0}
    assert math.isnan(scalars({"loss": math.inf})["loss"])


def test_events_hold_the_tags(tmp_path):
    with TensorBoardWriter(tmp_path) as writer:
        assert writer.available
        writer.write(1, {"loss": 1.5, "load": [1.0, 2.0]})
        writer.flush()
    (events,) = (tmp_path / "tensorboard").iterdir()
    data = events.read_bytes()
    assert all(tag in data for tag in (b"loss", b"load/mean", b"load/max"))
    assert writer.records_missed == 0


def test_a_skipped_step_adds_no_lines_of_tensorboardx(tmp_path, caplog):
    with TensorBoardWriter(tmp_path) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf})
    assert caplog.records == []


@pytest.fixture
def no_tensorboard(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **options):
        if name == "tensorboardX":
            raise ImportError("No module named 'tensorboardX'")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_absent_tensorboard_is_said_once_and_counted(tmp_path, no_tensorboard, caplog):
    with TensorBoardWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 1.0})
        writer.flush()
    assert not writer.available and writer.records_missed == 3
    assert caplog.text.count("pip install tensorboardX") == 1
    assert not (tmp_path / "tensorboard").exists()
