"""The search finds what is planted, programs hand one state on, and what the command writes trains to the same loss."""

import types

import jax
import pytest
from support.commands import run_command_here
from support.tiny_run import bindings_of, config_of

from moe_jax.analysis import tuning
from moe_jax.config.gin_files import parse_run_config
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.training.stepper import build_stepper

REMAT, STACK, ROWS, LAYERS = "ModelConfig.remat", "ModelConfig.stack", "MoEConfig.bucket_slack", "ModelConfig.layers"
CANDIDATES = [
    {ROWS: -1.0}, {LAYERS: 3}, {LAYERS: 5}, {STACK: "unrolled"}, {REMAT: "dots"}, {REMAT: "block"}, {ROWS: 1.5},
    {ROWS: 2.0}, {REMAT: "none"},
]  # fmt: skip
CLUSTER = "PlannerConfig.cluster = 'configs/cluster/flat_3gbs_30tflops.gin'"


class FakeBench(tuning.Bench):
    """Devices on which recomputing saves 0.3 s, `unrolled` costs 0.1 s, and more rows save 0.005 s: no gain."""

    def __init__(self, monkeypatch):
        super().__init__(RunConfig(), ())
        self.asked, self.now = [], 0.0
        monkeypatch.setattr(tuning, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    def seconds_of(self, setting):
        saved = 0.3 * (setting.get(REMAT) == "block") + 0.1 * (setting.get(REMAT) == "dots")
        return 1.3 - saved + 0.1 * (setting.get(STACK) == "unrolled") - 0.005 * (setting.get(ROWS) == 2.0)

    def race(self, first, last):
        self.now += 10
        self.asked.append(tuning.text_of(last))
        if LAYERS in last:
            raise {3: UserError("the first loss is another"), 5: RuntimeError("it\nbroke")}[last[LAYERS]]
        ratio = self.seconds_of(last) / self.seconds_of(first)
        return self.seconds_of(last), ratio, ratio < 0.99


def test_search_finds_the_planted_and_what_fails_is_a_row(monkeypatch):
    bench, said = FakeBench(monkeypatch), []
    best, ratio = bench.search(CANDIDATES, 1e4, said.append)
    assert best == {REMAT: "block"} and ratio == pytest.approx(1.0 / 1.3)
    rows = {row[26:]: row.split()[:2] for row in "\n".join(said).splitlines()}
    assert rows["plain"] == ["1.3", "1.000"] and rows[f"{REMAT} = 'dots'"] == ["1.2", "0.923"]
    assert rows[f"{REMAT} = 'block'"] == ["1", "0.769"]  # beside 'dots', over plain
    assert rows[f"{LAYERS} = 3: UserError: the first loss is another"] == ["-", "-"]
    assert rows[f"{LAYERS} = 5: RuntimeError: it"] == ["-", "-"]
    assert any("must be above 0" in row for row in rows)  # and was not raced
    # what the run has already is not raced, nor is what came before
    assert bench.asked.count("plain") == 1 and not any(f"{ROWS} = 1.5" in text for text in bench.asked)
    assert bench.asked[-1] == f"{REMAT} = 'block'" and "none" not in "".join(bench.asked)


def test_programs_of_planners_share_one_state(tmp_path, monkeypatch):
    """A planner that moves homes hands the state on as it got it, and a candidate that fails leaves a search going."""
    monkeypatch.setattr(tuning, "SECONDS", 0.05)
    bench = tuning.Bench(config_of(tmp_path, "ModelConfig.layers = 1", CLUSTER), jax.devices()[:2])
    planned = {"PlannerConfig.name": "smartmoe"}
    assert bench.race({}, planned)[0] > 0
    plain, stepper = bench.steppers.values()
    start = {name: own.start for name, own in stepper.engine.plans.items()}
    assert stepper.engine.frozen and stepper.engine.plan_id
    assert bench.newest is stepper and plain.state is None and int(stepper.state["step"]) == stepper.step
    bench._run(plain)
    assert stepper.state is None and not any(own.moves(start[name]) for name, own in stepper.engine.stored.items())
    assert int(plain.state["step"]) == plain.step > tuning.WARM_UP
    with pytest.raises(UserError, match=r"the first loss is .*, not .* \+- 0.0001"):
        bench.race(planned, {"train.seed": 1})
    with pytest.raises(UserError, match="needs a GPU of compute capability"):
        bench.race(planned, {"MoEConfig.grouped_matmul": "hopper"})
    assert bench.race(planned, {"ModelConfig.stack": "unrolled"})[0] > 0 and plain not in bench.steppers.values()


@pytest.mark.slow
def test_the_command_finds_a_slow_setting_and_its_file_trains(tmp_path, monkeypatch, capsys):
    slow = ("train.batch_size = 64", "train.grad_accum_steps = 8", "ModelConfig.layers = 1")
    (tmp_path / "run.gin").write_text("\n".join(bindings_of(tmp_path, *slow)))
    monkeypatch.setattr(tuning, "SECONDS", 0.2)
    monkeypatch.setattr(tuning, "WARM_UP", 5)
    out = tmp_path / "tuned.gin"
    run_command_here(
        "tune", f"--gin_file={tmp_path / 'run.gin'}", f"--out={out}", "--setting=train.grad_accum_steps = 1"
    )
    said = capsys.readouterr().out
    assert said.startswith("seconds a step  to plain  setting\n") and f"{out} written" in said
    gain, command, *_ = out.read_text().splitlines()
    assert gain.startswith("# train.grad_accum_steps = 1: 0.") and "python -m moe_jax.tune --gin_file=" in command
    tuned = parse_run_config([str(out)])[0]
    assert tuned.train.grad_accum_steps == 1 and tuned.train.batch_size == 64
    losses = [build_stepper(config, jax.devices()).run(1)[0]["loss"] for config in (tuned, config_of(tmp_path, *slow))]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)


def test_mistakes_of_the_command_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "run.gin").write_text("\n".join(bindings_of(tmp_path)))
    run = f"--gin_file={tmp_path / 'run.gin'}"
    for arguments, words in (
        (["--gin_file=nowhere.gin"], r"gin file 'nowhere.gin' does not exist \(--gin_file\)"),
        ([run, "--out=/nowhere/a.gin"], r"--out=/nowhere/a.gin lies in a folder that does not exist; make /nowhere"),
        ([run, "--setting=ModelConfig.stack = 3"], r"ModelConfig.stack"),
    ):
        with pytest.raises(UserError, match=words) as error:
            run_command_here("tune", *arguments)
        assert "\n" not in str(error.value)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(UserError, match="moe_jax.tune runs in one process, and the environment names several"):
        run_command_here("tune", run)
