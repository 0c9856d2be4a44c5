import os

import pytest

from moe_jax.errors import UserError
from moe_jax.observe import RunFolder


def test_run_folder_creates_parents_and_names_files(tmp_path):
    run = RunFolder(tmp_path / "runs" / "try")
    assert os.listdir(run) == []
    names = {
        getattr(run, name).name
        for name in (
            "config operative_config environment metrics evaluations loads_parts loads plots report checkpoints"
            " tensorboard profile"
        ).split()
    }
    assert names == {
        *("config.gin", "operative_config.gin", "environment.json", "metrics.jsonl", "evaluations.jsonl", "loads"),
        *("loads.npz", "plots", "report.html", "checkpoints", "tensorboard", "profile"),
    }


def test_an_unused_run_folder_goes_with_what_was_made_for_it_alone(tmp_path):
    folder, found = RunFolder(tmp_path / "runs" / "one"), RunFolder(tmp_path / "runs")
    folder.write_config("train.steps = 3")
    folder.remove_if_unused()
    assert folder.config.exists()
    folder.config.unlink()
    found.remove_if_unused()
    assert folder.path.is_dir()
    folder.remove_if_unused()
    assert not (tmp_path / "runs").exists() and tmp_path.is_dir()


def test_run_folder_that_is_a_file_is_a_user_error(tmp_path):
    (tmp_path / "try").write_text("")
    with pytest.raises(UserError, match="a file stands where a folder is needed"):
        RunFolder(tmp_path / "try")
    with pytest.raises(UserError, match="a file stands where a folder is needed"):
        RunFolder(tmp_path / "try" / "below")


def test_run_folder_without_create_must_exist(tmp_path):
    with pytest.raises(UserError, match="does not exist; give the --workdir of a run"):
        RunFolder(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_held_config_returns_only_another_text(tmp_path):
    run = RunFolder(tmp_path)
    assert run.held_config("train.steps = 1") is None
    run.write_config("train.steps = 1")
    assert run.config.read_text() == "train.steps = 1\n"
    assert run.held_config("train.steps = 1  \n\n") is None
    assert run.held_config("train.steps = 2") == "train.steps = 1\n"


def test_environment_round_trip_and_damage(tmp_path):
    run = RunFolder(tmp_path)
    assert run.read_environment() == {}
    run.write_environment({"mesh": {"expert": 8}})
    assert run.read_environment() == {"mesh": {"expert": 8}}
    run.environment.write_text("[1]")
    with pytest.raises(UserError, match="holds a list"):
        run.read_environment()
    run.environment.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        run.read_environment()
