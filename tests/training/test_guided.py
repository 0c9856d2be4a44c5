"""Guided compilation: who is guided, what the second compilation gets, and that all processes get the same."""

import logging
import pathlib
import types

import jax
import pytest

from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import scheduler_profile
from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError
from moe_jax.training import compiling
from moe_jax.training.compiling import compiled, compiler_options
from moe_jax.training.program import Program

FIXTURE = pathlib.Path(__file__).parents[1] / "inspection" / "fixtures" / "replicas.hlo.xz"


def gpus(kind, number):
    return [types.SimpleNamespace(platform="cuda", device_kind=kind, process_index=i // 4) for i in range(number)]


def test_target_follows_the_devices_and_unknown_rates_are_said_once(caplog):
    target = compiling.find_target(gpus("NVIDIA H200", 8), 4)
    assert (target.name, target.nodes, target.per_node) == ("h200", 2, 4)
    assert compiling.find_target(gpus("NVIDIA H200", 2), 8).devices == 2
    assert compiling.find_target(jax.devices(), 8) is None
    compiling._unguided.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert compiling.find_target(gpus("NVIDIA B9", 8), 8) is None
    (record,) = caplog.records
    assert "'NVIDIA B9', whose rates are not known here (2080ti, " in record.getMessage()


class Lowered:
    """Stands in for jax's: compiles to a saved schedule and records its arguments."""

    def __init__(self, text):
        self.text, self.compilations = text, []

    def as_text(self):
        return "program"

    def compile(self, compiler_options):
        path = compiler_options.get(compiling.PROFILE_OPTION)
        self.compilations.append((dict(compiler_options), path and pathlib.Path(path).read_text()))
        return types.SimpleNamespace(as_text=lambda: self.text)


@pytest.fixture
def lowered(tmp_path, monkeypatch):
    from moe_jax.analysis.compile_ahead import read_text

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Lowered(read_text(str(FIXTURE)))


def test_second_compilation_gets_the_seconds_of_the_first(lowered):
    target = parse_target("h200:2x2")
    compiling.compile_guided(lowered, {"xla_a": "1"}, target)
    (first, nothing), (second, profile) = lowered.compilations
    assert first["xla_a"] == second["xla_a"] == "1" and nothing is None
    assert profile == scheduler_profile(parse_module(lowered.text), target)
    compiling.compile_guided(lowered, {"xla_a": "1"}, target)
    assert lowered.compilations[3][0] == second, "another name would be another program to JAX's compilation cache"


def test_a_profile_that_does_not_fit_is_said(lowered, caplog, monkeypatch):
    """The compiler matches by name; a program whose instructions are called otherwise is scheduled without guidance."""
    target = parse_target("h200:2x2")
    with caplog.at_level(logging.WARNING):
        compiling.compile_guided(lowered, {}, target)
        assert not caplog.records
        other = scheduler_profile(parse_module(lowered.text), target).replace('" ', '.of_another_program" ')
        monkeypatch.setattr(compiling, "scheduler_profile", lambda *_: other)
        compiling.compile_guided(lowered, {}, target)
    (record,) = caplog.records
    assert "train.guide_scheduler (True) had little effect on jit_train_step" in record.getMessage()


def test_a_full_cache_folder_costs_the_name_of_the_profile_and_not_the_run(lowered, tmp_path, monkeypatch, caplog):
    target = parse_target("h200:2x2")
    compiling.compile_guided(lowered, {}, target)
    stored = lowered.compilations[1]

    def full(path, content):
        raise UserError(f"{str(path)!r} cannot be written (Disk quota exceeded)")

    monkeypatch.setattr(compiling, "write_cached", full)
    compiling.compile_guided(lowered, {}, target)
    assert lowered.compilations[3] == stored and not caplog.records, "what lies there need not be written again"
    pathlib.Path(stored[0][compiling.PROFILE_OPTION]).unlink()
    compiling.compile_guided(lowered, {}, target)
    options, profile = lowered.compilations[5]
    assert profile == stored[1] and not pathlib.Path(options[compiling.PROFILE_OPTION]).exists()
    (record,) = caplog.records
    assert "kept for this compilation only: " in record.getMessage() and "quota exceeded" in record.getMessage()
    monkeypatch.setattr(compiling.tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(UserError, match="Disk quota exceeded"):
        compiling.compile_guided(lowered, {}, target)


class Client:
    """Stands in for the coordination service."""

    def __init__(self):
        self.stored = {}

    def key_value_set_bytes(self, key, value, allow_overwrite):
        self.stored[key] = value

    def blocking_key_value_get_bytes(self, key, _milliseconds):
        return self.stored[key]

    def key_value_dir_get_bytes(self, folder):
        return [(key, value) for key, value in self.stored.items() if key.startswith(folder)]

    def key_value_delete(self, folder):
        self.stored = {key: value for key, value in self.stored.items() if not key.startswith(folder)}


@pytest.fixture
def two_processes(monkeypatch):
    """Return a function that makes this process the one of that index."""
    monkeypatch.setattr(compiling.distributed.global_state, "client", Client())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    return lambda index: monkeypatch.setattr(jax, "process_index", lambda: index)


@pytest.mark.parametrize("guide", ["h200:2x2", None])
def test_nobody_waits_for_other_processes_timings(lowered, two_processes, guide, caplog):
    """Every compilation of a job of several processes on GPUs, wherever it happens, times its kernels alone."""
    options = compiler_options("cuda", processes=2)
    assert options["xla_gpu_shard_autotuning"] == "False"
    target = guide and parse_target(guide)
    for process in range(2):
        two_processes(process)
        compiling.compile_for_all(lowered, options, target, gpus("NVIDIA H200", 4))
    assert all(compilations["xla_gpu_shard_autotuning"] == "False" for compilations, _ in lowered.compilations)
    # what stands in for the executable cannot be handed out, so process 1 compiles by process 0's profile, and only so
    assert "each compiles it for itself" in caplog.text
    assert len(lowered.compilations) == (3 if guide else 2) and lowered.compilations[-1] == lowered.compilations[-2]


def test_deterministic_run_tells_the_compiler():
    devices = types.SimpleNamespace(flat=gpus("NVIDIA H200", 4))
    roles = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=devices))
    for wanted in (False, True):
        config = types.SimpleNamespace(train=TrainConfig(deterministic=wanted))
        options = Program.compiler_options(types.SimpleNamespace(roles=roles, config=config))
        assert options == ({"xla_gpu_deterministic_ops": "True"} if wanted else {})
    assert compiler_options("cpu", processes=2, deterministic=True) == {}


def test_option_that_a_compiler_does_not_know_is_left_out(caplog):
    compilations = []

    def compile(compiler_options):
        compilations.append(compiler_options)
        for name in compiler_options:
            if name in unknown:
                raise RuntimeError(f"INVALID_ARGUMENT: No such compile option: '{name}'")
        return "executable"

    lowered, unknown = types.SimpleNamespace(compile=compile), {"xla_gpu_shard_autotuning"}
    options = {"xla_a": "1", "xla_gpu_shard_autotuning": "False"}
    assert compiled(lowered, options) == "executable"
    assert compilations == [options, {"xla_a": "1"}] and "has no option xla_gpu_shard_autotuning" in caplog.text
    unknown.add("xla_a")
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_a'"):
        compiled(lowered, {"xla_a": "1"})
