"""Replay of a run folder without another flag; what is said where figures are missing; traces of several meshes."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from moe_jax.analysis.replay_inputs import DEFAULT_CLUSTER, GivenFlags, attention_seconds, build_inputs, layer_of
from moe_jax.cluster import read_cluster
from moe_jax.errors import UserError
from moe_jax.observe import LoadsOrigin, LoadsRecorder
from moe_jax.planning.cost import Cost

ROOT = pathlib.Path(__file__).parents[2]
EXPERTS = 8


def origin(sources, **changes):
    """A run on two expert-parallel groups of `sources` devices, two of each group on a node."""
    fields = {"model_dim": 16, "hidden_dim": 32, "top_k": 2, "dtype": "bfloat16", "devices_per_node": 2}
    return LoadsOrigin(**{**fields, "mesh": (("data", 2), ("expert", sources)), **changes})


def write_run(folder, sources=4, steps=range(6), resume_step=None, **changes):
    """Write the loads of a run folder as training does."""
    recorder = LoadsRecorder(folder, 1, resume_step=resume_step, **{"origin": origin(sources), **changes})
    random = np.random.default_rng(0)
    for step in steps:
        recorder.record(step, random.integers(1, 99, size=(2, sources, EXPERTS)))
    recorder.merge()


def inputs_of(trace, **flags):
    return build_inputs(GivenFlags(trace=str(trace), **flags))


def run_replay(folder, *flags):
    command, env = [sys.executable, "-m", "moe_jax.replay", *flags], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_run_folder_needs_no_other_flag(tmp_path):
    write_run(tmp_path / "run")
    code, lines, err = run_replay(tmp_path, "--trace=run")
    assert code == 0, err
    assert lines[0] == (
        "trace: M 16, F 32, K 2, bfloat16, mesh data 2 x expert 4, 2 devices of an expert-parallel group on a node"
    )
    assert "assumed because the run named none; --cluster names one" in lines[1]
    answer = json.loads(lines[-1])
    assert answer["trace"] == {"name": "loads.npz", "shape": [6, 2, 4, EXPERTS]}
    assert answer["model"] == {"model_dim": 16, "hidden_dim": 32, "top_k": 2, "dtype_bytes": 2} | answer["model"]
    assert len(answer["planners"]) > 10


def test_planners_that_the_clusters_figures_rule_out_are_left_out_of_all(tmp_path):
    (tmp_path / "slow.gin").write_text("Cluster.intra_bandwidth = 1e9\nCluster.inter_bandwidth = 1e8\n")  # no flops
    write_run(tmp_path / "run", origin=origin(4, cluster="slow.gin"))
    code, lines, err = run_replay(tmp_path, "--trace=run")
    assert code == 0, err
    assert "cluster: slow, which the run named" in lines
    planners = json.loads(lines[-1])["planners"]
    left_out = [line.split(" is left out: ")[0] for line in lines if "left out" in line and "Cluster.flops" in line]
    assert "pro_prophet" in left_out and "balanced" in planners and not set(left_out) & set(planners)
    code, _, err = run_replay(tmp_path, "--trace=run", "--planners=pro_prophet")
    assert code == 2 and "planner 'pro_prophet' needs Cluster.flops" in err  # not the reference that it did not ask for


def test_the_layer_that_ran_is_priced(tmp_path):
    """Three matrices with SwiGLU, F over the shards, the dense block between, of the run or of flags that win."""
    layer = {"activation": "swiglu", "moe_every": 2, "dense_hidden_dim": 20, "sequence_length": 8}
    mesh = (("data", 2), ("expert", 4), ("expert_shard", 2))
    write_run(tmp_path / "run", origin=origin(4, mesh=mesh, **layer))
    given = inputs_of(tmp_path / "run")
    cost = Cost(**layer_of(given))
    # M 16, F 32 over 2 shards, bfloat16, float32 at home
    assert (cost.expert_bytes, cost.state_bytes) == (3 * 16 * 16 * 2, 3 * 16 * 16 * (4 + 8))
    assert cost.tokens_per_second("t") == 30e12 / (6 * 16 * 16)
    tokens = given.trace.loads.sum(axis=(2, 3)).mean() / 4 / 2
    work = 2 * (8 * 16**2 + 4 * 8 * 16) + 6 * 16 * 20
    assert attention_seconds(given)[0] == pytest.approx(tokens / 2 * work / 30e12)
    given = inputs_of(tmp_path / "run", activation="gelu", expert_shards=1, moe_every=1, sequence_length=4)
    assert Cost(**layer_of(given)).expert_bytes == 2 * 16 * 32 * 2
    assert attention_seconds(given)[0] == pytest.approx(tokens * (8 * 16**2 + 4 * 4 * 16) / 30e12)
    with pytest.raises(UserError, match=r"--moe_every \(0\) must be at least 1"):
        inputs_of(tmp_path / "run", moe_every=0)


def test_what_precedes_a_layer_is_that_of_its_segment(tmp_path):
    layer = {"activation": "gelu", "moe_every": 1, "dense_hidden_dim": 64, "sequence_length": 8}
    layer["segments"] = ((1, EXPERTS, 32, 2), (1, EXPERTS, 16, 1))
    known = origin(4, **layer, preceding=((1, 64), (2, 24)))
    write_run(tmp_path / "run", origin=known)
    sizes = [inputs_of(tmp_path / "run", segment=segment) for segment in (0, 1)]
    assert [(of.moe_every, of.dense_hidden_dim, of.hidden_dim) for of in sizes] == [(1, 64, 32), (2, 24, 16)]


def test_default_cluster_is_the_file_of_its_name():
    assert read_cluster(ROOT / "configs/cluster/flat_3gbs_30tflops.gin") == DEFAULT_CLUSTER


def test_given_flags_win(tmp_path):
    write_run(tmp_path / "run", sources=8)
    got = inputs_of(tmp_path / "run")
    assert (got.cluster.nodes, got.cluster.devices_per_node) == (4, 2)
    both = {"nodes": 1, "devices_per_node": 8}
    for flags, sizes in (({"nodes": 2}, (2, 4)), ({"devices_per_node": 8}, (1, 8)), (both, (1, 8))):
        got = inputs_of(tmp_path / "run", **flags)
        assert (got.cluster.nodes, got.cluster.devices_per_node) == sizes
    got = inputs_of(tmp_path / "run", model_dim=5, hidden_dim=6, dtype_bytes=8)
    assert (got.model_dim, got.hidden_dim, got.dtype_bytes, got.top_k) == (5, 6, 8, 2)
    sized = tmp_path / "sized.gin"
    sized.write_text("Cluster.nodes = 2\nCluster.devices_per_node = 4\nCluster.intra_bandwidth = 1e9\n")
    got = inputs_of(tmp_path / "run", cluster=str(sized))
    assert (got.cluster.name, got.cluster.nodes, got.cluster.devices_per_node) == ("sized", 2, 4)
    with pytest.raises(UserError, match=r"has 8 devices, but cluster 'flat_3gbs_30tflops' has nodes \(2\)"):
        inputs_of(tmp_path / "run", devices_per_node=3)


def test_cluster_of_the_run_is_found_beside_the_package_or_named(tmp_path):
    write_run(tmp_path / "a", origin=origin(4, cluster="configs/cluster/hecate_a.gin"))
    got = inputs_of(tmp_path / "a")  # the run's sizes, the file's speeds
    assert (got.cluster.name, got.cluster.nodes, got.cluster.intra_bandwidth) == ("hecate_a", 2, 150e9)
    write_run(tmp_path / "b", origin=origin(4, cluster="gone.gin"))
    with pytest.raises(UserError, match="the run's cluster cannot be read .*'gone.gin' does not exist.*give --cluster"):
        inputs_of(tmp_path / "b")


def test_a_run_on_several_meshes_is_replayed_on_one_at_a_time(tmp_path):
    """Zeros of missing sources are no devices: samples of 4 and of 2 sources are never mixed."""
    write_run(tmp_path / "run", sources=4)
    write_run(tmp_path / "run", sources=2, steps=range(6, 9), resume_step=5)
    newest = inputs_of(tmp_path / "run")
    assert newest.trace.loads.shape == (3, 2, 2, EXPERTS) and newest.trace.iterations.tolist() == [6, 7, 8]
    assert newest.messages[0].startswith("trace: 3 of 9 samples, those of one mesh with 2 sources")
    older = inputs_of(tmp_path / "run", nodes=2, devices_per_node=2)
    assert older.trace.loads.shape == (6, 2, 4, EXPERTS) and older.trace.loads.min() > 0
    assert dict(older.trace.origins[0].mesh)["expert"] == 4


def test_trace_file_of_anyone_keeps_its_defaults(tmp_path):
    np.savez(tmp_path / "t.npz", loads=np.ones((3, 1, 4, EXPERTS), int))
    with pytest.raises(UserError, match="--cluster is missing; give a path, for t.npz does not say which run it is of"):
        inputs_of(tmp_path / "t.npz")
    flat = ROOT / "configs/cluster/flat_3gbs_30tflops.gin"
    got = inputs_of(tmp_path / "t.npz", cluster=str(flat), nodes=1, devices_per_node=4)
    assert (got.model_dim, got.hidden_dim, got.dtype_bytes, got.messages) == (1024, 2048, 4, ())
    with pytest.raises(UserError, match="--trace is missing"):
        build_inputs(GivenFlags(trace=None))
    with pytest.raises(UserError, match="has no loads.npz, so --trace must name another run folder or an npz file"):
        inputs_of(tmp_path)
