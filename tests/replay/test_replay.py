"""Replay as a user runs it: a small trace in, a table, pictures and a JSON line out; mistakes end with code 2."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from moe_jax.analysis import replay_report as report
from moe_jax.analysis import simulate
from moe_jax.cluster import Cluster
from moe_jax.observe import LoadsTrace, read_loads
from moe_jax.planning import NAMES
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement

ROOT = pathlib.Path(__file__).parents[2]
FLAT = ROOT / "configs/cluster/flat_3gbs_30tflops.gin"
SIZES = {"model_dim": 64, "hidden_dim": 128, "overlap_degree": 4}
LINKS = Cluster(name="flat", nodes=2, devices_per_node=2, flat=True, intra_bandwidth=3e9, flops=3e13)
COST = Cost(cluster=LINKS, replica_slots=2, **SIZES)


def make_trace(samples=12, layers=2, sources=4, experts=8):
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(experts, 0.4), size=layers)
    loads = np.stack([rng.multinomial(2000, popularity, size=(sources, layers)).swapaxes(0, 1) for _ in range(samples)])
    return LoadsTrace(loads=loads, iterations=1 + 10 * np.arange(samples))


def save_trace(path, trace):
    """Write what anyone's trace has, and nothing of ours."""
    np.savez(path, loads=trace.loads, iterations=trace.iterations)


def run_replay(tmp_path, *flags):
    path = tmp_path / "loads.npz"
    if not path.exists():
        save_trace(path, make_trace())
    command = [sys.executable, "-m", "moe_jax.replay", f"--trace={path}", f"--cluster={FLAT}", *flags]  # the last wins
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)


def test_cli_prints_a_table_and_a_json_line_and_draws(tmp_path):
    out = tmp_path / "out"
    done = run_replay(tmp_path, "--planners=all", "--nodes=2", "--devices_per_node=2", f"--out={out}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1])
    assert json.loads((out / "replay.json").read_text()) == answer
    assert set(answer["planners"]) == set(simulate.EVERY_NAME) >= set(NAMES)
    for name, summary in answer["planners"].items():
        assert any(line.startswith(name) for line in lines)
        assert summary["max_over_mean"] >= 1 and summary["layer_seconds"] > 0
        assert (out / f"device_load_{name}.png").exists() and (out / f"replicas_{name}.png").exists()
    assert (out / "ddl_roofline.png").exists()
    keys = "max_over_mean max_over_mean_p95 max_over_mean_from_10 max_over_mean_p95_from_10 rb replicas_per_layer "
    keys += "lambda layer_seconds search_seconds place_seconds reduce_seconds others_seconds speedup_over_ep "
    keys += "original_bytes_per_layer original_seconds_per_layer rb_ratio_to_fastermoe planner_us_per_layer "
    keys += "bytes_moved shape_changes sent_experts sent_experts_across received_experts sent_experts_least hiding"
    assert set(keys.split()) <= set(answer["planners"]["balanced"])


def test_replay_reads_what_calibrate_wrote(tmp_path):
    """Sizes and speeds come from the calibration, which was measured on eight devices; nothing else is said. Loads may
    be whole floats, and have no iterations."""
    loads = make_trace(samples=4, sources=8, experts=16).loads
    np.savez(tmp_path / "loads.npz", loads=loads.astype(np.float32))
    again = read_loads(tmp_path / "loads.npz")
    assert again.loads.dtype == np.int64 and again.iterations.tolist() == [0, 1, 2, 3]
    names = ["fastermoe_after_gate", "pro_prophet", "balanced"]
    cluster = f"--cluster={ROOT / 'docs/bench/cluster_lab.json'}"
    done = run_replay(tmp_path, cluster, f"--planners={','.join(names)}")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["cluster"] == "calibrated" and list(answer["planners"]) == names
    for summary in answer["planners"].values():
        assert summary["layer_seconds"] > 0 and summary["original_seconds_per_layer"] is not None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--nodes=2", "--planners=best"), "planner 'best' is unknown; use none, balanced, eplb, fastermoe"),
        (("--nodes=4", "--planners=pro_prophet", "--transfer=by_node"), "there is one device on a node"),
        (("--nodes=2", "--lag=99"), "lag (99) leaves none of the trace's 12 samples"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(tmp_path, flags, message):
    per_node = 4 // int(flags[0][-1])
    done = run_replay(tmp_path, f"--devices_per_node={per_node}", *flags)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def simulate_one(name, trace, lag=1, cost=COST, **fields):
    start = Placement.even(trace.loads.shape[1], trace.loads.shape[3], trace.loads.shape[2], 2)
    return simulate.simulate(name, trace, PlannerConfig(bounded=False, **fields), start, cost, lag, 1)


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
    ahead, sees = (simulate_one(name, trace, residual=False) for name in ("fastermoe", "fastermoe_after_gate"))
    assert ahead.sample.tolist() == [1, 2, 3, 4, 5]
    late = simulate_one("fastermoe", trace, lag=2, residual=False)  # two samples back the same expert was hot
    assert [report.summarize(one, one, COST)["max_over_mean"] for one in (ahead, sees, late)] == [4, 1, 1]


def test_what_transfers_send_by_hand():
    trace = hot_trace()
    none, shadow = simulate_one("none", trace), simulate_one("topk_all", trace, top_k=1)
    # plain EP: expert 0 has all 160 tokens: H = (160, 0, 0, 0), max/mean 4
    plain, summary = report.summarize(none, none, COST), report.summarize(shadow, none, COST)
    assert (plain["max_over_mean"], plain["speedup_over_ep"], plain["sent_experts"]) == (4.0, 1.0, 0)
    # one expert of 8 replicated on 3 devices: lambda 1/8, 2 x 3 x 65,536 bytes each step; H even: no finite RB
    assert (summary["max_over_mean"], summary["lambda"], summary["replicas_per_layer"]) == (1.0, 0.125, 3.0)
    assert summary["bytes_moved"] == 6 * 65536 and summary["rb"] > 1e6
    # 2 x 2 devices; expert 0 (a quarter of topk's two) goes to all others: X = 1, m = 1, Cp = 1. In force: one offer
    # more where homes allow it (X = 2) and mu = 2 slots: (2 + 2) 3/4, half of a device's 4 abroad
    assert (summary["sent_experts"], summary["sent_experts_across"]) == (4 * 3 / 4, 4 * 2 / 4)
    assert (summary["sent_experts_least"], summary["sent_experts_across_least"]) == (2 * 3 / 4, 2 * 2 / 4)
    assert (summary["received_experts"], summary["hiding"], summary["transfer_form"]) == (1, "none", "flat")
    # by node: (2 + 2) 1/2 inside, one more crossing than needed: (2 - 1) 2 / 2 across
    assert (summary["sent_experts_by_node"], summary["sent_experts_across_by_node"]) == (3, 1)
    # the shape in force is paid: 4 3/4 experts of 65,536 bytes over 3 GB/s there and back, plus H = 40 tokens' 12 M F
    paid = 2 * 3 * 65536 / 3e9
    assert summary["place_seconds"] + summary["reduce_seconds"] == pytest.approx(paid, rel=1e-5)
    assert summary["layer_seconds"] == pytest.approx(paid + 40 * 12 * 64 * 128 / 3e13, rel=1e-4)
    # the search took seconds of this host, which are never added to those of modelled devices
    slow = report.summarize(dataclasses.replace(shadow, search=shadow.search + 3600), none, COST)
    assert slow["search_seconds"] > 1000 > summary["search_seconds"]
    assert slow["layer_seconds"] == summary["layer_seconds"]


def test_roofline_counts_what_a_layer_waits_for():
    """H = 40 tokens on every device, no exchange: where attention hides the transfers the experts never wait."""
    cost = dataclasses.replace(COST, attention_seconds=1.0)
    shown = simulate_one("topk_all", hot_trace(), cost=cost, top_k=1)
    work, moving = 40 * 12 * 64 * 128 / 3e13, 2 * 3 * 65536 / 3e9
    ratio, reached = report.roofline(shown, cost)
    assert (ratio, reached) == pytest.approx((work / moving, 3e13 * work / (work + moving)))
    assert report.roofline(dataclasses.replace(shown, hiding="hecate"), cost) == pytest.approx((ratio, 3e13))


def test_every_system_hides_as_its_own_schedule_does():
    trace, cost = make_trace(samples=4), dataclasses.replace(COST, attention_seconds=1e-3)
    hides = {"hecate": "hecate", "pro_prophet": "pro_prophet", "fastermoe": "none", "balanced": "none"}
    assert {name: simulate_one(name, trace, cost=cost).hiding for name in hides} == hides
    assert simulate_one("hecate", trace, scheduler=False).hiding == "none"


def test_original_accounting_moves_state_for_standing_replicas():
    trace = make_trace()
    base = simulate_one("none", trace)
    flex, shadow = (report.summarize(simulate_one(name, trace), base, COST) for name in ("flexmoe", "fastermoe"))
    assert flex["replicas_per_layer"] > 0 and flex["original_optimizer_bytes_per_device"] > 0
    assert shadow["original_optimizer_bytes_per_device"] == 0
    assert shadow["original_bytes_per_layer"] == pytest.approx(shadow["bytes_moved"] / 2, rel=1e-4)  # two layers a step


def test_absent_figures_leave_seconds_empty_but_balance_known():
    trace, bare = make_trace(), Cost(cluster=Cluster(name="bare", nodes=2, devices_per_node=2), **SIZES)
    none, eplb = (simulate_one(name, trace, cost=bare) for name in ("none", "eplb"))
    summary = report.summarize(eplb, none, bare)
    assert summary["layer_seconds"] is None and summary["original_seconds_per_layer"] is None
    assert 1 <= summary["max_over_mean"] < report.summarize(none, none, bare)["max_over_mean"]
    assert report.roofline(none, bare) is None


def test_ablations_run_the_papers_tokens(tmp_path):
    """16,384 tokens of an iteration on 16 devices, and Hecate's sequences of 2,048, whatever the trace has."""
    save_trace(tmp_path / "loads.npz", make_trace(samples=2))
    code = f"""
from absl import flags
import ablations
from moe_jax.observe import read_loads
flags.FLAGS(["ablations", "--trace=x", "--devices_per_node=2"])
for system in ("pro_prophet", "hecate"):
    trace, _, _ = ablations.setting(read_loads({str(tmp_path / "loads.npz")!r}), system)
    print(trace.loads.sum(axis=(2, 3)).mean() / 4 / 2)
"""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts/bench'}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert [float(line) for line in done.stdout.split()] == pytest.approx([16384 / 16, 2048], rel=0.01)


def test_replay_imports_neither_jax_nor_heavy_packages():
    code = "import sys, moe_jax.analysis.simulate, moe_jax.analysis.replay_report, moe_jax.replay; "
    code += "print([m for m in ('jax', 'scipy', 'matplotlib', 'gin') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
