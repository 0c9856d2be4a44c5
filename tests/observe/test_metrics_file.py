import json
import math

import ml_dtypes
import numpy as np
import pytest

from moe_jax.observe.metrics_file import MetricsWriter, column, read_metrics
from moe_jax.observe.report import summarize_run
from moe_jax.storage.run_folder import EVALUATIONS


def write_steps(folder, steps, **options):
    writer = MetricsWriter(folder, **options)
    for step in steps:
        writer.write(step, {"loss": step / 2})


def steps_in(folder):
    return [record["step"] for record in read_metrics(folder)]


def test_write_gives_strict_json_for_numpy_and_non_finite_values(tmp_path):
    record = {
        "loss": np.float32(0.5),
        "tokens": np.int64(7),
        "flag": np.bool_(True),
        "half": ml_dtypes.bfloat16(1.5),
        "layers": np.array([1.0, np.nan, np.inf, -np.inf]),
        "nested": {"a": (1, math.nan)},
    }
    MetricsWriter(tmp_path).write(np.int64(1), record)
    written = {"step": 1, "loss": 0.5, "tokens": 7, "flag": True, "half": 1.5}
    written |= {"layers": [1.0, "nan", "inf", "-inf"], "nested": {"a": [1, "nan"]}}
    assert (tmp_path / "metrics.jsonl").read_text() == json.dumps(written) + "\n"  # no NaN or Infinity of Python's own
    (read,) = read_metrics(tmp_path)
    assert math.isnan(read["layers"][1]) and read["layers"][2:] == [math.inf, -math.inf]


def test_resume_cuts_later_steps_so_that_each_stands_once(tmp_path):
    assert read_metrics(tmp_path) == []
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, [6, 7, 8], resume_step=5)
    write_steps(tmp_path, [0], file_name=EVALUATIONS)  # a file of its own
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert read_metrics(tmp_path, file_name=EVALUATIONS) == [{"step": 0, "loss": 0.0}]
    write_steps(tmp_path, [1], resume_step=None)  # a new run
    writer = MetricsWriter(tmp_path, resume_step=1)
    for error, step, metrics in ((ValueError, 1, {}), (TypeError, 2, {"model": {"layer": object()}})):
        with pytest.raises(error):
            writer.write(step, metrics)
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("half", ['{"step": 4, "loss": 1.0}', "\x00\x00\x00", '{"step": 4\n'])
def test_resume_drops_a_half_written_last_line(tmp_path, half):
    """A line counts when its newline is there; a reader passes over the half as well."""
    write_steps(tmp_path, [1, 2, 3])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(half)
    assert steps_in(tmp_path) == [1, 2, 3]
    write_steps(tmp_path, [4], resume_step=3)
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_damaged_lines_are_left_out_and_told(tmp_path, caplog):
    write_steps(tmp_path, range(1, 6))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    many = b"9" * 400
    hostile = [b'{"step": 4, "loss": %s, "a": %s}\n' % (many, b"[" * 900 + b"]" * 900), b'{"step": %s}\n' % many]
    hostile.append(b'{"step": 4, "loss": %s}\n' % (b"[" * 10**5 + b"]" * 10**5))
    path.write_bytes(b"".join([b"{}\n", lines[0], lines[1][:7], lines[2], *hostile, b"\x00\xff\n", lines[4]]))
    assert steps_in(tmp_path) == [1, 4, 5] and column(read_metrics(tmp_path), "loss")[0].tolist() == [1, 5]
    assert "metrics.jsonl: 5 lines are damaged and left out, the first is line 1" in caplog.text
    write_steps(tmp_path, [5, 6], resume_step=4)
    assert steps_in(tmp_path) == [1, 4, 5, 6]


def test_of_a_long_file_few_records_are_read_and_nothing_that_is_counted_is_lost(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in range(1, 3002):
        compiled = {"compile_seconds": 2.0} if step in (1, 1500) else {}
        writer.write(step, {"loss": 1.0 / step, "overflow_steps": int(step % 7 == 0), **compiled})
    every, few = read_metrics(tmp_path), read_metrics(tmp_path, most=100)
    assert 90 < len(few) < 120 and few[0]["step"] == 1 and few[-1]["step"] == 3001
    assert [sum(record["overflow_steps"] for record in records) for records in (every, few)] == [428, 428]
    assert [record["step"] for record in few if "compile_seconds" in record] == [1, 1500]
    write_steps(tmp_path, [2001], resume_step=2000)
    assert len(read_metrics(tmp_path)) == 2001


def test_summarize_run_by_hand(finished_run, tmp_path):
    summary = summarize_run(finished_run)
    assert (summary["steps"], summary["held_out_loss_first"], summary["held_out_loss_last"]) == (30, 5.0, 2.4)
    # Step 1 compiled: its 1 token/s is not in the median.
    assert summary["tokens_per_second"] == 1000.0 and summary["model_flops_per_second"] == 2.5e9
    assert (summary["compilations"], summary["compile_seconds"]) == (1, 4.5)
    assert summary["overflow_steps"] == 1 and summary["dropped_fraction"] == 0.0
    assert summary["below_unigram_entropy"] == pytest.approx(0.25)  # 1 - 2.4 / 3.2
    assert summary["rejit_stall_seconds"] is None
    assert 1.0 < summary["device_load_mean"] < summary["device_load_worst"] < 2.0
    summary = summarize_run(tmp_path / "none")  # guesses nothing
    assert summary["steps"] is None and summary["loss_last"] is None and summary["below_unigram_entropy"] is None
    assert summary["compilations"] == 0 and summary["overflow_steps"] is None
    # one step, which compiles, is used
    MetricsWriter(tmp_path).write(1, {"tokens_per_second": 5.0, "compile_seconds": 2.0, "loss": math.nan})
    summary = summarize_run(tmp_path)
    assert summary["tokens_per_second"] == 5.0 and summary["loss_last"] is None
