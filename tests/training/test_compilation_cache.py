"""The cache of compiled programs: where it lies, when it is off, and that a second start finds what the first made."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from moe_jax.errors import UserError
from moe_jax.training.compiling import set_up_compilation_cache

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def as_before(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, enabled = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_enable_compilation_cache", enabled)


def test_which_folder_keeps_programs(tmp_path):
    """On GPUs the user's, on CPUs none, a named one or the environment's before both; '' switches it off."""
    assert set_up_compilation_cache(None) is None and jax.config.jax_compilation_cache_dir is None
    assert set_up_compilation_cache(None, "gpu") == str(tmp_path / "moe_jax" / "compilation")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "moe_jax" / "compilation")
    jax.config.update("jax_compilation_cache_dir", "/from/JAX_COMPILATION_CACHE_DIR")
    assert set_up_compilation_cache(None, "gpu") == "/from/JAX_COMPILATION_CACHE_DIR"
    assert set_up_compilation_cache(str(tmp_path / "mine")) == jax.config.jax_compilation_cache_dir
    assert (tmp_path / "mine").is_dir()
    assert set_up_compilation_cache("", "gpu") is None
    assert not jax.config.jax_enable_compilation_cache


def test_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--compilation_cache=.*file/below cannot be made \(.*\); name another"):
        set_up_compilation_cache(str(tmp_path / "file" / "below"))


def test_second_start_finds_the_programs_of_the_first(tmp_path):
    program = """
import sys, jax, jax.numpy as jnp
from jax import monitoring
from moe_jax.training.compiling import set_up_compilation_cache
heard = []
monitoring.register_event_listener(lambda event, **_: heard.append(event))
set_up_compilation_cache(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
lowered = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
lowered.compile()
print("hits", heard.count("/jax/compilation_cache/cache_hits"))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    said = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "cache")], env=environment, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    ]
    assert said == ["hits 0\n", "hits 1\n"]
