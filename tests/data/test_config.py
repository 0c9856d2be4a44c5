"""DataConfig refuses what cannot work, by name, with the remedy; caches go where the user's caches go."""

from pathlib import Path

import pytest

from moe_jax.data import DataConfig
from moe_jax.data.config import cache_root
from moe_jax.errors import UserError


@pytest.mark.parametrize(
    ("binding", "text"),
    [
        ({"sequence_length": 0}, r"DataConfig.sequence_length \(0\) must be a whole number of at least 1"),
        ({"sequence_length": "128"}, r"DataConfig.sequence_length \('128'\) must be a whole number"),
        ({"sequence_length": True}, r"DataConfig.sequence_length \(True\) must be a whole number"),
        ({"held_out_fraction": 0.5}, r"DataConfig.held_out_fraction \(0.5\) must be above 0 and below 0.5"),
        ({"held_out_fraction": 0}, r"DataConfig.held_out_fraction \(0\) must be above 0 and below 0.5"),
        ({"held_out_fraction": float("nan")}, r"DataConfig.held_out_fraction \(nan\) must be above 0"),
        ({"path": None}, r"DataConfig.path \(None\) must be text; write it in quotes"),
        ({"field": ""}, r"DataConfig.field \(''\) must not be empty"),
        ({"tokenizer": ""}, r"DataConfig.tokenizer \(''\) must not be empty"),
    ],
)
def test_data_config_refuses(binding, text):
    with pytest.raises(UserError, match=text):
        DataConfig(**binding)


def test_cache_root_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache_root(DataConfig()) == Path("/some/cache/moe_jax")
    assert cache_root(DataConfig(cache_dir="/else")) == Path("/else")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_root(DataConfig()) == Path("/home/ada/.cache/moe_jax")
