"""A run on a kernel that computes something else does not start, or goes on with a proven one."""

import cProfile
import dataclasses
import json
import logging
import shutil
import types
from pathlib import Path

import jax
import pytest
from support.tiny_run import bindings_of, run_here

from moe_jax.config import parse_run_config
from moe_jax.data import user_cache
from moe_jax.errors import UserError
from moe_jax.models.config import ModelConfig
from moe_jax.training import first_step_check
from moe_jax.training import run as run_module
from moe_jax.training.expert_check import compare_expert
from moe_jax.training.first_step_check import DIFFERS, FAILS, NO_MEMORY, PASSES, settle_unproven
from moe_jax.training.program import build_session
from moe_jax.training.watchdog import Hosts

RIGHT, WRONG = (0.01, 0.06, "output, row 3, is right"), (1.0, 0.06, "output, row 3, is off")
NO_ROOM = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.\nmore")
SMALL_CHIP = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 278528, available: 232448"
)


class TwoProcesses(Hosts):
    """This process and another one, whose answers the test sets."""

    def __init__(self, other: str, kept: str = "no"):
        super().__init__(process_index=0, process_count=1)
        self.answers = {"kept": kept, "check": json.dumps([other, "theirs"])}

    def gather_text(self, topic, text, timeout_seconds=300.0):
        return [text, self.answers[topic.split()[0]]]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    user_cache._said.clear()
    for said in (first_step_check._say_uncached,):
        said.cache_clear()
    return tmp_path / "xdg" / "moe_jax" / "verdicts"


@pytest.fixture
def compared(cache, monkeypatch):
    """Return function(outcome): 'auto' is 'blocked', which is unproven; returns the list of its comparisons."""

    def make(outcome):
        asked = []

        def compare(implementation, *rest):
            asked.append(implementation)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        choose = lambda wanted, *rest: "blocked" if wanted == "auto" else wanted  # noqa: E731
        monkeypatch.setattr("moe_jax.training.program.choose_implementation", choose)
        monkeypatch.setattr(first_step_check, "KERNELS", ("blocked", "hopper", "mosaic_sparing"))
        monkeypatch.setattr(first_step_check, "compare_expert", compare)
        return asked

    return make


def session_of(folder, wanted, *changes):
    small = ("MeshConfig.expert = 2", "ModelConfig.layers = 1", f"MoEConfig.grouped_matmul = {wanted!r}")
    config, _, _ = parse_run_config((), bindings_of(folder, *small, *changes))
    return build_session(config, jax.devices()[:2])


def test_the_second_start_costs_nothing(tmp_path, compared, cache, monkeypatch):
    """Unless the file is damaged, or the driver or the flags are others."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64  580.65.06\nGCC version: 12\n")
    monkeypatch.setattr(first_step_check, "DRIVER", driver)
    made, asked = session_of(tmp_path, "auto"), compared(RIGHT)
    settled, first = settle_unproven(made, Hosts())
    assert settled is made and first["grouped_matmul"] == {
        "wanted": "auto", "compared": "blocked", "used": "blocked", "outcome": PASSES, "detail": ""
    }  # fmt: skip
    assert settle_unproven(made, Hosts())[1] == first and len(asked) == 1
    (file,) = cache.iterdir()
    key = json.loads(file.read_text())["key"]
    assert {"device", "platform", "jax", "jaxlib", "source", "compared"} <= set(key)
    assert key["driver"] == "NVRM version: NVIDIA UNIX x86_64  580.65.06"
    file.write_text(file.read_text()[:40])  # damaged
    assert settle_unproven(made, Hosts())[1] == first and len(asked) == 2
    driver.write_text("NVRM version: NVIDIA UNIX x86_64  590.10.01\n")
    settle_unproven(made, Hosts())
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_exhaustive_tiling_search=true")
    settle_unproven(made, Hosts())
    assert len(asked) == 4


def test_edited_code_of_a_check_is_asked_again(tmp_path, monkeypatch):
    """Code that runs in a check here, and kernels that cannot; code of the layer around the experts does not count."""
    package = Path(first_step_check.__file__).parents[1]
    config = ModelConfig(model_dim=24, hidden_dim=40)
    with cProfile.Profile() as ran:
        compare_expert("float8:blocked", config, jax.devices()[0])
    ran = {Path(entry.code.co_filename) for entry in ran.getstats() if not isinstance(entry.code, str)}
    files = {file.relative_to(package) for file in ran if package in file.parents}
    assert {"experts.py", "blocked.py", "float8.py", "grouped.py"} <= {file.name for file in files}
    kernels = [Path("kernels") / name for name in ("hopper.py", "mosaic_kernels.py")]
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
        (WRONG, "else than 'fused': output, row 3, is off"),
        (jax.errors.JaxRuntimeError("INTERNAL: no such instruction\nmore"), "INTERNAL: no such instruction; the run"),
        (NotImplementedError(), "fails before the first step: NotImplementedError; the run"),
        (SMALL_CHIP, "fails before the first step: RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested"),
        (NO_ROOM, "not even that fits into memory: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 byt"),
    ],
)
def test_auto_goes_on_with_the_proven_one(tmp_path, compared, caplog, outcome, said):
    compared(outcome)
    with caplog.at_level(logging.WARNING):
        settled, record = settle_unproven(session_of(tmp_path, "auto"), Hosts())
    assert settled.config.moe.grouped_matmul == settled.model.moe.grouped_matmul == "fused"
    assert record["grouped_matmul"]["used"] == "fused" and record["grouped_matmul"]["compared"] == "blocked"
    (line,) = [record.getMessage() for record in caplog.records if "grouped_matmul" in record.getMessage()]
    assert line.startswith("MoEConfig.grouped_matmul ('auto'): 'blocked' ") and said in line and "\n" not in line
    assert line.endswith("; the run takes 'fused', which is slower")


def test_a_named_kernel_that_differs_is_refused(tmp_path, compared, cache):
    made, asked = session_of(tmp_path, "blocked"), compared(WRONG)
    with pytest.raises(UserError) as caught:
        settle_unproven(made, Hosts())
    assert str(caught.value) == (
        "MoEConfig.grouped_matmul ('blocked') computes something else than 'fused': output, row 3, is off; set "
        "MoEConfig.grouped_matmul = 'fused'"
    )
    with pytest.raises(UserError, match="so it was at an earlier start; delete .*json to compare again"):
        settle_unproven(made, Hosts())
    assert len(asked) == 1 and len(list(cache.iterdir())) == 1


def test_a_named_kernel_goes_on_unchecked_without_memory(tmp_path, compared, caplog):
    made, asked = session_of(tmp_path, "blocked"), compared(NO_ROOM)
    with caplog.at_level(logging.WARNING):
        settled, record = settle_unproven(made, Hosts())
    assert settled is made and record["grouped_matmul"]["outcome"] == NO_MEMORY
    assert "the run goes on with it, unchecked" in caplog.text
    settle_unproven(made, Hosts())
    assert len(asked) == 2  # less may stand in the memory next time, so this is not kept


def test_a_device_that_a_kernel_ended_is_named(tmp_path, compared, monkeypatch):
    compared(jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"))
    made = session_of(tmp_path, "auto")
    monkeypatch.setattr(first_step_check, "jnp", None)  # nothing computes any more
    with pytest.raises(UserError, match="ILLEGAL_ADDRESS; the device does not answer any more: give the same command"):
        settle_unproven(made, Hosts())


def test_all_processes_decide_by_the_worst(tmp_path, compared):
    """This process finds the kernel right; the config is changed if another one did not. All or none run a check."""
    made, asked = session_of(tmp_path, "auto"), compared(RIGHT)
    for count, (other, used) in enumerate(
        [(DIFFERS, "fused"), (FAILS, "fused"), (NO_MEMORY, "fused"), (PASSES, "auto")]
    ):
        settled, record = settle_unproven(made, TwoProcesses(other))
        assert settled.config.moe.grouped_matmul == used and record["grouped_matmul"]["outcome"] == other
        assert len(asked) == count + 1  # a verdict is kept here, and none there
    settle_unproven(made, TwoProcesses(PASSES, kept="yes"))
    assert len(asked) == 4


def test_without_a_cache_it_goes_on_and_says_so_once(tmp_path, compared, cache, caplog):
    cache.parent.mkdir(parents=True)
    cache.symlink_to(cache.parent)  # a link is not followed
    made, asked = session_of(tmp_path, "auto"), compared(RIGHT)
    with caplog.at_level(logging.WARNING):
        settle_unproven(made, Hosts())
        settle_unproven(made, Hosts())
    assert len(asked) == 2 and caplog.text.count("kernels are compared again at every start") == 1


def test_a_run_records_what_was_compared(tmp_path, compared, monkeypatch):
    """A run on devices that need nothing compared says so; one that falls back trains on what it says."""
    compared(WRONG)
    trained = []
    loop = types.SimpleNamespace(run=lambda: True)
    monkeypatch.setattr(run_module, "Loop", lambda stepper, *rest: trained.append(stepper.session.model.moe) or loop)
    monkeypatch.setattr(run_module, "report", lambda folder: None)
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
        "wanted": "auto", "compared": "blocked", "used": "fused", "outcome": DIFFERS, "detail": "output, row 3, is off"
    }  # fmt: skip


def test_only_what_is_unproven_is_compared(tmp_path, cache):
    changes = ("ModelConfig.dtype = 'bfloat16'", "ModelConfig.hidden_dim = 128", "ModelConfig.model_dim = 64")
    session = session_of(tmp_path, "reference", *changes)
    for name, is_unproven in {"reference": False, "hopper": True, "mosaic_sparing": True, "ragged": False}.items():
        moe = dataclasses.replace(session.config.moe, grouped_matmul=name)
        other = dataclasses.replace(session, config=dataclasses.replace(session.config, moe=moe))
        assert [found for found, _ in first_step_check.unproven(other, jax.devices()[0])] == [name] * is_unproven
        if name == "hopper":  # on a CPU
            with pytest.raises(UserError, match=r"MoEConfig.grouped_matmul \('hopper'\) fails before the first step"):
                settle_unproven(other, Hosts())
