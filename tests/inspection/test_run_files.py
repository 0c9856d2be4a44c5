"""Each run file as a GPU takes it: every 'auto' resolved for one, and its step traced, plain and with more.

The devices are stand-ins that say what a GPU says of itself, so nothing here needs one. The tests marked gpu_compile
compile ahead of time by the real compiler: `bash scripts/test.sh --gpu-compile` runs them.
"""

import dataclasses
import itertools
import json
import pathlib
import re
import subprocess
import sys
from unittest import mock

import pytest
from support.marks import slow_but
from support.tiny_run import BINDINGS, write_corpus
from support.traced_programs import jaxprs_in

from moe_jax.analysis import compile_ahead
from moe_jax.cluster.targets import parse_target, read_device, target_names
from moe_jax.config.gin_files import parse_run_config
from moe_jax.jobs.hosts import Hosts
from moe_jax.training.program import Program, build_program
from moe_jax.training.run import run

ROOT = pathlib.Path(__file__).parents[2]
FILES = {path.stem: str(path) for path in sorted((ROOT / "configs" / "run").glob("*.gin"))}
# with these a Hopper GPU takes cuDNN's attention and the Hopper kernels
SIZES = ("ModelConfig.dtype = 'bfloat16'", "ModelConfig.model_dim = 128", "ModelConfig.hidden_dim = 128")
# the files whose layers are left in one piece: by their schedule, teacher or gate
WHOLE = ("base", "fastermoe", "gshard", "mos", "topology")
ON = ("gpt_moe_s_h200", "qwen3_30b_h100")  # the files that set all three themselves
# the files whose programs differ by more than a planner or a gate
TRACED = ("gpt_moe_s_h200", "hecate", "parm", "fastermoe", "deepseek_moe")
WANTED = ("as it says", "all three on")
QUICK = [(WANTED[at % 2], name) for at, name in enumerate(TRACED)]
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
    return [
        StandIn(i, i // target.per_node, target.device_kind, target.compute_capability) for i in range(target.devices)
    ]


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """The folder of a run of mos_teacher.gin with one step of small layers."""
    folder = tmp_path_factory.mktemp("mos")
    small = [binding for binding in BINDINGS if "length" not in binding]
    small += ["train.steps = 1", "train.evaluate_every = 0", "ModelConfig.dtype = 'bfloat16'"]
    small += [write_corpus(folder / "corpus"), f"DataConfig.cache_dir = {str(folder / 'cache')!r}"]
    config, text = parse_run_config([FILES["mos_teacher"]], small)
    assert run(config, text, Hosts(), workdir=str(folder / "run"))
    return folder / "run"


def all_three(overlap):
    """Return the bindings of what is off by default."""
    return "train.optimistic = True", "train.guide_scheduler = True", f"ModelConfig.overlap = {overlap!r}"


def bindings_of(name, request):
    """Return the bindings of a run file's small model."""
    taught = [f"DistillationConfig.teacher = {str(request.getfixturevalue('teacher'))!r}"] if name == "mos" else []
    return [*SIZES, *OWN.get(name, ()), *taught]


def primitives_of(traced):
    """Return the names of all primitives of a traced program."""
    return [equation.primitive.name for jaxpr in jaxprs_in(traced.jaxpr.jaxpr) for equation in jaxpr.eqns]


@pytest.fixture
def cudnn(monkeypatch):
    """JAX asks the CUDA wheels for their cuDNN while it traces a call of it."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def program_of(wanted, name, request):
    """Return (program as training builds it for GPUs, its config, whether steps start without later passes)."""
    target = parse_target("h200:4x8" if name == "gpt_moe_s_h200" else "h200:2x4")
    overlap, on = "none" if name in WHOLE else "halves", wanted == "all three on" or name in ON
    bindings = [*bindings_of(name, request), *(all_three(overlap) if wanted == "all three on" else ())]
    config = compile_ahead.on_target(parse_run_config([FILES[name]], bindings)[0], target)
    return build_program(config, stand_ins(target)), config, on and config.moe.capacity_factor is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("wanted", WANTED)
def test_auto_is_resolved_as_on_gpus(wanted, name, request):
    """What a step starts with as the file says, which is plain but for two; and with all three on."""
    program, config, optimistic = program_of(wanted, name, request)
    on = wanted == "all three on" or name in ON
    assert program.resolved() == {
        "ModelConfig.attention": "cudnn",
        "ModelConfig.overlap": "halves" if on and name not in WHOLE else "none",
        "MoEConfig.grouped_matmul": "hopper",
        "train.optimistic": optimistic,
        "train.guide_scheduler": on,
    }
    stop = mock.patch.object(Program, "trace_step", autospec=True, side_effect=RuntimeError("traced"))
    with stop as traced, pytest.raises(RuntimeError, match="traced"):
        compile_ahead.compile_step(config, program.devices, skew=1.0, options={}, real=False)
    of_inspect, shape, starts_common = traced.call_args.args
    assert program.resolved() == of_inspect.resolved()
    assert program.is_optimistic(shape) == starts_common == optimistic


@pytest.mark.parametrize(("wanted", "name"), slow_but(list(itertools.product(WANTED, FILES)), *QUICK))
def test_programs_are_traced_as_on_gpus(wanted, name, request, cudnn):
    program, config, optimistic = program_of(wanted, name, request)
    shape = compile_ahead.planned_shapes(config, program.roles, 1.0)
    starts = primitives_of(program.trace_step(shape, optimistic))
    assert "dot_product_attention_bwd_wrapper" in starts  # cuDNN's
    assert "wgmma_ref" in starts  # of the Hopper kernels
    if wanted == "all three on" and optimistic:
        assert starts.count("cond") < primitives_of(program.trace_step(shape)).count("cond")


def reported(target, folder, *bindings, flags=()):
    """Return (report, stderr) of the command; a crash of the compiler ends a process of its own."""
    bound = [f"--gin_bindings={binding}" for binding in bindings]
    command = [sys.executable, "-m", "moe_jax.inspect", *bound, f"--target={target}", f"--out={folder}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "report.json").read_text()), done.stderr


# what a run file needs on other meshes than the one of its own: experts and rows for all devices
MESHES = {
    "h200:4x8": ("MoEConfig.num_experts = 32", "train.batch_size = 64"),
    "h100:1x8": ("MeshConfig.expert = 8", "MeshConfig.data = 1"),
    "a100:2x4": ("MeshConfig.expert = 8", "MeshConfig.data = 1"),
}


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", ["demo", "hecate", "pro_prophet", "gpt_moe_s_h200"])
@pytest.mark.parametrize("target", MESHES)
def test_run_files_compile_for_gpus(target, name, tmp_path, request):
    """Both programs by the compiler; its described devices and the stand-ins resolve alike."""
    described = parse_target(target)
    on = all_three("halves" if name == "gpt_moe_s_h200" else "none")
    bindings = [*bindings_of(name, request), *MESHES[target], *on]
    bindings.append(f"MeshConfig.devices_per_node = {described.per_node}")
    config = compile_ahead.on_target(parse_run_config([FILES[name]], bindings)[0], described)
    report, _ = reported(target, tmp_path, *bindings, flags=(f"--gin_file={FILES[name]}", "--complete"))
    program = build_program(config, stand_ins(described))
    assert report["resolved"] == program.resolved()
    assert report["program"] == "common" and report["overflow"]["complete_seconds"] > 0


WORDS = ("Found", "Missing")  # of XLA, after it looked the program's instructions up in the profile
TINY = (
    "ModelConfig.layers = 3", "ModelConfig.model_dim = 64", "ModelConfig.heads = 2", "ModelConfig.hidden_dim = 128",
    "ModelConfig.dtype = 'bfloat16'", "ModelConfig.vocab_size = 256", "ModelConfig.max_length = 64",
    "ModelConfig.loss_chunk = 64", "MoEConfig.num_experts = 8", "DataConfig.sequence_length = 64",
    "train.batch_size = 8", *all_three("none"),
)  # fmt: skip
# what lays the step out in another way, around the call of cuDNN
FORMS = {
    "prefetch": ("ModelConfig.prefetch = 'hecate'", "PlannerConfig.name = 'hecate'", "PlannerConfig.replica_slots = 2",
                 "Hecate.overlap_degree = 2", "PlannerConfig.must_pay = False",
                 "PlannerConfig.cluster = 'configs/cluster/host_devices.gin'"),
    "model and sequence parallel": ("MeshConfig.model = 2", "ModelConfig.sequence_parallel = True"),
    "every second block, dots": ("ModelConfig.layers = 4", "ModelConfig.moe_every = 2", "ModelConfig.remat = 'dots'"),
    "block, ZeRO-3, microbatches": ("ModelConfig.remat = 'block'", "train.zero_stage = 3",
                 "train.grad_accum_steps = 2"),
    "bert": ("ModelConfig.kind = 'bert'", "ModelConfig.positions = 'rotary'", "ModelConfig.activation = 'swiglu'"),
    "documents, prefetch": ("ModelConfig.document_mask = True", "ModelConfig.prefetch = 'hecate'"),
    "unrolled": ("ModelConfig.stack = 'unrolled'",),  # else a scan, in which jax 0.11.2 crashed on cudnn
    "pairwise": ("MoEConfig.schedule = 'pairwise'",),
    "dp": ("MoEConfig.schedule = 'dp'", "MeshConfig.data = 4", "MeshConfig.expert = 1", "train.expert_zero_stage = 3"),
}  # fmt: skip


def inspect(target, folder, *bindings, flags=()):
    """Return the report of the command for the tiny model."""
    report, said = reported(target, folder, *TINY, *bindings, flags=flags)
    assert report["unknown_calls"] == {} and report["unknown_loops"] == []
    hopper = target.startswith(("h100", "h200")) and "ModelConfig.dtype = 'float32'" not in bindings
    assert hopper != bool(report["assumed_turns"])  # elsewhere experts are loops over row blocks, whose turns are data
    if report["guided_scheduler"]:
        assert "had little effect" not in said
        found, missed = (re.search(rf"{word} (\d+) instructions from the profile", said) for word in WORDS)
        # loops whose turns are known compare nothing, and their comparisons have no cost
        assert int(found.group(1)) > 20 * int(missed.group(1) if missed else 0)
    return report


@pytest.mark.gpu_compile
@pytest.mark.parametrize("device", [name for name in target_names() if read_device(name).dropped_by_cuda is None])
def test_the_training_step_compiles_for_a_topology(device, tmp_path):
    turing = device == "2080ti"  # no bfloat16
    report = inspect(f"{device}:2x2", tmp_path, *(["ModelConfig.dtype = 'float32'"] if turing else []))
    assert report["compile_seconds"] > 0 and report["guided_scheduler"]
    memory = report["memory"]
    # parameters and two moments in float32, over 4 devices, and nothing twice: outputs take the arguments' place
    assert memory["arguments"] > 0 and memory["reused"] > 0.9 * memory["outputs"]
    assert memory["peak"] == memory["arguments"] + memory["outputs"] - memory["reused"] + memory["temporaries"]
    # dispatch and combine, forward and backward, in each of 3 layers, and their counts
    exchanges = [r for r in report["collectives"] if r["role"] == "all-to-all"]
    assert sum(r["executions"] for r in exchanges if r["bytes"] == 4 * 96 * 64 * (4 if turing else 2)) == 4 * 3
    # those that have nothing to stand next to the compiler makes synchronous (jax 0.12: one, on 2080ti)
    assert any(r["asynchronous"] for r in exchanges)


@pytest.mark.gpu_compile
def test_a_domain_of_72_devices_is_a_node(tmp_path):
    report = inspect("gb200:1x72", tmp_path, "MoEConfig.num_experts = 72", "train.batch_size = 72")
    exchanges = [r for r in report["collectives"] if r["role"] == "all-to-all"]
    assert exchanges and {(r["group_size"], r["nodes_of_a_group"]) for r in exchanges} == {(72, 1)}


@pytest.mark.gpu_compile
@pytest.mark.parametrize("form", FORMS)
def test_default_attention_compiles_in_every_form(form, tmp_path):
    report = inspect("h200:1x4", tmp_path, *FORMS[form])
    assert report["resolved"]["ModelConfig.attention"] == "cudnn"
    # packed documents are a bias to cuDNN
    assert re.search(
        r"__cudnn\$fmha(ScaleBias)?SoftmaxBackward", compile_ahead.read_text(str(tmp_path / "schedule.hlo.gz"))
    )


def test_training_guides_the_scheduler_by_the_rows_that_inspect_expects(request, monkeypatch):
    program, config, _ = program_of("all three on", "hecate", request)
    shape = compile_ahead.planned_shapes(config, program.roles, 1.0)
    handed = mock.Mock(side_effect=RuntimeError("asked"))
    monkeypatch.setattr(Program, "trace_step", mock.Mock())
    monkeypatch.setattr("moe_jax.training.program.compile_for_all", handed)
    monkeypatch.setattr(compile_ahead, "compile_guided", handed)
    with pytest.raises(RuntimeError, match="asked"):
        program.compile_step(shape)
    with pytest.raises(RuntimeError, match="asked"):
        compile_ahead.compile_step(config, program.devices, skew=1.0, options={}, real=True)
    of_training, of_inspect = (call.args[-1] for call in handed.call_args_list)
    assert of_training == of_inspect and of_training[0].used < 1
