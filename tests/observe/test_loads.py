import numpy as np
import pytest

import moe_jax.observe.loads as loads_module
from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsOrigin, LoadsRecorder, device_load_max_over_mean, read_loads


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


def test_record_takes_every_nth_step_and_the_one_before_and_merge_joins_parts(tmp_path, monkeypatch):
    """What is judged on a step is planned from the step before it."""
    monkeypatch.setattr(loads_module, "PART_RECORDS", 2)
    record_steps(tmp_path / "small", [10, 20, 30], origin=None)
    assert part_names(tmp_path / "small") == ["part_0000000010.npz", "part_0000000030.npz"]
    monkeypatch.setattr(loads_module, "PART_RECORDS", 64)
    monkeypatch.setattr(loads_module, "PART_BYTES", 2 * sample(1).size * 4)
    recorder, steps = record_steps(tmp_path, range(1, 36)), [9, 10, 19, 20, 29, 30]
    assert not recorder.due(15) and recorder.due(20)
    assert part_names(tmp_path) == ["part_0000000009.npz", "part_0000000019.npz", "part_0000000029.npz"]
    trace = read_loads(recorder.merge())
    assert trace.loads.dtype == np.int32 and trace.loads.shape == (6, 2, 2, 3)
    np.testing.assert_array_equal(trace.iterations, steps)
    np.testing.assert_array_equal(trace.loads, [sample(step) for step in steps])
    with pytest.raises(ValueError, match=r"step \(30\) must be later"):
        recorder.record(30, sample(30))
    assert LoadsRecorder(tmp_path / "small", 1).due(7)


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(30, [10, 20, 30]), (25, [10, 20]), (None, []), (99, [10, 20, 30, 40, 50])]
)
def test_resume_cuts_parts_at_the_restored_step(tmp_path, monkeypatch, resume_step, kept):
    """Parts hold (10, 20), (30, 40), (50): cuts at a border, inside a part, before all (a new run), after all.

    A sample is on the disk when `record` returns: as after a kill, nobody closes or merges in between."""
    monkeypatch.setattr(loads_module, "PART_RECORDS", 2)
    record_steps(tmp_path, [10, 20, 30, 40, 50])
    (tmp_path / "loads.npz").touch()
    (tmp_path / "loads" / "part_0000000060.npz.tmp").write_bytes(b"half")
    recorder = LoadsRecorder(tmp_path, 10, resume_step=resume_step)
    assert not (tmp_path / "loads" / "part_0000000060.npz.tmp").exists()
    assert not (tmp_path / "loads.npz").exists()
    assert recorder.last_step == (kept[-1] if kept else None)
    recorder.record(100, sample(100))
    trace = read_loads(recorder.merge())
    np.testing.assert_array_equal(trace.iterations, [*kept, 100])
    np.testing.assert_array_equal(trace.loads, [sample(step) for step in [*kept, 100]])


def origin(sources=2, **changes):
    fields = {"model_dim": 16, "hidden_dim": 32, "top_k": 2, "dtype": "bfloat16", "devices_per_node": 2}
    return LoadsOrigin(**{**fields, "mesh": (("data", 2), ("expert", sources)), **changes})


def test_merged_file_says_which_run_recorded_it(tmp_path, monkeypatch):
    monkeypatch.setattr(loads_module, "PART_RECORDS", 2)
    layer = {"activation": "swiglu", "moe_every": 2, "dense_hidden_dim": 20, "sequence_length": 8}
    own = origin(cluster="configs/cluster/hecate_a.gin", segments=((2, 3, 32, 2),), preceding=((2, 20),), **layer)
    path = record_steps(tmp_path, [10, 20, 30], origin=own).merge()
    with np.load(path) as file:
        assert (file["M"], file["F"], file["K"], file["dtype"]) == (16, 32, 2, "bfloat16")
        assert file["mesh"].tolist() == ['{"data": 2, "expert": 2}'] and file["mesh_index"].tolist() == [0, 0, 0]
        assert file["devices_per_node"].tolist() == [2] and file["cluster"].tolist() == ["configs/cluster/hecate_a.gin"]
    assert read_loads(path).origins == (own,) * 3
    assert origin(mesh=(("expert", 2), ("expert_shard_mp", 2), ("expert_shard", 3))).expert_shards == 6


def test_resume_on_another_mesh_keeps_what_is_known_of_the_first(tmp_path, caplog):
    record_steps(tmp_path, [10, 20, 30], sources=4, origin=origin(4))
    record_steps(tmp_path, [40], resume_step=30, origin=origin(4))  # the same mesh
    recorder = record_steps(tmp_path, [30], resume_step=20, origin=origin(2))  # cuts the sample of step 30
    caplog.set_level("INFO")
    trace = read_loads(recorder.merge())
    assert "sources were [4, 2] along the run" in caplog.text
    np.testing.assert_array_equal(trace.loads[0], sample(10, 4))
    np.testing.assert_array_equal(trace.loads[2, :, :2], sample(30, 2))
    assert trace.loads[2, :, 2:].sum() == 0
    assert trace.iterations.tolist() == [10, 20, 30] and trace.sources.tolist() == [4, 4, 2]
    assert trace.origins == (origin(4), origin(4), origin(2))
    recorder = record_steps(tmp_path, [40], resume_step=30, origin=origin(top_k=1))
    with pytest.raises(UserError, match=r"samples have \(M, F, K, dtype, segments\) .* they are not of one model"):
        recorder.merge()


GOOD = {"loads": np.ones((2, 1, 2, 3), np.int32), "iterations": np.array([10, 20])}
NEGATIVE = GOOD["loads"].copy()
NEGATIVE[1, 0, 1, 2] = -4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"iterations": GOOD["iterations"]}, r"has no loads; it has \['iterations'\]"),
        (GOOD | {"loads": np.ones((2, 2, 3), np.int32)}, r"loads has shape \[2, 2, 3\]; it must be \[steps, layers"),
        (GOOD | {"loads": NEGATIVE}, r"loads\[1, 0, 1, 2\] \(-4: layer 0, source 1, expert 2\) is not a whole number"),
        (GOOD | {"iterations": np.array([10, 10])}, r"iterations\[1\] \(10\) must be later"),
    ],
)
def test_read_loads_names_what_is_wrong(tmp_path, arrays, message):
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays)
    with pytest.raises(UserError, match=message):
        read_loads(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="not a readable npz"):
        read_loads(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(UserError, match="is a single array"):
        read_loads(tmp_path / "one.npy")


def test_device_load_max_over_mean_by_hand():
    """Two layers, two sources, four experts; sums over sources: layer 0 (4, 2, 0, 2), layer 1 (8, 0, 0, 0)."""
    loads = np.array([[[1, 2, 0, 2], [3, 0, 0, 0]], [[8, 0, 0, 0], [0, 0, 0, 0]]], np.int32)
    home = np.array([[0, 0, 1, 1], [0, 1, 0, 1]])
    # Layer 0: 6 / 4. Layer 1: everything on one of two devices, the worst case D.
    np.testing.assert_array_equal(device_load_max_over_mean(loads, home, 2), [1.5, 2.0])
    # Devices without an expert count in the mean: 6 / (8 / 4).
    np.testing.assert_array_equal(device_load_max_over_mean(loads, home, 4), [3.0, 4.0])
    np.testing.assert_array_equal(device_load_max_over_mean(0 * loads, home, 2), [1.0, 1.0])  # no tokens: balanced
    most = np.full((2, 2, 4), 2**31 - 1, np.int32)  # sums overflow int32
    np.testing.assert_array_equal(device_load_max_over_mean(most, home, 2), [1.0, 1.0])
