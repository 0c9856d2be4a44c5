import numpy as np
import pytest

import moe_jax.observe.loads as loads_module
from moe_jax.errors import UserError
from moe_jax.observe import LoadsOrigin, LoadsRecorder, read_loads


def sample(step, sources=2):
    """[2 layers, sources, 3 experts], every entry another number."""
    return (100 * step + np.arange(6 * sources)).reshape(2, sources, 3)


def record_steps(folder, steps, *, every=10, sources=2, **options):
    recorder = LoadsRecorder(folder, every, **options)
    for step in steps:
        recorder.record(step, sample(step, sources))
    return recorder


def part_names(folder):
    return sorted(path.name for path in (folder / "loads").iterdir())


def test_record_takes_every_nth_step_and_merge_joins_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(loads_module, "PART_RECORDS", 2)
    recorder = record_steps(tmp_path, range(1, 56))
    assert not recorder.due(15) and recorder.due(20)
    assert part_names(tmp_path) == ["part_0000000010.npz", "part_0000000030.npz", "part_0000000050.npz"]
    trace = read_loads(recorder.merge())
    assert trace.loads.dtype == np.int32 and trace.loads.shape == (5, 2, 2, 3)
    np.testing.assert_array_equal(trace.iterations, [10, 20, 30, 40, 50])
    np.testing.assert_array_equal(trace.loads, [sample(step) for step in (10, 20, 30, 40, 50)])


def test_record_is_on_disk_when_it_returns(tmp_path):
    record_steps(tmp_path, [10, 20])
    # Another process, as after a kill: no close, no merge before it.
    trace = read_loads(LoadsRecorder(tmp_path, 10, resume_step=20).merge())
    np.testing.assert_array_equal(trace.iterations, [10, 20])


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(30, [10, 20, 30]), (25, [10, 20]), (9, []), (99, [10, 20, 30, 40, 50])]
)
def test_resume_cuts_parts_at_the_restored_step(tmp_path, monkeypatch, resume_step, kept):
    """Parts hold (10, 20), (30, 40), (50): cuts at a border, inside a part, before all, after all."""
    monkeypatch.setattr(loads_module, "PART_RECORDS", 2)
    record_steps(tmp_path, [10, 20, 30, 40, 50]).merge()
    recorder = LoadsRecorder(tmp_path, 10, resume_step=resume_step)
    assert not (tmp_path / "loads.npz").exists()
    assert recorder.last_step == (kept[-1] if kept else None)
    recorder.record(100, sample(100))
    trace = read_loads(recorder.merge())
    np.testing.assert_array_equal(trace.iterations, [*kept, 100])
    np.testing.assert_array_equal(trace.loads, [sample(step) for step in [*kept, 100]])


def test_new_run_removes_samples_and_leftovers(tmp_path):
    record_steps(tmp_path, [10, 20]).merge()
    (tmp_path / "loads" / "part_0000000030.npz.tmp").write_bytes(b"half")
    recorder = LoadsRecorder(tmp_path, 10)
    assert part_names(tmp_path) == []
    assert recorder.merge() is None
    assert not (tmp_path / "loads.npz").exists()


def test_part_closes_at_its_size_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(loads_module, "PART_BYTES", 2 * sample(1).size * 4)
    record_steps(tmp_path, [10, 20, 30])
    assert part_names(tmp_path) == ["part_0000000010.npz", "part_0000000030.npz"]


def test_merge_fills_sources_of_another_mesh_and_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    record_steps(tmp_path, [10], sources=4)
    recorder = record_steps(tmp_path, [20], sources=2, resume_step=10)
    path = recorder.merge()
    assert "sources were [4, 2] along the run" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}
    trace = read_loads(path)
    np.testing.assert_array_equal(trace.loads[0], sample(10, 4))
    np.testing.assert_array_equal(trace.loads[1, :, :2], sample(20, 2))
    assert trace.loads[1, :, 2:].sum() == 0
    np.testing.assert_array_equal(np.load(path)["sources"], [4, 2])


def origin(sources=2, **changes):
    fields = {"model_dim": 16, "hidden_dim": 32, "top_k": 2, "dtype": "bfloat16", "devices_per_node": 2}
    return LoadsOrigin(**{**fields, "mesh": (("data", 2), ("expert", sources)), **changes})


def test_merged_file_says_which_run_recorded_it(tmp_path, monkeypatch):
    monkeypatch.setattr(loads_module, "PART_RECORDS", 2)
    recorder = record_steps(tmp_path, [10, 20, 30], origin=origin(cluster="configs/cluster/hecate_a.gin"))
    path = recorder.merge()
    with np.load(path) as file:
        assert (file["M"], file["F"], file["K"], file["dtype"]) == (16, 32, 2, "bfloat16")
        assert file["mesh"].tolist() == ['{"data": 2, "expert": 2}'] and file["mesh_index"].tolist() == [0, 0, 0]
        assert file["devices_per_node"].tolist() == [2] and file["cluster"].tolist() == ["configs/cluster/hecate_a.gin"]
    assert read_loads(path).origins == (origin(cluster="configs/cluster/hecate_a.gin"),) * 3


def test_resume_on_another_mesh_keeps_what_is_known_of_the_first(tmp_path):
    record_steps(tmp_path, [10, 20, 30], sources=4, origin=origin(4))
    recorder = record_steps(tmp_path, [30], resume_step=20, origin=origin(2))  # cuts the sample of step 30
    text = recorder.describe_older()
    assert text.startswith("recorded loads: samples of other meshes up to step 20 are kept as they are")
    assert "2 of (data 2 x expert 4, 4 sources)" in text and "this mesh (data 2 x expert 2, 2 sources)" in text
    trace = read_loads(recorder.merge())
    assert trace.iterations.tolist() == [10, 20, 30] and trace.sources.tolist() == [4, 4, 2]
    assert trace.origins == (origin(4), origin(4), origin(2))


def test_resume_on_the_same_mesh_has_nothing_to_say(tmp_path):
    record_steps(tmp_path, [10], origin=origin())
    assert record_steps(tmp_path, [20], resume_step=10, origin=origin()).describe_older() is None


def test_parts_without_a_run_are_kept_and_read(tmp_path):
    record_steps(tmp_path, [10], sources=4)
    recorder = record_steps(tmp_path, [20], resume_step=10, origin=origin(2))
    assert "1 of (4 sources)" in recorder.describe_older()
    trace = read_loads(recorder.merge())
    assert trace.origins == (None, origin(2))
    assert LoadsRecorder(tmp_path, 10, resume_step=20, origin=origin(4)).describe_older().count(" of (") == 1
    np.savez(tmp_path / "old.npz", **GOOD, mesh=np.zeros(3))  # somebody else's file, somebody else's key
    assert read_loads(tmp_path / "old.npz").origins == (None, None)


def test_a_run_that_goes_on_says_which_layer_it_is_of(tmp_path):
    layer = {"activation": "swiglu", "moe_every": 2, "dense_hidden_dim": 20, "sequence_length": 8}
    record_steps(tmp_path, [10], origin=origin(**layer))
    recorder = record_steps(tmp_path, [20], resume_step=10, origin=origin(**layer))
    assert read_loads(recorder.merge()).origins == (origin(**layer),) * 2
    assert origin(mesh=(("expert", 2), ("expert_shard_mp", 2), ("expert_shard", 3))).expert_shards == 6


def test_parts_of_two_models_are_refused(tmp_path):
    record_steps(tmp_path, [10], origin=origin())
    recorder = record_steps(tmp_path, [20], resume_step=10, origin=origin(top_k=1))
    with pytest.raises(UserError, match=r"samples have \(M, F, K, dtype, segments\) .* they are not of one model"):
        recorder.merge()


def test_broken_origin_is_named(tmp_path):
    path = record_steps(tmp_path, [10, 20], origin=origin()).merge()
    with np.load(path) as file:
        arrays = {**file, "mesh_index": np.array([0])}
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="what it says of its run .* must be 2 numbers below 1"):
        read_loads(path)


def test_every_zero_records_nothing_and_negative_is_an_error(tmp_path):
    assert not LoadsRecorder(tmp_path, 0).record(0, sample(0))
    with pytest.raises(UserError, match=r"train.loads_every \(-1\) must be 0"):
        LoadsRecorder(tmp_path, -1)


def test_record_refuses_other_shapes_types_and_old_steps(tmp_path):
    recorder = record_steps(tmp_path, [10])
    with pytest.raises(ValueError, match=r"not float64 \[2, 2, 3\]"):
        recorder.record(20, sample(20) * 1.0)
    with pytest.raises(ValueError, match=r"not int64 \[2, 3\]"):
        recorder.record(20, sample(20)[0])
    with pytest.raises(ValueError, match=r"step \(10\) must be later"):
        recorder.record(10, sample(10))


GOOD = {"loads": np.ones((2, 1, 2, 3), np.int32), "iterations": np.array([10, 20])}
NEGATIVE = GOOD["loads"].copy()
NEGATIVE[1, 0, 1, 2] = -4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"iterations": GOOD["iterations"]}, r"has no loads; it has \['iterations'\]"),
        ({"x": np.zeros(1)}, r"has no loads; it has \['x'\]"),
        (GOOD | {"loads": np.ones((2, 2, 3), np.int32)}, r"loads has shape \[2, 2, 3\]; it must be \[steps, layers"),
        (GOOD | {"loads": np.ones((2, 1, 2, 3)) / 2}, r"loads\[0, 0, 0, 0\] \(0.5: .* is not a whole number"),
        (GOOD | {"loads": np.ones((2, 1, 2, 3), complex)}, "loads has dtype complex128"),
        (GOOD | {"loads": NEGATIVE}, r"loads\[1, 0, 1, 2\] \(-4: layer 0, source 1, expert 2\) is not a whole number"),
        (GOOD | {"iterations": np.array([10])}, r"iterations is int64 \[1\]; it must be integers \[2\]"),
        (GOOD | {"iterations": np.array([0.5, 1.0])}, r"iterations is float64 \[2\]"),
        (GOOD | {"iterations": np.array([10, 10])}, r"iterations\[1\] \(10\) must be later"),
        (GOOD | {"loads": np.array([None, 1])}, "not a readable npz file of plain arrays"),
    ],
)
def test_read_loads_names_what_is_wrong(tmp_path, arrays, message):
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays)
    with pytest.raises(UserError, match=message):
        read_loads(path)


def test_read_loads_of_no_npz_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="not a readable npz"):
        read_loads(tmp_path / "none.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(UserError, match="is a single array"):
        read_loads(tmp_path / "one.npy")
    np.savez(tmp_path / "cut.npz", **GOOD)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-40])
    with pytest.raises(UserError, match="not a readable npz"):
        read_loads(tmp_path / "cut.npz")
