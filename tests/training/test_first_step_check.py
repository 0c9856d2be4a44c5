"""A run on a kernel that computes something else does not start, or goes on with a proven one."""

import cProfile
import dataclasses
import functools
import json
import logging
import shutil
from pathlib import Path

import jax
import pytest
from support.tiny_run import bindings_of, run_here

from moe_jax.config import parse_run_config
from moe_jax.data import user_cache
from moe_jax.errors import UserError
from moe_jax.training import first_step_check
from moe_jax.training import run as run_module
from moe_jax.training.expert_check import ExpertShape, compare_expert
from moe_jax.training.first_step_check import DIFFERS, FAILS, NO_MEMORY, PASSES, Verdict, settle_unproven
from moe_jax.training.hosts import Hosts
from moe_jax.training.program import build_session

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
    for said in (first_step_check._say_uncached, user_cache._say_elsewhere):
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

        key = first_step_check.verdict_key(jax.devices()[0], check="expert", implementation="blocked")
        monkeypatch.setattr(first_step_check, "unproven", lambda s: ("blocked", check, key))
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
    assert first_step_check.read_verdict({**key, "jax": "0.0"}) is None


def test_another_driver_or_other_flags_are_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(first_step_check, "DRIVER", tmp_path / "version")
    key = functools.partial(first_step_check.verdict_key, jax.devices()[0], check="expert")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64  580.65.06\nGCC version: 12\n")
    before = key()
    assert before["driver"] == "NVRM version: NVIDIA UNIX x86_64  580.65.06" and key() == before
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64  590.10.01\n")
    newer = key()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_exhaustive_tiling_search=true")
    assert len({json.dumps(each, sort_keys=True) for each in (before, newer, key())}) == 3


def test_edited_code_of_a_check_is_asked_again(tmp_path, monkeypatch):
    """Code that runs in a check here, and kernels that cannot; code of the layer around the experts does not count."""
    package = Path(first_step_check.__file__).parents[1]
    shape = ExpertShape(model_dim=24, hidden_dim=40, dtype="float32", param_dtype="float32", activation="gelu")
    with cProfile.Profile() as ran:
        compare_expert("float8:blocked", shape, jax.devices()[0])
    ran = {Path(entry.code.co_filename) for entry in ran.getstats() if not isinstance(entry.code, str)}
    files = {file.relative_to(package) for file in ran if package in file.parents}
    assert {"experts.py", "blocked.py", "float8_ffn.py", "row_blocks.py"} <= {file.name for file in files}
    kernels = [Path("kernels") / name for name in ("hopper.py", "mosaic_kernels.py", "float8_kernels.py")]
    copy = shutil.copytree(package, tmp_path / "moe_jax", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(first_step_check, "__file__", str(copy / "training" / "first_step_check.py"))
    digest = first_step_check.source_digest.__wrapped__
    kept, before = [], digest()
    for file in sorted({*files, *kernels, Path("moe/schedules/ring.py")}):
        with (copy / file).open("a") as text:
            text.write("# edited\n")
        after = digest()
        kept, before = [*kept, *([str(file)] if after == before else [])], after
    assert kept == ["moe/schedules/ring.py"]


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
    found = ("blocked", lambda: differs, key)
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
        "MoEConfig.grouped_matmul": "fused",
        "train.optimistic": False,
        "train.guide_scheduler": False,
    }
    assert environment["compared_before_first_step"]["grouped_matmul"] == {
        "wanted": "auto", "compared": "blocked", "used": "fused", "outcome": DIFFERS, "detail": "all of it"
    }  # fmt: skip


def test_only_what_is_unproven_is_compared(tmp_path, cache, monkeypatch):
    changes = ("ModelConfig.dtype = 'bfloat16'", "ModelConfig.hidden_dim = 128", "ModelConfig.model_dim = 64")
    session = session_of(tmp_path, *changes)
    assert first_step_check.unproven(session) is None
    with_kernel = first_step_check.with_grouped_matmul(session, "hopper")
    assert first_step_check.unproven(with_kernel)[0] == "hopper"
    ours = first_step_check.unproven(first_step_check.with_grouped_matmul(session, "mosaic_sparing"))
    assert ours[0] == "mosaic_sparing"
    assert first_step_check.unproven(first_step_check.with_grouped_matmul(session, "ragged")) is None
    with pytest.raises(UserError, match=r"MoEConfig.grouped_matmul \('hopper'\) fails before the first step"):
        settle_unproven(with_kernel, Hosts())  # on a CPU
