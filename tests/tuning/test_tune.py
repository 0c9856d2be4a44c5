"""The search finds what is planted, its journal serves and survives, and what it writes trains to the same loss."""

import json
import types

import jax
import numpy as np
import pytest
from support.commands import run_command_here
from support.tiny_run import bindings_of, config_of

from moe_jax.analysis import tuning
from moe_jax.config.gin_files import parse_run_config
from moe_jax.config.run_config import with_bindings
from moe_jax.errors import UserError
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.replan.engine import homes_differ
from moe_jax.training.stepper import build_stepper

PLAIN = {"schedule": "a", "remat": "block", "stack": "scan", "rows": 1.5}
CANDIDATES = {
    "schedule": ["a", "refused", "full", "broken", "killer", "noisy"],
    "remat": ["block", "none"],
    "stack": ["scan", "unrolled"],
    "rows": [1.5, 2.0],
}
CLUSTER = "PlannerConfig.cluster = 'configs/cluster/flat_3gbs_30tflops.gin'"
PLAIN_32 = (  # rows leave their nodes
    "ModelConfig.overlap = 'none'", "MeshConfig.devices_per_node = 8", "MeshConfig.expert = 32", "MeshConfig.data = 1",
)  # fmt: skip
EACH = 10.0  # seconds of a question on the fake clock


class FakeBench:
    """Devices on which remat costs 0.3 s, and `unrolled` gains 0.1 s, but only with more rows, which gain nothing."""

    def __init__(self, dies_at=None):
        self.asked, self.now, self.dies_at = [], 0.0, dies_at

    def clock(self):
        return self.now

    def seconds_of(self, setting):
        more = 0.1 if setting["stack"] == "unrolled" and setting["rows"] == 1.5 else -0.1
        more *= setting["stack"] == "unrolled"
        return 1.0 + 0.3 * (setting["remat"] == "block") + more - 0.02 * (setting["rows"] == 2.0)

    def time(self, settings, loss=None):
        self.now += EACH
        *_, last = settings
        self.asked.append(last)
        errors = {"refused": UserError("no"), "full": MemoryError(), "broken": RuntimeError("it\nbroke")}
        schedule = settings[last]["schedule"]
        if self.dies_at is not None and self.dies_at in last:
            raise KeyboardInterrupt
        if schedule in errors:
            raise errors[schedule]
        seconds = {text: self.seconds_of(setting) for text, setting in settings.items()}
        ratio = seconds[last] / next(iter(seconds.values())) - 0.005 * (schedule == "noisy")
        answer = {"seconds": seconds, "ratio": ratio, "wins": ratio < 0.99, "rounds": 5, "loss": 4.0}
        return {"status": "timed", **answer}


def found_by(bench, path, budget=1e4, key="here", **options):
    said = []
    journal = tuning.Journal(path, {"key": key}, said.append, bench.clock)
    found = tuning.search(PLAIN, options.get("candidates", CANDIDATES), bench, journal, budget, said.append)
    return found, {text: (ratio, note) for text, _, ratio, note in found["rows"]}, said


BEST = "remat = 'none', stack = 'unrolled', rows = 2.0"


def test_search_finds_the_planted_and_what_fails_is_a_row(tmp_path):
    bench = FakeBench()
    found, rows, _ = found_by(bench, tmp_path / "j")
    # `unrolled` is slower at first; once there are more rows it is tried again, and wins
    assert tuning.text_of(found["best"], PLAIN) == BEST and rows[BEST][0] == pytest.approx(0.88 / 1.3)
    assert found["answer"]["ratio"] == pytest.approx(0.88 / 1.3) and bench.asked[-1] == BEST
    assert rows["schedule = 'refused'"] == (None, "refused: no")
    assert rows["schedule = 'full'"] == (None, "no memory: MemoryError")
    assert rows["schedule = 'broken'"] == (None, "fails: it")
    assert len(set(bench.asked[:-1])) == len(bench.asked) - 1  # nothing is timed twice, but in the last race


def test_a_second_search_is_served_and_an_interrupted_one_goes_on(tmp_path):
    whole, _, _ = found_by(FakeBench(), tmp_path / "whole")
    interrupted = FakeBench(dies_at="unrolled")
    with pytest.raises(KeyboardInterrupt):
        found_by(interrupted, tmp_path / "j")
    again = FakeBench()
    found, rows, _ = found_by(again, tmp_path / "j")
    assert found["rows"] == whole["rows"] and again.asked[0] == interrupted.asked[-1]
    assert not set(again.asked) & set(interrupted.asked[:-1])
    served = FakeBench()
    assert found_by(served, tmp_path / "j")[0] == found and not served.asked


def test_a_candidate_that_ended_the_process_is_not_tried_again(tmp_path):
    found_by(FakeBench(), tmp_path / "whole")
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if "'killer'" in line)
    (tmp_path / "j").write_text("".join(lines[: at + 1]) + '{"key": 3, "ques')
    bench = FakeBench()
    _, rows, said = found_by(bench, tmp_path / "j")
    assert rows["schedule = 'killer'"] == (None, "crashed: the process ended while it ran, at an earlier start")
    assert not any("killer" in text for text in bench.asked) and "broken" not in bench.asked[0]
    assert f"{tmp_path / 'j'}: 1 lines of another machine, version, commit or config, or damaged, are left out" in said
    _, after_half = (tmp_path / "j").read_text().split('"ques')
    begun = next(line for line in after_half.splitlines()[1:] if line)  # on a line of its own, else a crash is not seen
    assert json.loads(begun)[2] is None
    other = FakeBench()
    _, _, said = found_by(other, tmp_path / "j", key="another machine")
    assert other.asked[0] == "plain" and "of another machine, version, commit or config" in said[0]


def test_the_budget(tmp_path):
    with pytest.raises(UserError, match=r"--budget_seconds \(9\) is too short: plain alone took 10 s"):
        found_by(FakeBench(), tmp_path / "a", budget=9)
    bench = FakeBench()
    found, rows, said = found_by(bench, tmp_path / "b", budget=85)
    assert "remat = 'none'" in rows and "the budget ends here; a larger --budget_seconds goes on" in said
    assert bench.now <= 85 and bench.asked[-1] == "remat = 'none'" and found["best"]["remat"] == "none"
    goes_on = FakeBench()
    assert tuning.text_of(found_by(goes_on, tmp_path / "b")[0]["best"], PLAIN) == BEST and "plain" not in goes_on.asked
    only = {"schedule": CANDIDATES["schedule"]}
    assert found_by(FakeBench(), tmp_path / "c", candidates=only)[0]["best"] == PLAIN  # 0.5% is no win


def test_compare_knows_its_noise():
    assert tuning.compare([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == (0.5, 0.0)
    noise = np.random.default_rng(0).uniform(0.9, 1.1, (2, 200, 25))
    found = np.array([tuning.compare(list(first), list(last)) for first, last in noise.swapaxes(0, 1)])
    assert np.mean(found[:, 1]) == pytest.approx(np.std(found[:, 0]), rel=0.3)


def test_candidates_of_a_mesh_a_router_and_a_device(tmp_path):
    def knobs(*changes, mesh=None, **device):
        config = config_of(tmp_path, "train.batch_size = 32", *changes)
        roles = build_mesh(mesh or MeshConfig(expert=8, devices_per_node=8), 8)
        found = tuning.find_candidates(config, roles, types.SimpleNamespace(platform="cpu", **device))
        return found

    plain = knobs()
    # s1 and s2 are the first here
    assert plain["MoEConfig.schedule"] == ["deepspeed", "deduplicated", "dp", "pairwise", "ring"]
    assert plain["MoEConfig.grouped_matmul"] == ["auto", "blocked", "ragged"] and "MoEConfig.transport" not in plain
    assert plain["train.grad_accum_steps"] == [1, 2, 4] and "ModelConfig.prefetch" not in plain
    wide = knobs(mesh=MeshConfig(expert=4, expert_shard=2, model=2, devices_per_node=4))
    assert {"s1", "s2", "deepspeed"} <= set(wide["MoEConfig.schedule"])
    assert wide["MoEConfig.transport"] == ["all_to_all", "two_level", "coordinated"]
    assert "ModelConfig.prefetch" in knobs("PlannerConfig.name = 'hecate'")
    # tokens compete for places: what they compete with stays
    competing = knobs("MoEConfig.router = 'base'", "MoEConfig.top_k = 1")
    assert not {"ModelConfig.overlap", "train.grad_accum_steps"} & set(competing)
    hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    found = tuning.find_candidates(config_of(tmp_path), build_mesh(MeshConfig(expert=8), 8), hopper)
    assert "hopper" in found["MoEConfig.grouped_matmul"]
    assert "train.guide_scheduler" in found


def test_what_has_a_price_comes_first(monkeypatch):
    config = parse_run_config(["configs/run/gpt_moe_s_h200.gin"], PLAIN_32)[0]
    monkeypatch.setattr(tuning, "build_mesh", lambda mesh, devices, experts: build_mesh(mesh, len(devices), experts))
    known, unknown = (
        tuning.prepare(config, [types.SimpleNamespace(platform="gpu", device_kind=kind)] * 32)[1:]
        for kind in ("NVIDIA H200", "NVIDIA B9")  # a GPU whose prices are not known is tuned all the same
    )
    assert known[1]["ModelConfig.overlap"] > 0 and next(iter(known[0])) == "ModelConfig.overlap"
    assert unknown[1] == {} and next(iter(unknown[0])) == "MoEConfig.grouped_matmul"


def test_recorded_loads_choose_a_planner(tmp_path):
    config, roles = config_of(tmp_path, CLUSTER), build_mesh(MeshConfig(expert=4), 4)
    loads = np.ones((6, 2, 4, 8), int)
    np.savez(tmp_path / "even.npz", loads=loads)
    loads[..., 0] = 20000
    np.savez(tmp_path / "hot.npz", loads=loads, iterations=10 * np.arange(6))  # whose samples are ten steps apart
    even, hot = (tuning.planners_by_trace(config, roles, str(tmp_path / f"{name}.npz")) for name in ("even", "hot"))
    assert even == ["none"] == hot[:1] and len(hot) == 2
    with pytest.raises(UserError, match=r"has loads \[L, S, E\] = \[2, 4, 8\]; name a trace of this model and mesh"):
        other = with_bindings(config, {"ModelConfig.layers": 3})
        tuning.planners_by_trace(other, roles, str(tmp_path / "hot.npz"))


def test_programs_of_planners_and_memory_share_one_state(tmp_path):
    """A planner that moves homes hands the state on as it got it; what does not fit memory never takes it."""
    bench = tuning.Bench(config_of(tmp_path, "ModelConfig.layers = 1", CLUSTER), jax.devices()[:2])
    bench.least_seconds = 0.05
    plain = {"PlannerConfig.name": "none"}
    rivals = {"plain": plain, "moves": {**plain, "PlannerConfig.name": "smartmoe"}}
    alone = bench.time({"plain": plain})
    answer = bench.time(rivals, alone["loss"])
    assert answer["status"] == "timed" and answer["loss"] == alone["loss"]
    engine = bench.steppers["moves"].engine
    start = {name: own.start for name, own in engine.plans.items()}
    assert engine.frozen and engine.plan_id and not homes_differ(engine.stored, start)
    assert int(bench.warm[0]["step"]) == bench.warm[1] > tuning.WARM_UP
    bench.memory = 1000
    with pytest.raises(MemoryError, match=r"GB of a device, by the compiler, which has 1e-06 GB"):
        bench.time({"moves": rivals["moves"], "plain again": plain}, alone["loss"])
    bench.memory = 10**12
    with pytest.raises(UserError, match=r"the first loss is .*, not .* \+- 0.0001"):
        bench.time({"moves": rivals["moves"], "other": {**plain, "train.seed": 1}}, alone["loss"])


def test_the_command_finds_a_slow_setting_and_its_file_trains(tmp_path, monkeypatch, capsys):
    slow = ("train.batch_size = 64", "train.grad_accum_steps = 8", "ModelConfig.layers = 1")
    (tmp_path / "run.gin").write_text("\n".join(bindings_of(tmp_path, *slow)))
    flags = f"--gin_file={tmp_path / 'run.gin'}", f"--out={tmp_path / 'tuned.gin'}"
    monkeypatch.setattr(tuning, "find_candidates", lambda *_: {"train.grad_accum_steps": [8, 1]})
    monkeypatch.setattr(tuning.Bench, "least_seconds", 0.05)
    run_command_here("tune", *flags)
    said = capsys.readouterr().out
    assert "seconds a step  to plain  setting" in said and "3 of 3 measurements are new" in said
    text = (tmp_path / "tuned.gin").read_text()
    assert "# Bound by the run file, and changed here: train.grad_accum_steps = 8" in text
    answers = [json.loads(line)[2] for line in (tmp_path / "tuned.journal.jsonl").read_text().split("\n\n")]
    assert answers[-1]["ratio"] < 0.9
    tuned = parse_run_config([str(tmp_path / "tuned.gin")])[0]
    assert tuned.train.grad_accum_steps == 1
    (first,) = build_stepper(tuned, jax.devices()).run(1)
    assert first["loss"] == pytest.approx(answers[-1]["loss"], rel=2e-5)
    monkeypatch.setattr(tuning.Bench, "time", None)  # a second command is served
    run_command_here("tune", *flags)
    assert "0 of 3 measurements are new" in capsys.readouterr().out and (tmp_path / "tuned.gin").read_text() == text


def test_mistakes_of_the_command_are_one_line(tmp_path, monkeypatch):
    def no_devices():
        raise RuntimeError("no\nGPU")

    (tmp_path / "run.gin").write_text("\n".join(bindings_of(tmp_path)))
    run = f"--gin_file={tmp_path / 'run.gin'}"
    with pytest.raises(UserError, match=r"gin file 'nowhere.gin' does not exist \(--gin_file\)"):
        run_command_here("tune", "--gin_file=nowhere.gin")
    with pytest.raises(
        UserError, match=r"--out=/nowhere/a.gin lies in a folder that does not exist; make /nowhere first"
    ):
        run_command_here("tune", run, "--out=/nowhere/a.gin")
    monkeypatch.setattr(jax, "devices", no_devices)
    with pytest.raises(UserError, match=r"jax finds no devices \(no GPU\); --host_devices=8 takes the CPU"):
        run_command_here("tune", run)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(UserError, match="moe_jax.tune runs in one process, and the environment names several"):
        run_command_here("tune", run)
