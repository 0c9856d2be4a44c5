"""The check of a grouped matmul on one expert FFN: rounding passes, each error seen in kernels does not; and a run on a
kernel that computes something else does not start, or goes on with a proven one.
"""

import dataclasses
import json
import logging
import types

import jax
import jax.numpy as jnp
import pytest
from support import tiny_run
from support.tiny_run import run_here

from moe_jax.data import user_cache
from moe_jax.errors import UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.kernels import grouped as contract
from moe_jax.kernels.blocked import RaggedMatmul, clear_unowned_rows, split_gradient
from moe_jax.kernels.grouped import register
from moe_jax.models.config import ModelConfig
from moe_jax.training import expert_check
from moe_jax.training import run as run_module
from moe_jax.training.expert_check import CASES, compare_expert, draw_arrays, of_implementation, select_verified_kernels

SMALL = ModelConfig(model_dim=64, hidden_dim=128, dtype="bfloat16")
TILE = 64


def in_last_part_of_a_tile(group_sizes, rows):
    """Return [R, 1], whether a row stands behind the last whole tile of its group."""
    stops = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(stops, jnp.arange(rows), side="right", method="compare_all")
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    place = jnp.arange(rows) - (stops - group_sizes)[group]
    return (place >= group_sizes[group] // TILE * TILE)[:, None]


class Saboteur(RaggedMatmul):
    """Computes something else, by what is wrong with it."""

    def __init__(self, fault):
        self.fault = fault

    def multiply(self, lhs, group_sizes, operands):
        out = super().multiply(lhs, group_sizes, operands)
        if self.fault == "rows after the last whole tile of a group stay zero":
            return jnp.where(in_last_part_of_a_tile(group_sizes, lhs.shape[0]), 0, out)
        if self.fault == "rows that nobody owns are not zero on exit":
            return jnp.where(jnp.arange(len(out))[:, None] < jnp.sum(group_sizes), out, jnp.array(1e-3, out.dtype))
        return out

    def gradients(self, lhs, dout, group_sizes, operands):
        dlhs, dweights = super().gradients(lhs, dout, group_sizes, operands)
        if self.fault == "gradient of w_in: rows masked by a product, which keeps a NaN":
            unowned = clear_unowned_rows(jnp.ones((lhs.shape[0], 1), lhs.dtype), group_sizes) == 0
            leak = jnp.sum(jnp.where(unowned, lhs, 0) * 0)
            dweights = tuple(dweight + leak.astype(dweight.dtype) for dweight in dweights)
        if self.fault == "gradient of w_in: of an empty group, what stood in memory":
            stale = jnp.where(group_sizes == 0, 1e-3, 0)[:, None, None]
            parts = split_gradient(jnp.broadcast_to(stale, (*group_sizes.shape, *operands[0].bank.shape[1:])), operands)
            dweights = tuple(dweight + part for dweight, part in zip(dweights, parts, strict=True))
        return dlhs, dweights


@pytest.mark.parametrize(
    "fault",
    [
        "rows after the last whole tile of a group stay zero",
        "rows that nobody owns are not zero on exit",
        "gradient of w_in: rows masked by a product, which keeps a NaN",
        "gradient of w_in: of an empty group, what stood in memory",
    ],
)
def test_a_wrong_kernel_is_found(monkeypatch, fault):
    monkeypatch.setattr(contract, "_REGISTRY", dict(contract._REGISTRY))
    register(fault)(lambda: Saboteur(fault))
    monkeypatch.setattr(expert_check, "CASES", CASES[1:])  # one case tells, in half the time
    size, limit, where = compare_expert(fault, SMALL, jax.devices()[0])
    assert size > 5 * limit and where.endswith(f"more than {limit:.2g}")
    assert where.startswith("gradient of w_") or not fault.startswith("gradient of w_")


@pytest.mark.parametrize("activation, dtype", [("gelu", "bfloat16"), ("swiglu", "bfloat16"), ("gelu", "float32")])
def test_rounding_passes(monkeypatch, activation, dtype):
    """The implementations that all other tests hold, at half of what rounding may explain."""
    monkeypatch.setattr(expert_check, "CASES", CASES[1:] if activation == "swiglu" else CASES[:1])
    config = dataclasses.replace(SMALL, dtype=dtype, activation=activation)
    for implementation in ("ragged", "blocked"):
        size, limit, where = compare_expert(implementation, config, jax.devices()[0])
        assert 0 < size < limit / 2, (implementation, where)


def test_float32_on_gpus_may_round_as_tf32_does():
    wide = dataclasses.replace(SMALL, dtype="float32")
    assert expert_check.rounding_limit(wide, "gpu") == pytest.approx(16 * 2**-11, rel=0.01)


@pytest.mark.parametrize("rows, sizes", CASES)
def test_the_kernels_for_hopper_take_the_cases(rows, sizes):
    """No GPU here: what the check runs on one must lower for it."""
    arrays = jax.eval_shape(lambda: draw_arrays(SMALL, rows, sizes))
    counts = jax.ShapeDtypeStruct((len(sizes),), jnp.int32)
    traced = jax.jit(of_implementation, static_argnums=(0, 1)).trace("hopper", "gelu", counts, *arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 6  # two products forward, two gradients of each


# Before a run.


RIGHT, WRONG = (0.01, 0.06, "output, row 3, is right"), (1.0, 0.06, "output, row 3, is off")
NO_ROOM = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.\nmore")
SMALL_CHIP = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 278528, available: 232448"
)


class TwoProcesses(Hosts):
    """This process and another one, whose answers the test sets."""

    def __init__(self, other: str, kept: str = "no"):
        self.answers = {"kept": kept, "check": json.dumps([other, "theirs"])}
        super().__init__()

    def gather_text(self, topic, text, seconds=300.0):
        return [text, self.answers.get(topic.split()[0], text)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    user_cache._said.clear()
    return tmp_path / "xdg" / "moe_jax" / "verdicts"


@pytest.fixture
def compared(cache, monkeypatch):
    """Return function(outcome): 'auto' is 'blocked', which is unverified; returns the list of its comparisons."""

    def make(outcome):
        asked = []

        def compare(implementation, *rest):
            asked.append(implementation)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        choose = lambda wanted, *rest: "blocked" if wanted == "auto" else wanted  # noqa: E731
        monkeypatch.setattr("moe_jax.training.program.choose_implementation", choose)
        monkeypatch.setattr(expert_check, "KERNELS", ("blocked", "hopper"))
        monkeypatch.setattr(expert_check, "compare_expert", compare)
        return asked

    return make


def session_of(folder, wanted, *changes):
    small = ("MeshConfig.expert = 2", "ModelConfig.layers = 1", f"MoEConfig.grouped_matmul = {wanted!r}")
    return tiny_run.session_of(folder, 2, *small, *changes)


def test_the_second_start_costs_nothing(tmp_path, compared, cache, monkeypatch):
    """Unless the file is damaged, or the driver or the flags are others."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64  580.65.06\nGCC version: 12\n")
    monkeypatch.setattr(expert_check, "DRIVER", driver)
    made, asked = session_of(tmp_path, "auto"), compared(RIGHT)
    settled, first = select_verified_kernels(made, Hosts())
    record = {"wanted": "auto", "compared": "blocked", "used": "blocked", "outcome": "passes", "detail": ""}
    assert settled is made and first == {"grouped_matmul": record}
    assert select_verified_kernels(made, Hosts())[1] == first and len(asked) == 1
    (file,) = cache.iterdir()
    key = json.loads(file.read_text())["key"]
    assert {"device", "platform", "jax", "jaxlib", "source", "compared"} <= set(key)
    assert key["driver"] == "NVRM version: NVIDIA UNIX x86_64  580.65.06"
    file.write_text(file.read_text()[:40])  # damaged
    assert select_verified_kernels(made, Hosts())[1] == first and len(asked) == 2
    driver.write_text("NVRM version: NVIDIA UNIX x86_64  590.10.01\n")
    select_verified_kernels(made, Hosts())
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_exhaustive_tiling_search=true")
    select_verified_kernels(made, Hosts())
    assert len(asked) == 4


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
        settled, record = select_verified_kernels(session_of(tmp_path, "auto"), Hosts())
    assert settled.config.moe.grouped_matmul == settled.model.moe.grouped_matmul == "fused"
    assert record["grouped_matmul"]["used"] == "fused" and record["grouped_matmul"]["compared"] == "blocked"
    (line,) = [record.getMessage() for record in caplog.records if "grouped_matmul" in record.getMessage()]
    assert line.startswith("MoEConfig.grouped_matmul ('auto'): 'blocked' ") and said in line and "\n" not in line
    assert line.endswith("; the run takes 'fused', which is slower")


def test_a_named_kernel_that_differs_is_refused(tmp_path, compared, cache):
    made, asked = session_of(tmp_path, "blocked"), compared(WRONG)
    with pytest.raises(UserError) as caught:
        select_verified_kernels(made, Hosts())
    assert str(caught.value) == (
        "MoEConfig.grouped_matmul ('blocked') computes something else than 'fused': output, row 3, is off; set "
        "MoEConfig.grouped_matmul = 'fused'"
    )
    with pytest.raises(UserError, match="so it was at an earlier start; delete .*json to compare again"):
        select_verified_kernels(made, Hosts())
    assert len(asked) == 1 and len(list(cache.iterdir())) == 1


def test_a_named_kernel_goes_on_unchecked_without_memory(tmp_path, compared, caplog):
    made, asked = session_of(tmp_path, "blocked"), compared(NO_ROOM)
    with caplog.at_level(logging.WARNING):
        settled, record = select_verified_kernels(made, Hosts())
    assert settled is made and record["grouped_matmul"]["outcome"] == "no memory"
    assert "the run goes on with it, unchecked" in caplog.text
    select_verified_kernels(made, Hosts())
    assert len(asked) == 2  # less may stand in the memory next time, so this is not kept


def test_a_device_that_a_kernel_ended_is_named(tmp_path, compared, monkeypatch):
    compared(jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"))
    made = session_of(tmp_path, "auto")
    monkeypatch.setattr(expert_check, "jnp", None)  # nothing computes any more
    with pytest.raises(UserError, match="ILLEGAL_ADDRESS; the device does not answer any more: give the same command"):
        select_verified_kernels(made, Hosts())


def test_all_processes_decide_by_the_worst(tmp_path, compared):
    """This process finds the kernel right; the config is changed if another one did not. All or none run a check."""
    made, asked = session_of(tmp_path, "auto"), compared(RIGHT)
    for count, other in enumerate(("differs", "fails", "no memory", "passes")):
        settled, record = select_verified_kernels(made, TwoProcesses(other))
        assert settled.config.moe.grouped_matmul == ("auto" if other == "passes" else "fused")
        assert record["grouped_matmul"]["outcome"] == other
        assert len(asked) == count + 1  # a verdict is kept here, and none there
    select_verified_kernels(made, TwoProcesses("passes", kept="yes"))
    assert len(asked) == 4


def test_without_a_cache_it_goes_on_and_says_so_once(tmp_path, compared, cache, caplog):
    cache.parent.mkdir(parents=True)
    cache.symlink_to(cache.parent)  # a link is not followed
    made, asked = session_of(tmp_path, "auto"), compared(RIGHT)
    with caplog.at_level(logging.WARNING):
        select_verified_kernels(made, Hosts())
    assert len(asked) == 1 and caplog.text.count("kernels are compared again at every start") == 1


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
    want = {"MeshConfig.devices_per_node": 8, "ModelConfig.attention": "blocks", "ModelConfig.overlap": "none"}
    want |= {"MoEConfig.grouped_matmul": "fused", "train.optimistic": False, "train.guide_scheduler": False}
    assert environment["resolved"] == want
    record = {"wanted": "auto", "compared": "blocked", "used": "fused", "outcome": "differs"}
    assert environment["compared_before_first_step"]["grouped_matmul"] == record | {"detail": "output, row 3, is off"}


def test_only_what_is_unverified_is_compared(tmp_path, cache):
    changes = ("ModelConfig.dtype = 'bfloat16'", "ModelConfig.hidden_dim = 128", "ModelConfig.model_dim = 64")
    session = session_of(tmp_path, "reference", *changes)
    for name, is_unverified in {"reference": False, "hopper": True, "ragged": False}.items():
        moe = dataclasses.replace(session.config.moe, grouped_matmul=name)
        other = dataclasses.replace(session, config=dataclasses.replace(session.config, moe=moe))
        assert [found for found, _ in expert_check.unverified(other, jax.devices()[0])] == [name] * is_unverified
        if name == "hopper":  # on a CPU
            with pytest.raises(UserError, match=r"MoEConfig.grouped_matmul \('hopper'\) fails before the first step"):
                select_verified_kernels(other, Hosts())
