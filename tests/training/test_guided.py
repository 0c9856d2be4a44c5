"""Guided compilation: who is guided, what the second compilation is told, and that all processes are told the same."""

import logging
import pathlib
import types

import jax
import pytest

from moe_jax import inspection
from moe_jax.training import guided

FIXTURE = pathlib.Path(__file__).parents[1] / "inspection" / "fixtures" / "guests.hlo.xz"


def gpus(kind, number):
    return [types.SimpleNamespace(platform="cuda", device_kind=kind, process_index=i // 4) for i in range(number)]


def test_target_follows_the_devices():
    target = guided.find_target(gpus("NVIDIA H200", 8), 4)
    assert (target.name, target.nodes, target.per_node) == ("h200", 2, 4)
    assert guided.find_target(gpus("NVIDIA H200", 2), 8).devices == 2
    assert guided.find_target(jax.devices(), 8) is None


def test_unknown_rates_are_said_once(caplog):
    guided._say_unguided.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert guided.find_target(gpus("NVIDIA B9", 8), 8) is None
    (record,) = caplog.records
    assert "'NVIDIA B9', whose rates are not known here (2080ti, " in record.getMessage()


class Lowered:
    """Stands in for jax's: compiles to a saved schedule and remembers what it was told."""

    def __init__(self, text):
        self.text, self.told = text, []

    def as_text(self):
        return "program"

    def compile(self, compiler_options):
        path = compiler_options.get(guided.PROFILE_OPTION)
        self.told.append((dict(compiler_options), path and pathlib.Path(path).read_text()))
        return types.SimpleNamespace(as_text=lambda: self.text)


@pytest.fixture
def lowered(tmp_path, monkeypatch):
    from moe_jax.inspect import read_text

    monkeypatch.setattr(guided.tempfile, "gettempdir", lambda: str(tmp_path))
    return Lowered(read_text(str(FIXTURE)))


def test_second_compilation_is_told_the_seconds_of_the_first(lowered):
    target = inspection.parse_target("h200:2x2")
    guided.compile_guided(lowered, {"xla_a": "1"}, target)
    (first, nothing), (second, profile) = lowered.told
    assert first["xla_a"] == second["xla_a"] == "1" and nothing is None
    assert profile == inspection.scheduler_profile(inspection.parse_module(lowered.text), target)
    guided.compile_guided(lowered, {"xla_a": "1"}, target)
    assert lowered.told[3][0] == second, "another name would be another program to JAX's compilation cache"


def test_without_a_target_there_is_one_compilation(lowered):
    guided.compile_guided(lowered, {}, None)
    assert lowered.told == [({}, None)]


def test_all_processes_take_the_first_one_s_profile(monkeypatch):
    kept = {}
    client = types.SimpleNamespace(
        key_value_set_bytes=lambda key, value, allow_overwrite: kept.__setitem__(key, value),
        blocking_key_value_get_bytes=lambda key, _: kept[key],
    )
    monkeypatch.setattr(guided.distributed.global_state, "client", client)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    told = []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        told.append(guided.agreed(lambda process=process: f"made by {process}", lambda: "name"))
    assert told == ["made by 0", "made by 0"]
