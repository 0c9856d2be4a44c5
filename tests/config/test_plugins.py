"""Planners, routers and schedules from a folder of somebody else: chosen by a flag, or refused in a line."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.quick_compiles import QUICK

ROOT = Path(__file__).parents[2]
FILES = {
    "__init__": "",
    "routers": """
import dataclasses
from moe_jax.errors import UserError
from moe_jax.moe.routers.contract import register
from moe_jax.moe.routers.topk import TopK

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine:
    factor: float = 1.0

    def __post_init__(self):
        if self.factor <= 0:
            raise UserError(f"Mine.factor ({self.factor}) must be positive")

@register("mine")
class MineRouter(TopK):
    options: Mine = Mine()

    def choose(self, x, params, inputs):
        choice, stats = super().choose(x, params, inputs)
        return dataclasses.replace(choice, weights=self.options.factor * choice.weights), stats
""",
    "planners": """
import dataclasses
from moe_jax.planning.balancer import Planner, register

@dataclasses.dataclass(frozen=True, kw_only=True)
class Still:
    patience: int = 3

@register("still")
class StillPlanner(Planner):
    options: Still = Still()
""",
    "schedules": """
import dataclasses
from moe_jax.moe.layer import ExpertParallel
from moe_jax.moe.schedule import register
from moe_jax.registry import options_in

@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    place: int = 0

@register("plain")
class Plain(ExpertParallel):
    options: Order = Order()

    def __init__(self, roles, sizes):
        super().__init__(roles, sizes)
        assert options_in(sizes.config, self.options).place == 7
""",
}
SMALL = ("ModelConfig.layers = 1", "ModelConfig.model_dim = 32", "ModelConfig.heads = 2", "ModelConfig.hidden_dim = 32",
         "ModelConfig.max_length = 32", "DataConfig.sequence_length = 32", "MoEConfig.num_experts = 4",
         "train.batch_size = 4", "train.steps = 2", "train.warmup_steps = 1")  # fmt: skip


@pytest.fixture
def started(tmp_path):
    """Return what starts the training command in a folder that holds the plugin `mine`, with other files of it."""

    def run(*words, bindings=(), module="moe_jax.train", **files):
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        for name, text in (FILES | files).items():
            (folder / f"{name}.py").write_text(text)
        given = ["--host_devices=2", *(f"--gin_bindings={binding}" for binding in (*SMALL, *bindings))]
        command = [sys.executable, "-m", module, *words, *(given if module == "moe_jax.train" else ())]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XLA_FLAGS": QUICK}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)

    return run


MINE = ("MoEConfig.router = 'mine'", "Mine.factor = 2.0", "MoEConfig.schedule = 'plain'",
        "Order.place = 7", "PlannerConfig.name = 'still'", "Still.patience = 4")  # fmt: skip


def test_a_run_trains_with_a_router_a_planner_and_a_schedule_of_a_plugin(started, tmp_path):
    (tmp_path / "text.txt").write_text("all the same " * 400)
    done = started("--plugin=mine", f"--workdir={tmp_path / 'run'}", bindings=(*MINE, "DataConfig.path = 'text.txt'"))
    assert done.returncode == 0 and "schedule plain, planner still" in done.stdout, done.stderr
    assert "Mine.factor = 2.0  # set" in (tmp_path / "run" / "config.gin").read_text()


WRONG = [
    (["--plugin=mine"], ["Mine.factor = 0.0", MINE[0]], {}, "Mine.factor (0.0) must be positive"),
    ([], [MINE[0]], {}, "MoEConfig.router ('mine') must be one of"),
    (["--plugin=none"], [], {}, "--plugin=none is no folder of Python files here"),
    (["--plugin=email"], [], {}, "--plugin=email has none of the files planners.py, routers.py"),
    (["--plugin=mine"], [], {"routers": "1 / 0"}, "routers.py raises ZeroDivisionError: division by zero; correct"),
    (
        ["--plugin=mine"],
        [],
        {"planners": FILES["planners"].replace("Still:", "Hecate:").replace("Still()", "Hecate()")},
        "options Hecate are registered twice",
    ),
    (["--plugin=mine"], [], {"__init__": "import nowhere"}, "--plugin=mine needs the package 'nowhere', which is"),
]


@pytest.mark.parametrize(
    ("words", "bindings", "files", "said"),
    [pytest.param(*wrong, marks=() if at % 4 == 0 else pytest.mark.slow) for at, wrong in enumerate(WRONG)],
)
def test_what_is_wrong_with_a_plugin_is_one_line(started, words, bindings, files, said):
    done = started("--dry_run", *words, bindings=bindings, **files)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    if words and not bindings:
        replayed = started(*words, module="moe_jax.replay", **files)
        assert (replayed.returncode, replayed.stderr) == (2, done.stderr)
