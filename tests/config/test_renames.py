"""Old names: a user's file gets one line with the new one, what a run wrote is translated."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from moe_jax import renames
from moe_jax.cluster.read import read_cluster
from moe_jax.config import bound_in, parse_run_config
from moe_jax.config.run_config import CONFIG_CLASSES, RunConfig, check_resumable, config_text
from moe_jax.errors import UserError
from moe_jax.renames import BINDINGS, REPLACED, VALUES

TODAY = {f"{name}.{field.name}" for name, cls in CONFIG_CLASSES.items() for field in dataclasses.fields(cls)}


def test_the_table_leads_from_names_that_are_gone_to_names_of_today():
    assert set(BINDINGS.values()) <= TODAY and set(VALUES) <= TODAY
    assert not set(BINDINGS) & TODAY


@pytest.mark.parametrize("old", BINDINGS)
def test_an_old_binding_is_refused_with_the_new_one(old, tmp_path):
    (tmp_path / "mine.gin").write_text(f"# by hand\n{old} = 1\n")
    with pytest.raises(UserError) as error:
        parse_run_config([str(tmp_path / "mine.gin")], ())
    assert f"{old} is called {BINDINGS[old]} now" in str(error.value) and "mine.gin:2" in str(error.value)
    with pytest.raises(UserError, match="is called"):
        parse_run_config((), [f"{old} = 1"])


def test_old_bindings_are_refused_all_in_one_line(tmp_path):
    """Wherever they stand: an included file, a scope, beside the new name, behind a macro, on the command line."""
    (tmp_path / "mine.gin").write_text(
        "include 'part.gin'\nk = 2\na/PlannerConfig.n = 1\nPlannerConfig.skipped_devices = 3\n"
    )
    (tmp_path / "part.gin").write_text("PlannerConfig.guest_slots = %k\n")
    with pytest.raises(UserError) as error:
        parse_run_config([str(tmp_path / "mine.gin")], ["train.accumulate = 4"], [str(tmp_path)])
    assert str(error.value) == (
        "PlannerConfig.guest_slots is called PlannerConfig.replica_slots now (part.gin:1), "
        f"PlannerConfig.n is called PlannerConfig.skipped_devices now ({tmp_path}/mine.gin:3), "
        "train.accumulate is called train.grad_accum_steps now (--gin_bindings); write "
        "PlannerConfig.replica_slots = %k, PlannerConfig.skipped_devices = 1, train.grad_accum_steps = 4"
    )


@pytest.mark.parametrize(
    ("binding", "today"),
    [
        ("moe_jax.PlannerConfig.n = 1", "PlannerConfig.skipped_devices"),
        ("TrainConfig.accumulate = 2", "train.grad_accum_steps"),
        ("ModelConfig.guest_slots = 1", "PlannerConfig.replica_slots"),
        ("guest_slots = 1", "PlannerConfig.replica_slots"),
    ],
)
def test_a_hint_never_leads_to_an_old_binding(binding, today):
    with pytest.raises(UserError, match=rf"did you mean {today}\?$"):
        parse_run_config((), [binding])


def test_both_configs_of_a_run_folder_are_read_and_a_users_file_is_not(tmp_path):
    """gin's operative config keeps macros, so a value is old or not only once it is resolved."""
    text = "t = 'pairwise'\nMoEConfig.transport = %t\nPlannerConfig.n = 3\ntrain.accumulate = \\\n    2\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "environment.json").write_text("{}")
    (tmp_path / "mine.gin").write_text(f"include '{tmp_path}/run/config.gin'\ntrain.seed = 5\n")
    for name in ("config.gin", "operative_config.gin"):
        (tmp_path / "run" / name).write_text(text)
        run, stored, operative = parse_run_config([str(tmp_path / "run" / name)], ())
        assert (run.moe.transport, run.planner.skipped_devices, run.train.grad_accum_steps) == ("ppermute", 3, 2)
        for today in ("MoEConfig.transport = 'ppermute'", "PlannerConfig.skipped_devices = 3"):
            assert today in stored and today in operative
    assert parse_run_config([str(tmp_path / "mine.gin")], ())[0].moe.transport == "ppermute"
    (tmp_path / "run" / "copy.gin").write_text(text)
    with pytest.raises(UserError, match="is called"):
        parse_run_config([str(tmp_path / "run" / "copy.gin")], ())


def test_a_config_of_a_run_keeps_its_marks(tmp_path):
    """Every value stands in config.gin, so a command that names it sets those alone that it marks or that differ."""
    (tmp_path / "environment.json").write_text("{}")
    _, text, _ = parse_run_config((), ["train.steps = 100", "train.seed = 3"])  # 100 is the default, and was set
    (tmp_path / "config.gin").write_text(text)
    file = [str(tmp_path / "config.gin")]
    assert parse_run_config(file, ())[1] == text
    assert bound_in(parse_run_config(file, ["MoEConfig.top_k = 2"])[1]) == bound_in(text) | {"MoEConfig.top_k"}
    (tmp_path / "config.gin").write_text(text.replace("  # set", ""))  # as older versions wrote it
    assert bound_in(parse_run_config(file, ())[1]) == {"train.seed"}


OLD_VALUES = [(binding, old, new) for binding, values in VALUES.items() for old, new in values.items()]


@pytest.mark.parametrize(("binding", "old", "new"), OLD_VALUES)
def test_an_old_value_is_refused_with_the_new_one(binding, old, new):
    told = (
        f"{old!r}.*replicas travel in slices; use {new!r}" if binding in REPLACED else f"{old!r} is called {new!r} now"
    )
    with pytest.raises(UserError, match=told):
        parse_run_config((), [f"{binding} = {old!r}"])
    parse_run_config((), [f"{binding} = {new!r}"])


def test_a_stored_config_with_old_names_is_no_difference():
    text = config_text(RunConfig(), bound=["PlannerConfig.replica_slots"])
    old = text
    for before, after in BINDINGS.items():
        assert f"{after} = " in old
        old = old.replace(f"{after} = ", f"{before} = ")
    assert "PlannerConfig.guest_slots = 4  # set" in old
    assert check_resumable(old, text) == [] and renames.config_text_of_today(old) == text
    moved = old.replace("MoEConfig.transport = 'all_to_all'", "MoEConfig.transport = 'pairwise'")
    assert check_resumable(moved, text.replace("'all_to_all'", "'ppermute'")) == []
    assert (
        check_resumable(old.replace("PlannerConfig.transfer = 'auto'", "PlannerConfig.transfer = 'gather'"), text) == []
    )


def test_a_record_of_metrics_has_the_keys_of_today():
    assert renames.metrics_of_today({"step": 3, "guests": 5}) == {"step": 3, "replicas": 5}
    assert renames.metrics_of_today({"guests": 5, "replicas": 6}) == {"replicas": 6}


def test_the_plan_of_a_checkpoint_has_the_keys_of_today():
    old = {"placement": {"home": [[0]], "copies": [[[1]]]}, "pending": None, "skeleton": {"guest_slots": 2}}
    assert renames.plan_of_today(old) == {
        "placement": {"home": [[0]], "replicas": [[[1]]]}, "pending": None, "shape": {"replica_slots": 2}
    }  # fmt: skip


def test_a_calibration_file_of_before_has_the_fits_of_today(tmp_path):
    fit = {"alpha": 1e-5, "beta": 1e-9}
    (tmp_path / "mine.json").write_text(json.dumps({"cluster": {"name": "mine", "fits": {"pairwise:8": fit}}}))
    assert renames.fit_of_today("all_to_all:2x4") == "all_to_all:2x4"
    assert [name for name, _ in read_cluster(tmp_path / "mine.json").fits] == ["ppermute:8"]
    (tmp_path / "mine.gin").write_text(f"Cluster.fits = {{'pairwise:8': {fit}}}\n")
    assert [name for name, _ in read_cluster(tmp_path / "mine.gin").fits] == ["ppermute:8"]


def test_flags_of_replay_keep_their_old_spellings(tmp_path):
    loads = np.random.default_rng(0).integers(1, 99, size=(4, 1, 4, 8)) * np.array([16, 8, 4, 2, 1, 1, 1, 1])
    np.savez(tmp_path / "t.npz", loads=loads)
    (tmp_path / "c.gin").write_text("Cluster.flat = True\nCluster.intra_bandwidth = 3e9\nCluster.flops = 3e13\n")
    command = ["--trace=t.npz", "--cluster=c.gin", "--nodes=1", "--devices_per_node=4", "--planners=pro_prophet"]
    root = pathlib.Path(__file__).parents[2]

    def answer(*flags):
        done = subprocess.run(
            [sys.executable, "-m", "moe_jax.replay", *command, *flags],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and not done.stderr, done.stderr
        figures = json.loads(done.stdout.splitlines()[-1])["planners"]["pro_prophet"]
        return {name: value for name, value in figures.items() if "search" not in name and "us_per" not in name}

    today = answer("--replica_slots=1", "--skipped_devices=1", "--balance_threshold=0.1")
    assert answer("--guest_slots=1", "--n=1", "--alpha=0.1") == today != answer()
