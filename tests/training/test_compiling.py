"""How programs are compiled: who is guided, what the second compilation gets, and which folder keeps programs."""

import pathlib
import types

import jax
import pytest
from jax._src import compilation_cache

from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import scheduler_profile
from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError
from moe_jax.training import compiling
from moe_jax.training.compiling import compiler_options, set_up_compilation_cache
from moe_jax.training.program import Program

FIXTURE = pathlib.Path(__file__).parents[1] / "inspection" / "fixtures" / "replicas.hlo.xz"


def gpus(kind, number):
    return [types.SimpleNamespace(platform="cuda", device_kind=kind, process_index=i // 4) for i in range(number)]


def test_target_follows_the_devices_and_unknown_rates_are_refused():
    target = compiling.find_target(gpus("NVIDIA H200", 8), 4)
    assert (target.name, target.nodes, target.per_node) == ("h200", 2, 4)
    assert compiling.find_target(gpus("NVIDIA H200", 2), 8).devices == 2
    assert compiling.find_target(jax.devices(), 8) is None
    with pytest.raises(
        UserError, match=r"the rates of 'NVIDIA B9', which are not known here \(2080ti, .*; set it to False"
    ):
        compiling.find_target(gpus("NVIDIA B9", 8), 8)


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
    assert profile == scheduler_profile(parse_module(lowered.text), Prices(target))
    compiling.compile_guided(lowered, {"xla_a": "1"}, target)
    assert lowered.compilations[3][0] == second, "another name would be another program to JAX's compilation cache"


def test_deterministic_run_tells_the_compiler():
    for wanted in (False, True):
        config = types.SimpleNamespace(train=TrainConfig(deterministic=wanted))
        roles = types.SimpleNamespace(size=len, data=(), expert=())
        run = types.SimpleNamespace(devices=gpus("NVIDIA H200", 4), config=config, roles=roles, abstract_state=dict)
        options = Program.compiler_options(run)
        assert options == ({"xla_gpu_deterministic_ops": "True"} if wanted else {})
    assert compiler_options(jax.devices()[0], processes=2, deterministic=True) == {}
    # in a job of several processes every compilation on GPUs times its kernels alone
    assert compiler_options(*gpus("NVIDIA B9", 1), processes=2) == {"xla_gpu_shard_autotuning": "False"}


# The cache.


@pytest.fixture
def as_before(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, enabled = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    monkeypatch.setattr(compilation_cache, "get_file_cache", compilation_cache.get_file_cache)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_enable_compilation_cache", enabled)


def test_which_folder_keeps_programs(as_before, tmp_path, caplog, monkeypatch):
    """On GPUs the user's, on CPUs none, a named one or the environment's before both; '' switches it off."""
    assert set_up_compilation_cache(None) is None and jax.config.jax_compilation_cache_dir is None
    assert set_up_compilation_cache(None, "gpu") == str(tmp_path / "moe_jax" / "compilation")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "moe_jax" / "compilation")
    jax.config.update("jax_compilation_cache_dir", "/from/JAX_COMPILATION_CACHE_DIR")
    assert set_up_compilation_cache(None, "gpu") == "/from/JAX_COMPILATION_CACHE_DIR"
    assert set_up_compilation_cache(str(tmp_path / "mine")) == jax.config.jax_compilation_cache_dir
    assert set_up_compilation_cache("", "gpu") is None
    assert not jax.config.jax_enable_compilation_cache
    assert set_up_compilation_cache(str(tmp_path / "mine")) is None  # as set_up_devices leaves it
    assert f"compilation cache {tmp_path}/mine is not used with --host_devices" in caplog.text
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", "/from/JAX_COMPILATION_CACHE_DIR")
    with monkeypatch.context() as several:
        several.setattr(jax, "process_count", lambda: 2)
        assert set_up_compilation_cache(None) is None and not jax.config.jax_enable_compilation_cache
        assert "_CACHE_DIR is not used with --host_devices, or with several processes on CPUs" in caplog.text


def test_a_folder_that_others_may_write_to_keeps_no_programs(as_before, tmp_path, caplog):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    assert set_up_compilation_cache(str(tmp_path / "open")) is None and not jax.config.jax_enable_compilation_cache
    assert f"programs are not kept: other users may write to '{tmp_path}/open'" in caplog.text
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--compilation_cache=.*file/below cannot be made \(.*\); name another"):
        set_up_compilation_cache(str(tmp_path / "file" / "below"))
