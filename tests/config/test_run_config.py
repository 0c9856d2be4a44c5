"""Config texts: canonical, comparable field by field, and the rule of what may change when a run goes on."""

import dataclasses

import pytest

from moe_jax.config.run_config import (
    ABSENT,
    CONFIG_CLASSES,
    MAY_DIFFER,
    RunConfig,
    check_resumable,
    config_differences,
    config_text,
    may_differ,
)
from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError

BASE = config_text(RunConfig())


def test_config_text_marks_what_was_set_and_compares_values_alone():
    run = RunConfig(train=TrainConfig(steps=7))
    marked = config_text(run, bound={"train.steps", "train.seed"})
    assert [line for line in marked.splitlines() if "#" in line] == ["train.seed = 0  # set", "train.steps = 7  # set"]
    assert config_differences(config_text(run), marked) == []
    assert config_differences(BASE, marked) == [("train.steps", "100", "7")]


def test_config_differences_ignores_how_a_number_is_written():
    assert config_differences("train.clip_norm = 1\n", "train.clip_norm = 1.0\n") == []
    assert config_differences("MoEConfig.renormalize = 1\n", "MoEConfig.renormalize = True\n") != []


def test_config_differences_across_versions():
    """A field that the old text lacks counts at its default; one that no config has any more is absent."""
    without = "".join(line + "\n" for line in BASE.splitlines() if not line.startswith("train.seed"))
    assert config_differences(without, BASE) == []
    changed = BASE.replace("train.seed = 0", "train.seed = 5")
    assert config_differences(without, changed) == [("train.seed", "0", "5")]
    assert config_differences(BASE + "MoEConfig.gone = 3\n", BASE) == [("MoEConfig.gone", "3", ABSENT)]


def test_check_resumable_lets_layout_and_cadence_change():
    text = BASE
    for old, new in (
        ("MeshConfig.data = 1", "MeshConfig.data = 4"),
        ("PlannerConfig.name = 'none'", "PlannerConfig.name = 'eplb'"),
        ("MoEConfig.schedule = 'deepspeed'", "MoEConfig.schedule = 's1'"),
        ("train.steps = 100", "train.steps = 200"),
        ("ModelConfig.remat = 'none'", "ModelConfig.remat = 'block'"),
    ):
        assert old in text
        text = text.replace(old, new)
    check_resumable(BASE, text)


def test_check_resumable_refuses_the_rest_and_names_all():
    changed = BASE.replace("MoEConfig.num_experts = 8", "MoEConfig.num_experts = 16").replace(
        "train.learning_rate = 0.003", "train.learning_rate = 0.1"
    )
    with pytest.raises(UserError) as caught:
        check_resumable(BASE, changed, "runs/try")
    message = str(caught.value)
    assert "MoEConfig.num_experts was 8 and is 16 now" in message
    assert "train.learning_rate was 0.003 and is 0.1 now" in message
    assert "runs/try" in message and "--init_from=runs/try" in message and "\n" not in message
    assert "(--gin_file=runs/try/config.gin does)" in message


def test_may_differ_names_real_bindings():
    bindings = [f"{name}.{field.name}" for name, cls in CONFIG_CLASSES.items() for field in dataclasses.fields(cls)]
    for pattern in MAY_DIFFER:
        assert pattern.endswith(".*") or pattern in bindings, pattern
    for binding in ("train.seed", "train.batch_size", "MoEConfig.top_k", "DataConfig.path"):
        assert not may_differ(binding)
