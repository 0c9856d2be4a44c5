"""Replay as a user runs it: a trace or a run folder in, a table, pictures and a JSON line out."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from support.commands import run_command_here
from support.options import planner_config

from moe_jax.analysis import simulate
from moe_jax.analysis.replay_inputs import build_inputs
from moe_jax.cluster import HOST, UNNAMED, Cluster, read_cluster
from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsOrigin, LoadsRecorder, LoadsTrace, read_loads
from moe_jax.planning.balancer import names
from moe_jax.planning.cost import Cost, LayerPrices
from moe_jax.planning.placement import Placement

ROOT = pathlib.Path(__file__).parents[2]
FLAT = ROOT / "configs/cluster/flat_3gbs_30tflops.gin"
SIZES = {"model_dim": 64, "hidden_dim": 128}
LINKS = Cluster(name="flat", nodes=2, devices_per_node=2, flat=True, intra_bandwidth=3e9, flops=3e13)
EXPERTS = 8
COST = Cost(prices=LayerPrices(cluster=LINKS, **SIZES), replica_slots=2)


def make_trace(samples=12, layers=2, sources=4, experts=8):
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(experts, 0.4), size=layers)
    loads = np.stack([rng.multinomial(2000, popularity, size=(sources, layers)).swapaxes(0, 1) for _ in range(samples)])
    return LoadsTrace(loads=loads, iterations=1 + 10 * np.arange(samples))


def save_trace(path, trace):
    """Write what anyone's trace has, and nothing of ours."""
    np.savez(path, loads=trace.loads, iterations=trace.iterations)


def replayed(capsys, *flags):
    """Return the lines that the command prints."""
    run_command_here("replay", *flags)
    return capsys.readouterr().out.splitlines()


def trace_flags(tmp_path):
    """Return the flags of a trace on the flat cluster; later ones win."""
    save_trace(tmp_path / "loads.npz", make_trace())
    return f"--trace={tmp_path / 'loads.npz'}", f"--cluster={FLAT}"


def test_cli_prints_a_table_and_writes_figures(tmp_path, capsys):
    out, names = tmp_path / "out", ["balanced", "fastermoe_after_gate"]
    sizes = "--nodes=2", "--devices_per_node=2"
    lines = replayed(capsys, *trace_flags(tmp_path), f"--planners={','.join(names)}", *sizes, f"--out={out}")
    answer = json.loads((out / "replay.json").read_text())
    assert list(answer["planners"]) == names
    start = lines.index(next(line for line in lines if line.startswith("planner ")))
    layer = 1e3 * answer["planners"][names[1]]["layer_seconds"]
    assert lines[start].split() == ["planner", "load", "layer", "ms", "over", "EP", "moved", "GB", "plan", "us"]
    assert lines[start + 2].split()[:3:2] == [names[1], f"{layer:.4g}"] and lines[-1].startswith("plan us   search for")
    for name in names:
        assert any(line.startswith(name) for line in lines)
    keys = "max_over_mean max_over_mean_p95 rb replicas_per_layer "
    keys += "lambda layer_seconds search_seconds place_seconds reduce_seconds others_seconds speedup_over_ep "
    keys += "planner_us_per_layer bytes_moved shape_changes hiding"
    assert set(keys.split()) <= set(answer["planners"]["balanced"])


def test_replay_reads_what_calibrate_wrote(tmp_path, capsys):
    """Sizes and speeds come from the calibration, which was measured on eight devices; nothing else is said. Loads may
    be whole floats, and have no iterations."""
    loads = make_trace(samples=4, sources=8, experts=16).loads
    np.savez(tmp_path / "loads.npz", loads=loads.astype(np.float32))
    again = read_loads(tmp_path / "loads.npz")
    assert again.loads.dtype == np.int64 and again.iterations.tolist() == [0, 1, 2, 3]
    names = ["fastermoe_after_gate", "pro_prophet", "balanced"]
    cluster = f"--cluster={ROOT / 'docs/bench/cluster_lab.json'}"
    replayed(capsys, f"--trace={tmp_path / 'loads.npz'}", cluster, f"--planners={','.join(names)}", f"--out={tmp_path}")
    answer = json.loads((tmp_path / "replay.json").read_text())
    assert answer["cluster"] == "calibrated" and list(answer["planners"]) == names
    for summary in answer["planners"].values():
        assert summary["layer_seconds"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--nodes=2", "--planners=best"), "planner 'best' is unknown; use none, auto, balanced, eplb, fastermoe"),
        (("--nodes=4", "--planners=pro_prophet", "--transfer=by_node"), "there is one device on a node"),
        (("--nodes=2", "--lag=5"), "lag (5) is in steps, and none of the trace's 12 samples has another one so many "
         "steps before it; it answers lags of 10, 20, 30, 40, 50, 60, 70, 80, .."),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, flags, message):
    per_node = 4 // int(flags[0][-1])  # of the trace's devices
    with pytest.raises(UserError, match=re.escape(message)) as error:
        run_command_here("replay", *trace_flags(tmp_path), f"--devices_per_node={per_node}", *flags)
    assert "\n" not in str(error.value)


def simulate_one(name, trace, lag=1, cost=COST, **fields):
    start = Placement.even(trace.loads.shape[1], trace.loads.shape[3], trace.loads.shape[2], 2)
    config = planner_config(bounded=False, overlap_degree=4, **{"must_pay": False, **fields})
    return simulate.simulate(name, trace, config, start, cost, lag, 1)


def hot_trace():
    """Three samples; on each of 4 devices, with homes 2d and 2d + 1, 40 tokens go to expert 0."""
    loads = np.zeros((3, 1, 4, 8), int)
    loads[..., 0] = 40
    return LoadsTrace(loads=loads, iterations=np.arange(3))


def test_ahead_sees_only_the_past_and_after_gate_sees_the_step():
    # Expert 0 hot in even samples, expert 7 in odd ones: the past is always wrong.
    loads = np.zeros((6, 1, 4, 8), int)
    loads[0::2, :, :, 0] = loads[1::2, :, :, 7] = 4000
    trace = LoadsTrace(loads=loads, iterations=np.arange(6))
    ahead, sees = (simulate_one(name, trace) for name in ("fastermoe", "fastermoe_after_gate"))
    assert ahead.sample.tolist() == [1, 2, 3, 4, 5]
    late = simulate_one("fastermoe", trace, lag=2)  # two samples back the same expert was hot
    assert [simulate.summarize(one, one, COST)["max_over_mean"] for one in (ahead, sees, late)] == [4, 1, 1]


def pairs_trace():
    """Two neighbouring steps at each of three samples, at which another expert is hot than at the sample before."""
    loads = np.zeros((6, 1, 4, 8), int)
    for at in range(6):
        loads[at, :, :, at // 2 + 1] = 4000
    return LoadsTrace(loads=loads, iterations=np.array([9, 10, 19, 20, 29, 30]))


def test_a_plan_is_judged_by_the_loads_of_so_many_steps_before():
    """Not of so many samples: and no predictor takes what lies further back than its window of steps."""
    trace = pairs_trace()
    for name, fields in (("topk_all", {"top_k": 1}), ("hecate", {"calibrate": False})):  # by the newest, by five steps
        near, far = (simulate_one(name, trace, lag, **fields) for lag in (1, 10))
        assert (near.sample.tolist(), far.sample.tolist()) == ([1, 3, 5], [2, 3, 4, 5])
        loads = [simulate.summarize(one, one, COST)["max_over_mean"] for one in (near, far)]
        assert loads[0] < 1.5 and loads[1] > 2
    assert simulate.least_lag(trace.iterations) == 1 and len(simulate.judged(trace.iterations, 11)) == 2


def test_the_first_line_says_how_old_the_loads_are_and_auto_that_it_had_too_few(tmp_path, capsys):
    flags = "--nodes=2", "--devices_per_node=2", "--planners=auto", f"--out={tmp_path / 'out'}"
    old = replayed(capsys, *trace_flags(tmp_path), *flags)
    assert old[0].startswith("judged: 11 of 12 samples, by plans from the loads of 10 steps before; no samples are")
    save_trace(tmp_path / "loads.npz", pairs_trace())
    lines = replayed(capsys, f"--trace={tmp_path / 'loads.npz'}", f"--cluster={FLAT}", *flags)
    assert lines[0] == "judged: 3 of 6 samples, by plans from the loads of the step before"
    assert "auto: 3 samples are too few, so it stays plain: it needs 64, two rounds, to choose" in lines
    answer = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert (answer["lag"], answer["judged"], answer["planners"]["auto"]["speedup_over_ep"]) == (1, 3, 1.0)


def test_what_transfers_send_by_hand():
    trace = hot_trace()
    none, shadow = simulate_one("none", trace), simulate_one("topk_all", trace, top_k=1)
    # plain EP: expert 0 has all 160 tokens: H = (160, 0, 0, 0), max/mean 4
    plain, summary = simulate.summarize(none, none, COST), simulate.summarize(shadow, none, COST)
    assert (plain["max_over_mean"], plain["speedup_over_ep"], plain["place_seconds"]) == (4.0, 1.0, 0)
    # one expert of 8 replicated on 3 devices: lambda 1/8, 2 x 3 x 65,536 bytes each step; H even: no finite RB
    assert (summary["max_over_mean"], summary["lambda"], summary["replicas_per_layer"]) == (1.0, 0.125, 3.0)
    assert summary["bytes_moved"] == 6 * 65536 and summary["rb"] > 1e6
    # 2 x 2 devices; expert 0 (a quarter of topk's two) goes to all others: X = 1, m = 1, Cp = 1. In force: one offer
    # more where homes allow it (X = 2) and mu = 2 slots: (2 + 2) 3/4, half of a device's 4 abroad
    assert (summary["hiding"], summary["shape_changes"]) == ("none", 0)
    # the shape in force is paid: 4 3/4 experts of 65,536 bytes over 3 GB/s there and back, plus H = 40 tokens' 12 M F
    paid = 2 * 3 * 65536 / 3e9
    assert summary["place_seconds"] + summary["reduce_seconds"] == pytest.approx(paid, rel=1e-5)
    assert summary["layer_seconds"] == pytest.approx(paid + 40 * 12 * 64 * 128 / 3e13, rel=1e-4)
    # the search took seconds of this host, which are never added to those of modelled devices
    slow = simulate.summarize(dataclasses.replace(shadow, search=shadow.search + 3600), none, COST)
    assert slow["search_seconds"] > 1000 > summary["search_seconds"]
    assert slow["layer_seconds"] == summary["layer_seconds"]


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
    return build_inputs({"trace": str(trace), **flags})


def test_run_folder_needs_no_other_flag(tmp_path, capsys):
    write_run(tmp_path / "run")
    lines = replayed(capsys, f"--trace={tmp_path / 'run'}", f"--out={tmp_path / 'out'}")
    assert lines[1] == (
        "trace: M 16, F 32, K 2, bfloat16, mesh data 2 x expert 4, 2 devices of an expert-parallel group on a node"
    )
    assert "assumed because the run named none; --cluster names one" in lines[2]
    assert read_cluster(FLAT) == UNNAMED and read_cluster("configs/cluster/host_devices.gin") == HOST
    answer = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert answer["trace"] == {"name": "loads.npz", "shape": [6, 2, 4, EXPERTS]}
    assert answer["model"] == {"model_dim": 16, "hidden_dim": 32, "top_k": 2, "dtype_bytes": 2} | answer["model"]
    assert set(answer["planners"]) == {*names(), *(name + simulate.SUFFIX for name in names(after_gate=True))}
    assert all(own["max_over_mean"] >= 1 and own["layer_seconds"] > 0 for own in answer["planners"].values())


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
