"""A run on a transport or a kernel that computes something else does not start, or goes on with a proven one."""

import dataclasses
import functools
import itertools
import json
import logging

import jax
import pytest
from support.tiny_run import bindings_of, run_here

from moe_jax import user_cache
from moe_jax.collectives import exchange
from moe_jax.config import parse_run_config
from moe_jax.distributed.hosts import Hosts
from moe_jax.errors import UserError
from moe_jax.mesh import MeshConfig, build_mesh
from moe_jax.training import first_step_check, verdicts
from moe_jax.training import run as run_module
from moe_jax.training.exchange_check import compare_exchange
from moe_jax.training.first_step_check import settle_unproven
from moe_jax.training.session import build_session
from moe_jax.training.verdicts import DIFFERS, FAILS, NO_MEMORY, PASSES, Verdict

NO_ROOM = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.\nmore")
SMALL_CHIP = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 278528, available: 232448"
)


class TwoProcesses(Hosts):
    """This process and another one, whose answers the test sets."""

    def __init__(self, other: Verdict, kept: str = "no"):
        super().__init__(process_index=0, process_count=1)
        self.answers = {"kept": kept, "check": json.dumps(dataclasses.asdict(other))}

    def gather_text(self, topic, text, timeout_seconds=300.0):
        return [text, self.answers[topic.split()[0]]]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for said in (verdicts._say_uncached, user_cache._say_elsewhere):
        said.cache_clear()
    return tmp_path / "xdg" / "moe_jax" / "verdicts"


def session_of(folder, *changes):
    small = ("MeshConfig.expert = 2", "ModelConfig.layers = 1", "MoEConfig.grouped_matmul = 'reference'")
    config, _, _ = parse_run_config((), bindings_of(folder, *small, *changes))
    return build_session(config, jax.devices()[:2])


@pytest.fixture
def session(tmp_path, cache, monkeypatch):
    """Return function(wanted, outcome): a session whose grouped matmul is 'blocked', unproven, with that outcome."""

    def make(wanted, outcome):
        session = session_of(tmp_path, f"MoEConfig.grouped_matmul = {wanted!r}")
        asked = []

        def check():
            asked.append(1)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        key = verdicts.verdict_key(jax.devices()[0], check="expert", implementation="blocked")
        monkeypatch.setattr(first_step_check, "unproven", lambda s: {"grouped_matmul": ("blocked", check, key)})
        return session, asked

    return make


def test_what_passes_is_trained_with(session):
    made, asked = session("auto", Verdict(outcome=PASSES))
    settled, record = settle_unproven(made, Hosts())
    assert settled is made and asked == [1]
    assert record == {
        "grouped_matmul": {"wanted": "auto", "compared": "blocked", "used": "blocked", "outcome": "passes",
                           "detail": ""}
    }  # fmt: skip


def test_the_second_start_costs_nothing(session, cache):
    made, asked = session("auto", Verdict(outcome=PASSES))
    first = settle_unproven(made, Hosts())[1]
    assert settle_unproven(made, Hosts())[1] == first and asked == [1]
    (file,) = cache.iterdir()
    file.write_text(file.read_text()[:40])  # damaged
    assert settle_unproven(made, Hosts())[1] == first and asked == [1, 1]
    key = json.loads(file.read_text())["key"]
    assert {"device", "platform", "jax", "jaxlib", "source", "implementation"} <= set(key)
    assert verdicts.read_verdict({**key, "jax": "0.0"}) is None


def test_another_driver_or_other_flags_are_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "DRIVER", tmp_path / "version")
    key = functools.partial(verdicts.verdict_key, jax.devices()[0], check="expert")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64  580.65.06\nGCC version: 12\n")
    before = key()
    assert before["driver"] == "NVRM version: NVIDIA UNIX x86_64  580.65.06" and key() == before
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64  590.10.01\n")
    newer = key()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_exhaustive_tiling_search=true")
    assert len({json.dumps(each, sort_keys=True) for each in (before, newer, key())}) == 3


@pytest.mark.parametrize(
    "outcome, said",
    [
        (Verdict(outcome=DIFFERS, detail="output, row 3, is off"), "else than 'fused': output, row 3, is off"),
        (jax.errors.JaxRuntimeError("INTERNAL: no such instruction\nmore"), "INTERNAL: no such instruction; the run"),
        (NotImplementedError(), "fails before the first step: NotImplementedError; the run"),
        (SMALL_CHIP, "fails before the first step: RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested"),
        (NO_ROOM, "not even that fits into memory: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 byt"),
    ],
)
def test_auto_goes_on_with_the_proven_one(session, caplog, outcome, said):
    made, _ = session("auto", outcome)
    with caplog.at_level(logging.WARNING):
        settled, record = settle_unproven(made, Hosts())
    assert settled.config.moe.grouped_matmul == settled.model.moe.grouped_matmul == "fused"
    assert record["grouped_matmul"]["used"] == "fused" and record["grouped_matmul"]["compared"] == "blocked"
    (line,) = [record.getMessage() for record in caplog.records if "grouped_matmul" in record.getMessage()]
    assert line.startswith("MoEConfig.grouped_matmul ('auto'): 'blocked' ") and said in line and "\n" not in line
    assert line.endswith("; the run takes 'fused', which is slower")


def test_a_named_kernel_that_differs_is_refused(session, cache):
    made, asked = session("blocked", Verdict(outcome=DIFFERS, detail="output, row 3, is 1 of its size off"))
    with pytest.raises(UserError) as caught:
        settle_unproven(made, Hosts())
    assert str(caught.value) == (
        "MoEConfig.grouped_matmul ('blocked') computes something else than 'fused': output, row 3, is 1 of its size "
        "off; set MoEConfig.grouped_matmul = 'fused'"
    )
    with pytest.raises(UserError, match="so it was at an earlier start; delete .*json to compare again"):
        settle_unproven(made, Hosts())
    assert asked == [1] and len(list(cache.iterdir())) == 1


def test_a_named_kernel_goes_on_unchecked_without_memory(session, cache, caplog):
    made, asked = session("blocked", NO_ROOM)
    with caplog.at_level(logging.WARNING):
        settled, record = settle_unproven(made, Hosts())
    assert settled is made and record["grouped_matmul"]["outcome"] == NO_MEMORY
    assert "the run goes on with it, unchecked" in caplog.text
    settle_unproven(made, Hosts())
    assert asked == [1, 1]  # less may stand in the memory next time, so this is not kept


def test_a_device_that_a_kernel_ended_is_named(session, monkeypatch):
    made, _ = session("auto", jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"))
    monkeypatch.setattr(first_step_check, "usable", lambda device: False)
    with pytest.raises(UserError, match="ILLEGAL_ADDRESS; the device does not answer any more: give the same command"):
        settle_unproven(made, Hosts())


@pytest.mark.parametrize("other, used", [(DIFFERS, "fused"), (FAILS, "fused"), (NO_MEMORY, "fused"), (PASSES, "auto")])
def test_all_processes_decide_by_the_worst(session, other, used):
    """This process finds the kernel right; the config is changed if another one did not."""
    made, _ = session("auto", Verdict(outcome=PASSES))
    settled, record = settle_unproven(made, TwoProcesses(Verdict(outcome=other, detail="theirs")))
    assert settled.config.moe.grouped_matmul == used and record["grouped_matmul"]["outcome"] == other


def test_a_check_is_run_by_all_or_by_none(session):
    """A kept verdict here and none there: both run the check, which may wait for the other."""
    made, asked = session("auto", Verdict(outcome=PASSES))
    settle_unproven(made, Hosts())
    settle_unproven(made, TwoProcesses(Verdict(outcome=PASSES), kept="no"))
    assert asked == [1, 1]
    settle_unproven(made, TwoProcesses(Verdict(outcome=PASSES), kept="yes"))
    assert asked == [1, 1]


def test_without_a_cache_it_goes_on_and_says_so_once(session, cache, caplog):
    cache.parent.mkdir(parents=True)
    cache.symlink_to(cache.parent)  # a link is not followed
    made, asked = session("auto", Verdict(outcome=PASSES))
    with caplog.at_level(logging.WARNING):
        settle_unproven(made, Hosts())
        settle_unproven(made, Hosts())
    assert asked == [1, 1] and caplog.text.count("kernels are compared again at every start") == 1


def test_a_run_records_what_was_compared(tmp_path, monkeypatch):
    """A run on devices that need nothing compared says so; one that falls back trains on what it says."""
    key = {"check": "none"}
    monkeypatch.setattr(first_step_check, "keep_verdict", lambda key, verdict: None)
    differs = Verdict(outcome=DIFFERS, detail="all of it")
    found = {"grouped_matmul": ("blocked", lambda: differs, key)}
    monkeypatch.setattr(first_step_check, "unproven", lambda session: found)
    trained = []
    monkeypatch.setattr(run_module, "train", lambda session, *rest: trained.append(session.model.moe) or True)
    assert run_here(tmp_path, tmp_path / "run", "ModelConfig.layers = 1", "MeshConfig.expert = 8")
    assert trained[0].grouped_matmul == "fused"
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["resolved"] == {
        "MeshConfig.devices_per_node": 8,
        "ModelConfig.attention": "xla",
        "ModelConfig.overlap": "none",
        "train.optimistic": False,
    }
    assert environment["compared_before_first_step"]["grouped_matmul"] == {
        "wanted": "auto", "compared": "blocked", "used": "fused", "outcome": DIFFERS, "detail": "all of it"
    }  # fmt: skip


def test_only_what_is_unproven_is_compared(tmp_path, cache, monkeypatch):
    changes = ("ModelConfig.dtype = 'bfloat16'", "ModelConfig.hidden_dim = 128", "ModelConfig.model_dim = 64")
    session = session_of(tmp_path, *changes)
    assert first_step_check.unproven(session) == {}
    with_kernel = first_step_check.with_field(session, "grouped_matmul", "hopper")
    ragged = first_step_check.with_field(with_kernel, "transport", "ragged")
    found = first_step_check.unproven(ragged)
    assert {field: used for field, (used, _, _) in found.items()} == {"grouped_matmul": "hopper", "transport": "ragged"}
    keys = {json.dumps(key, sort_keys=True) for _, _, key in found.values()}
    assert len(keys) == 2
    ours = first_step_check.unproven(first_step_check.with_field(session, "grouped_matmul", "mosaic_sparing"))
    assert ours["grouped_matmul"][0] == "mosaic_sparing"
    assert first_step_check.unproven(first_step_check.with_field(session, "grouped_matmul", "ragged")) == {}
    with pytest.raises(UserError, match=r"MoEConfig.grouped_matmul \('hopper'\) fails before the first step"):
        settle_unproven(with_kernel, Hosts())  # on a CPU


def wrong_rounds(monkeypatch, forward, backward):
    """Change what the rounds of 'ppermute' do."""

    def wrong(move):
        @jax.custom_vjp
        def exchange(x):
            return forward(move(x))

        exchange.defvjp(lambda x: (forward(move(x)), None), lambda _, d: (backward(move(d)),))
        return exchange

    real = exchange._own_transpose
    monkeypatch.setattr(
        exchange, "_own_transpose", lambda move: wrong(move) if move.func is exchange._rounds else real(move)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("where", ["nowhere", "forward", "backward"])
def test_a_wrong_transport_is_found(monkeypatch, where, dtype):
    """Rounds that go the wrong way round, in the backward alone too: the loss is right then, and no gradient."""
    roles = build_mesh(MeshConfig(data=2, expert=2, expert_shard=2), jax.devices())
    turned, same = (lambda x: x[::-1]), (lambda x: x)
    ways = {"nowhere": (same, same), "forward": (turned, same), "backward": (same, turned)}
    wrong_rounds(monkeypatch, *ways[where])
    off = compare_exchange(roles, "ppermute", 16, dtype)
    assert set(off) == {"full", "uneven", "all to one", "a single row", "none"} and off["none"] == 0
    if where == "nowhere":
        assert not any(off.values())
    else:
        assert all(count > 0 for name, count in off.items() if name != "none")


def test_a_wrong_transport_is_refused(tmp_path, cache, monkeypatch):
    session = session_of(tmp_path, "MoEConfig.transport = 'ppermute'")
    key = verdicts.verdict_key(jax.devices()[0], check="exchange", transport="ppermute")
    check = lambda: first_step_check.check_exchange(session, "ppermute")  # noqa: E731
    monkeypatch.setattr(first_step_check, "unproven", lambda session: {"transport": ("ppermute", check, key)})
    wrong_rounds(monkeypatch, lambda x: x, lambda d: d[::-1])
    with pytest.raises(UserError) as caught:
        settle_unproven(session, Hosts())
    message = str(caught.value)
    assert message.startswith("MoEConfig.transport ('ppermute') computes something else than 'all_to_all': ")
    assert "entries with rows spread 'uneven'" in message and "\n" not in message
    assert message.endswith("; set MoEConfig.transport = 'all_to_all'")


def test_ragged_is_refused_on_a_cpu(tmp_path):
    with pytest.raises(
        UserError, match=r"MoEConfig.transport \('ragged'\) needs GPUs; XLA has no such exchange on cpu"
    ):
        session_of(tmp_path, "MoEConfig.transport = 'ragged'")


def test_names_of_spreads_are_counted_by_every_transport():
    from moe_jax.training.exchange_check import BLOCK_ROWS, spreads

    for devices, peers in itertools.product((2, 8), (2, 4)):
        for counts in spreads(devices, peers, BLOCK_ROWS).values():
            assert counts.shape == (devices, peers) and 0 <= counts.min() <= counts.max() <= BLOCK_ROWS
