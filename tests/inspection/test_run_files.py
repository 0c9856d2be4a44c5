"""Each run file as a GPU takes it: every 'auto' and default resolved for one, and both programs of its step traced.

The devices are stand-ins that say what a GPU says of itself, so nothing here needs one, or the CUDA wheels, but the
tests marked gpu_compile.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
from unittest import mock

import pytest
from support.tiny_run import BINDINGS, write_corpus
from support.traced_programs import jaxprs_in

from moe_jax.analysis import compile_ahead
from moe_jax.cluster.targets import parse_target
from moe_jax.config.gin_files import parse_run_config
from moe_jax.training.hosts import Hosts
from moe_jax.training.program import Program, build_program
from moe_jax.training.run import run

ROOT = pathlib.Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "configs" / "run").glob("*.gin"))
# with these a Hopper GPU takes cuDNN's attention and the Hopper kernels
SIZES = ("ModelConfig.dtype = 'bfloat16'", "ModelConfig.model_dim = 128", "ModelConfig.hidden_dim = 128")
OWN = {"gpt_moe_s_h200": ("ModelConfig.layers = 2", "ModelConfig.model_dim = 768", "ModelConfig.hidden_dim = 1536")}


@dataclasses.dataclass(frozen=True, eq=False)
class StandIn:
    """What a program reads of a device before it is lowered."""

    id: int
    process_index: int
    device_kind: str
    compute_capability: str
    platform: str = "cuda"
    client: None = None


def stand_ins(target):
    return [StandIn(i, i // target.per_node, target.device, target.compute_capability) for i in range(target.devices)]


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """The folder of a run of mos_teacher.gin with one step of small layers."""
    folder = tmp_path_factory.mktemp("mos")
    small = [binding for binding in BINDINGS if "length" not in binding]
    small += ["train.steps = 1", "train.evaluate_every = 0", "ModelConfig.dtype = 'bfloat16'"]
    small += [write_corpus(folder / "corpus"), f"DataConfig.cache_dir = {str(folder / 'cache')!r}"]
    config, text, operative = parse_run_config([str(ROOT / "configs/run/mos_teacher.gin")], small)
    assert run(config, text, operative, Hosts(), workdir=str(folder / "run"))
    return folder / "run"


def bindings_of(name, request):
    """Return the bindings of a run file's small model."""
    taught = [f"DistillationConfig.teacher = {str(request.getfixturevalue('teacher'))!r}"] if name == "mos" else []
    return [*SIZES, *OWN.get(name, ()), *taught]


def file_of(name):
    return str(ROOT / f"configs/run/{name}.gin")


def primitives_of(traced):
    """Return the names of all primitives of a traced program."""
    return [equation.primitive.name for jaxpr in jaxprs_in(traced.jaxpr.jaxpr) for equation in jaxpr.eqns]


@pytest.fixture
def cudnn(monkeypatch):
    """JAX asks the CUDA wheels for their cuDNN while it traces a call of it."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def inspected(config, devices):
    """Return (program, shape, common) of the step that `moe_jax.inspect` traces for these devices."""
    stop = mock.patch.object(Program, "trace_step", autospec=True, side_effect=RuntimeError("traced"))
    with stop as traced, pytest.raises(RuntimeError, match="traced"):
        compile_ahead.compile_step(config, devices, skew=1.0, options={}, real=False)
    return traced.call_args.args


@pytest.mark.parametrize("name", NAMES)
def test_both_programs_are_traced_as_on_gpus(name, request, cudnn):
    target = parse_target("h200:4x8" if name == "gpt_moe_s_h200" else "h200:2x4")
    config = compile_ahead.on_target(parse_run_config([file_of(name)], bindings_of(name, request))[0], target)
    of_inspect, shape, starts_common = inspected(config, stand_ins(target))
    program = build_program(config, stand_ins(target))  # as training builds it
    assert program.resolved() == of_inspect.resolved()
    overflows = config.moe.capacity_factor is None
    assert program.resolved() == {
        "ModelConfig.attention": "cudnn",
        "ModelConfig.overlap": "halves" if name == "gpt_moe_s_h200" else "none",
        "MoEConfig.grouped_matmul": "hopper",
        "train.optimistic": overflows,
        "train.guide_scheduler": True,
    }
    assert program.is_optimistic(shape) == starts_common == overflows
    complete = primitives_of(program.trace_step(shape))
    assert "dot_product_attention_bwd_wrapper" in complete  # cuDNN's
    assert "wgmma_ref" in complete  # of the Hopper kernels
    if overflows:
        common = primitives_of(program.trace_step(shape, common=True))
        assert common.count("cond") < complete.count("cond")


# what a run file needs on other meshes than the one of its own: experts and rows for all devices
MESHES = {
    "h200:4x8": ("MoEConfig.num_experts = 32", "train.batch_size = 64"),
    "h100:1x8": ("MeshConfig.expert = 8",),
    "a100:2x4": ("MeshConfig.expert = 8",),
}


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", ["demo", "hecate", "pro_prophet", "gpt_moe_s_h200"])
@pytest.mark.parametrize("target", MESHES)
def test_run_files_compile_for_gpus(target, name, tmp_path, request):
    """Both programs by the compiler; its described devices and the stand-ins resolve alike."""
    described = parse_target(target)
    bindings = [*bindings_of(name, request), *MESHES[target], f"MeshConfig.devices_per_node = {described.per_node}"]
    config = compile_ahead.on_target(parse_run_config([file_of(name)], bindings)[0], described)
    flags = [f"--gin_bindings={binding}" for binding in bindings]
    flags += [f"--gin_file={file_of(name)}", "--complete", f"--target={target}", f"--out={tmp_path}"]
    command = [sys.executable, "-m", "moe_jax.inspect", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    program = build_program(config, stand_ins(described))
    assert report["resolved"] == program.resolved()
    assert report["program"] == "common" and report["overflow"]["complete_seconds"] > 0
