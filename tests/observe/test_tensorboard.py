"""Event files for TensorBoard: tags in groups."""

import math
from contextlib import closing

from moe_jax.observe.metrics_file import TensorBoard

RECORD = {"step": 1, "loss": 1.5, "passes": [1.0, 2.0], "plan_id": "even", "none": None, "empty": [], "replicas": 3}


def test_events_hold_grouped_tags(tmp_path, caplog):
    with closing(TensorBoard(tmp_path)) as events:
        events.write(1, RECORD)
        events.write(2, {"loss": math.nan, "grad_norm": math.inf})
    (file,) = (tmp_path / "tensorboard").iterdir()
    data = file.read_bytes()
    tags = (b"loss/loss", b"balance/passes/mean", b"balance/passes/max", b"plan/replicas")
    assert all(tag in data for tag in tags)
    assert not any(tag in data for tag in (b"plan_id", b"none", b"empty"))
    assert caplog.records == []  # tensorboardX has a line for each NaN
