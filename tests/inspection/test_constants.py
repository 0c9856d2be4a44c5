"""Constants of the model: fitted to kernels whose times are known, read from files, refused if they make no sense."""

import dataclasses
import json
import random

import pytest
from support.toy import BRANCH, MODEL, TARGET

from moe_jax.analysis.measured import fit_constants
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.timeline import Model, play, read_constants
from moe_jax.errors import UserError


def samples_of(model):
    """Kernels as a device with these constants runs them, and some that are ten times slower for no reason."""
    rng = random.Random(0)
    found = []
    for place in range(60):
        matmul = rng.uniform(1e-4, 1e-3) if place % 3 == 0 else 0.0
        memory = {0: 1e-5, 1: rng.uniform(3e-5, 3e-4), 2: 1e-8}[place % 3]
        took = max(matmul / model.matmul_efficiency, memory / model.memory_efficiency, model.launch)
        slow = 10 if place in (1, 2) else 1
        found.append((matmul, memory, took * slow, 1 + place % 4))
    return found


def test_fit_finds_the_constants_of_a_device():
    real = Model(matmul_efficiency=0.55, memory_efficiency=0.9, launch=3.5e-6, conditional=2e-5)
    fit = fit_constants(samples_of(real), Model(), pauses=[2e-5 + 2e-6] * 5)
    assert {name: own["value"] for name, own in fit.items()} == pytest.approx(dataclasses.asdict(real))
    assert fit["launch"]["before"] == Model().launch and fit["launch"]["samples"] == 20


def test_fit_without_samples_says_so():
    fit = fit_constants([], Model())
    assert fit["conditional"] == {"value": None, "before": 0.0, "samples": 0, "quartiles": None}


@pytest.mark.parametrize("wrap", [lambda record: record, lambda record: {"schema": 1, "constants": record}])
def test_read_constants_of_a_file_and_of_a_report(tmp_path, wrap):
    path = tmp_path / "constants.json"
    path.write_text(json.dumps(wrap({"matmul_efficiency": 0.5, "conditional": 1e-5})))
    assert read_constants(str(path)) == Model(matmul_efficiency=0.5, conditional=1e-5)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{}", "holds no constants; write some of matmul_efficiency, memory_efficiency, launch, conditional"),
        ('{"launches": 1}', "names 'launches'; the model has"),
        ('{"memory_efficiency": 1.5}', "memory_efficiency (1.5) must be a share above 0 and at most 1"),
    ],
)
def test_bad_constants_are_one_line(tmp_path, text, message):
    path = tmp_path / "constants.json"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_constants(str(path))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_conditional_costs_what_the_model_says():
    module = parse_module(BRANCH)
    assert play(module, TARGET, MODEL).seconds == 0
    assert play(module, TARGET, dataclasses.replace(MODEL, conditional=3.0)).seconds == 3.0
