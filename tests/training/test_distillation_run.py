"""A student's run: learns from a teacher up to a step, goes on without it, resumes on either side, refuses another."""

import dataclasses
import gc
import shutil
import weakref

import jax
import numpy as np
import pytest
from support.tiny_run import arrays_of, assert_same_run, config_of, run_here

from moe_jax.errors import UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.observe.metrics_file import read_metrics
from moe_jax.storage.checkpoint import Checkpointer, HostData
from moe_jax.training.frozen_models import settle_teacher
from moe_jax.training.stepper import build_stepper

MESH = "MeshConfig.data = 4"
FLAT = ("train.learning_rate = 1e-3", "train.final_learning_rate = 1.0", "train.warmup_steps = 0")
STUDENT = ("ModelConfig.layers = 1", "DistillationConfig.until = 4", MESH, *FLAT)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A teacher of two layers, in bfloat16, in halves and with noise, and a student of one that ran through."""
    folder = tmp_path_factory.mktemp("taught")
    own = ("ModelConfig.dtype = 'bfloat16'", "MoEConfig.gate_noise = 0.1", "MoEConfig.num_experts = 4")
    own += ("ModelConfig.overlap = 'halves'", "train.batch_size = 16")
    assert run_here(folder, folder / "teacher", *own, MESH, "train.steps = 3")
    assert run_here(folder, folder / "whole", *STUDENT, by(folder / "teacher"))
    return folder


def by(teacher) -> str:
    return f"DistillationConfig.teacher = {str(teacher)!r}"


def test_the_divergence_is_recorded_while_the_teacher_is_there(taught):
    records = read_metrics(taught / "whole")
    assert [("kl" in record) for record in records] == [True] * 4 + [False] * 2
    assert all(np.isfinite(record["kl"]) and record["kl"] > 0 for record in records[:4])
    assert [("compile_seconds" in record) for record in records] == [True, False, False, False, True, False]


@pytest.mark.slow
def test_resume_on_either_side_equals_a_run_that_never_stopped(taught):
    """Stopped after step 3, before the boundary, and after step 5, where the teacher's folder may even be gone."""
    workdir, teacher = taught / "parts", taught / "for_a_while"
    shutil.copytree(taught / "teacher", teacher)
    for stop in (3, 5):
        assert run_here(taught, workdir, *STUDENT, by(teacher), f"train.steps = {stop}")
    shutil.rmtree(teacher)
    assert run_here(taught, workdir, *STUDENT, by(teacher))
    assert_same_run(taught / "whole", workdir, 6, "kl")
    assert not any("teacher" in name for name in arrays_of(workdir, 6))
    held = Checkpointer(workdir / "checkpoints", keep=3).read_host(6)["teacher"]
    assert held["folder"] == str(teacher) and held["step"] == 3
    assert set(held) == {"folder", "step", "config", "parameters"}


@pytest.mark.slow
def test_after_the_boundary_no_array_of_the_teacher_is_left(taught):
    stepper = build_stepper(config_of(taught, *STUDENT, by(taught / "teacher")), jax.devices())
    with_teacher = stepper.executable.memory_analysis().argument_size_in_bytes
    assert {leaf.dtype.name for leaf in jax.tree.leaves(stepper.teacher_params["bank"])} == {"bfloat16"}
    frozen = [weakref.ref(leaf) for leaf in jax.tree.leaves(stepper.teacher_params)]
    before = [np.array(leaf()) for leaf in frozen]
    held = sum(leaf().addressable_shards[0].data.nbytes for leaf in frozen)
    stepper.run(3)
    assert all((np.array(leaf()) == old).all() for leaf, old in zip(frozen, before, strict=True))
    stepper.run(2)
    gc.collect()
    assert stepper.teacher_params is None and [leaf for leaf in frozen if leaf() is not None] == []
    assert with_teacher - stepper.executable.memory_analysis().argument_size_in_bytes == held


def test_another_teacher_is_refused_in_one_line(taught):
    held = HostData.from_json(Checkpointer(taught / "whole" / "checkpoints", keep=3).read_host(3)).teacher
    with pytest.raises(UserError, match=r"DistillationConfig.teacher \(''\) was '.*teacher' at step 3"):
        settle_teacher(config_of(taught), 3, held, Hosts())
    with pytest.raises(UserError, match=r"is not the teacher of this run so far: step 6, .* now, step 3, .* before"):
        run_here(taught, taught / "whole", *STUDENT, by(taught / "whole"), "train.steps = 8")
    with pytest.raises(UserError, match=r"was '' when this run wrote step 3"):
        settle_teacher(config_of(taught, *STUDENT, by(taught / "teacher")), 3, None, Hosts())
    shutil.copytree(taught / "teacher", taught / "moved")  # only its folder is another
    moved = config_of(taught, *STUDENT, by(taught / "moved"))
    identity = dataclasses.replace(held, folder=str(taught / "moved"))
    assert settle_teacher(moved, 3, held, Hosts()) == (moved, identity)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("DistillationConfig.teacher = '{0}/nowhere'", "run folder .*nowhere does not exist"),
        ("DistillationConfig.teacher = '{0}/empty'", "empty/checkpoints has no finished checkpoint"),
        ("DistillationConfig.teacher_step = 2", "of step 2, only of 3; set DistillationConfig.teacher_step to"),
        ("ModelConfig.vocab_size = 512", "its vocabulary has 384 entries of the tokenizer 'byte', and this run's 512"),
        ("ModelConfig.kind = 'bert'", "its ModelConfig.kind is 'gpt', and this run's 'bert'"),
        ("DataConfig.sequence_length = 32", "it has learned 16 positions"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused_before_anything_compiles(taught, change, says, monkeypatch):
    (taught / "empty").mkdir(exist_ok=True)
    shutil.copy(taught / "teacher" / "config.gin", taught / "empty")
    monkeypatch.setattr("moe_jax.training.program.Program.compile_step", lambda *_: pytest.fail("compiled"))
    changes = (*STUDENT, "ModelConfig.max_length = 64", by(taught / "teacher"), change.format(taught))
    with pytest.raises(UserError, match=says) as caught:
        run_here(taught, taught / "refused", *changes)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("DistillationConfig.teacher")
