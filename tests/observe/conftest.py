"""A small finished run, written by the writers themselves."""

import json

import numpy as np
import pytest

from moe_jax.observe.loads import LoadsRecorder
from moe_jax.observe.metrics_file import MetricsWriter
from moe_jax.storage.run_folder import EVALUATIONS, RunFolder, write_atomically


def write_run(path, *, layers: int, experts: int, steps: int = 30) -> RunFolder:
    """Write config, environment, metrics, evaluations and loads of a run of that size."""
    run = RunFolder(path)
    random = np.random.default_rng(0)
    write_atomically(run.config, "train.steps = 30\nDataConfig.path = '/data/ann/books.txt'\n")
    environment = {"date": "2026-11-20", "machine": {"system": "Linux"}, "mesh": {"expert": 2}, "commit": None}
    write_atomically(run.environment, json.dumps(environment, indent=2))
    metrics, evaluations = MetricsWriter(run), MetricsWriter(run, file_name=EVALUATIONS)
    recorder = LoadsRecorder(run, every=10)
    evaluations.write(0, {"held_out_loss": 5.0, "unigram_entropy": 3.2})
    for step in range(1, steps + 1):
        record = {"loss": 2.0 + 3.0 / step, "learning_rate": 1e-3 * step / steps, "step_seconds": 0.25}
        record |= {"tokens_per_second": 1000.0, "model_flops_per_second": 2.5e9, "peak_device_bytes": 3 * 2**20}
        record |= {"dropped_fraction": 0.0, "overflow_steps": int(step == 7)}
        record["device_load_max_over_mean"] = 1.0 + random.random(layers)
        if step == 1:
            record |= {"compile_seconds": 4.5, "tokens_per_second": 1.0}
        metrics.write(step, record)
        recorder.record(step, random.integers(0, 9, size=(layers, 2, experts)))
    evaluations.write(steps, {"held_out_loss": 2.4, "unigram_entropy": 3.2})
    recorder.merge()
    return run


@pytest.fixture
def finished_run(tmp_path) -> RunFolder:
    return write_run(tmp_path / "tiny", layers=2, experts=4)
