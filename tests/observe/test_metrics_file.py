import errno
import json
import logging
import math

import ml_dtypes
import numpy as np
import pytest

from moe_jax.errors import UserError
from moe_jax.observe import EVALUATIONS, MetricsWriter, read_metrics
from moe_jax.observe.metrics_file import column


def write_steps(folder, steps, **options):
    with MetricsWriter(folder, **options) as writer:
        for step in steps:
            writer.write(step, {"loss": step / 2})


def steps_in(folder):
    return [record["step"] for record in read_metrics(folder)]


def strict(line):
    """Parse as JSON without Python's NaN and Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_write_gives_strict_json_for_numpy_and_non_finite_values(tmp_path):
    record = {
        "loss": np.float32(0.5),
        "tokens": np.int64(7),
        "flag": np.bool_(True),
        "half": ml_dtypes.bfloat16(1.5),
        "layers": np.array([1.0, np.nan, np.inf, -np.inf]),
        "dead": np.array([0, 2], np.int32),
        "nested": {"a": (1, math.nan)},
        "plan_id": "even",
        "nothing": None,
    }
    with MetricsWriter(tmp_path) as writer:
        writer.write(np.int64(1), record)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert strict(line) == {
        "step": 1,
        "loss": 0.5,
        "tokens": 7,
        "flag": True,
        "half": 1.5,
        "layers": [1.0, "nan", "inf", "-inf"],
        "dead": [0, 2],
        "nested": {"a": [1, "nan"]},
        "plan_id": "even",
        "nothing": None,
    }
    (read,) = read_metrics(tmp_path)
    assert math.isnan(read["layers"][1]) and read["layers"][2:] == [math.inf, -math.inf]
    assert read["plan_id"] == "even"


def test_write_flushes_each_line(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss": 1.0})
    assert steps_in(tmp_path) == [1]
    writer.close()


def test_write_refuses_steps_that_do_not_rise_and_unknown_types(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {"loss": 1.0, "step": 3})
        with pytest.raises(ValueError, match=r"step \(3\) must be later than the last one in metrics.jsonl \(3\)"):
            writer.write(3, {})
        with pytest.raises(ValueError, match="differs from step"):
            writer.write(4, {"step": 5})
        with pytest.raises(TypeError, match="metric 'model.layer' has type object"):
            writer.write(4, {"model": {"layer": object()}})
    assert steps_in(tmp_path) == [3]


def test_resume_cuts_later_steps_so_that_each_stands_once(tmp_path):
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, [6, 7, 8], resume_step=5)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_resume_keeps_the_bytes_of_earlier_lines(tmp_path):
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    with MetricsWriter(tmp_path, resume_step=3) as writer:
        assert writer.last_step == 3
    assert path.read_bytes() == before


@pytest.mark.parametrize("half", ['{"step": 4, "lo', '{"step": 4, "loss": 1.0}', "\x00\x00\x00", '{"step": 4\n'])
def test_resume_drops_a_half_written_last_line(tmp_path, half):
    """A line counts when its newline is there; a reader passes over the half as well."""
    write_steps(tmp_path, [1, 2, 3])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(half)
    assert steps_in(tmp_path) == [1, 2, 3]
    write_steps(tmp_path, [4], resume_step=3)
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_new_run_starts_from_an_empty_file(tmp_path):
    write_steps(tmp_path, [1, 2])
    write_steps(tmp_path, [1], resume_step=None)
    assert steps_in(tmp_path) == [1]


def test_damage_before_the_last_line_is_named(tmp_path):
    write_steps(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(UserError, match=r"metrics.jsonl line 1 is not a JSON object with an integer step"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match="line 1"):
        MetricsWriter(tmp_path, resume_step=2)


def test_resume_past_the_last_line_is_logged(tmp_path, caplog):
    write_steps(tmp_path, [1, 2])
    with caplog.at_level(logging.WARNING):
        MetricsWriter(tmp_path, resume_step=9).close()
    assert "ends at step 2 but the run resumes after step 9" in caplog.text


def test_evaluations_are_a_file_of_their_own(tmp_path):
    write_steps(tmp_path, [1])
    with MetricsWriter(tmp_path, file_name=EVALUATIONS) as writer:
        writer.write(0, {"held_out_loss": 5.5})
    assert read_metrics(tmp_path, file_name=EVALUATIONS) == [{"step": 0, "held_out_loss": 5.5}]
    assert steps_in(tmp_path) == [1]


def test_read_metrics_of_an_empty_folder_is_empty(tmp_path):
    assert read_metrics(tmp_path) == []


def test_column_takes_the_records_that_have_it():
    records = [{"step": 1, "a": [1.0, math.inf]}, {"step": 2}, {"step": 3, "a": [3.0, 4.0]}, {"step": 4, "a": None}]
    steps, values = column(records, "a")
    np.testing.assert_array_equal(steps, [1, 3])
    np.testing.assert_array_equal(values, [[1.0, np.nan], [3.0, 4.0]])
    assert column(records, "b")[0].shape == (0,)


def test_write_on_a_full_disk_is_a_user_error_and_resumes(tmp_path):
    class HalfThenFull:
        """Takes ten bytes, then none, as a disk does that fills up."""

        def __init__(self, file):
            self.file, self.room = file, 10

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room = 0
            return self.file.write(data[:10])

        def close(self):
            self.file.close()

    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        writer._file = HalfThenFull(writer._file)
        with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl \(No space left on device\); free space"):
            writer.write(2, {"loss": 1.0})
    write_steps(tmp_path, [2], resume_step=1)
    assert steps_in(tmp_path) == [1, 2]
