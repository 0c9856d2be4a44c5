"""Run files as a GPU takes it: every 'auto' and default resolved for one, and both programs of its step traced.

The devices are stand-ins that say what a GPU says of itself, so nothing here needs one, or the CUDA wheels.
"""

import dataclasses
import pathlib

import pytest
from support.traced_programs import jaxprs_in

from moe_jax.analysis import compile_ahead
from moe_jax.cluster.targets import parse_target
from moe_jax.config import parse_run_config
from moe_jax.training.program import Program, build_program

ROOT = pathlib.Path(__file__).parents[2]
# one of each kind of schedule, planner and router; golden tests run every file
NAMES = ("deepseek_moe", "fastermoe", "gpt_moe_s_h200", "gshard", "hecate", "parm", "pr_moe")
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


def primitives_of(traced):
    """Return the names of all primitives of a traced program."""
    return [equation.primitive.name for jaxpr in jaxprs_in(traced.jaxpr.jaxpr) for equation in jaxpr.eqns]


@pytest.fixture
def cudnn(monkeypatch):
    """JAX asks the CUDA wheels for their cuDNN while it traces a call of it."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def inspected(monkeypatch, config, devices):
    """Return (program, shape, common) of the step that `moe_jax.inspect` traces for these devices."""
    found = []

    class Stopped(Exception):
        pass

    def stop(*traced):
        found.append(traced)
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Program, "trace_step", stop)
        compile_ahead.compile_step(config, devices, skew=1.0, options={}, real=False)
    return found[0]


@pytest.mark.parametrize("name", NAMES)
def test_both_programs_are_traced_as_on_gpus(name, cudnn, monkeypatch):
    target = parse_target("h200:4x8" if name == "gpt_moe_s_h200" else "h200:2x4")
    config = parse_run_config([str(ROOT / f"configs/run/{name}.gin")], [*SIZES, *OWN.get(name, ())])[0]
    config = compile_ahead.on_target(config, target)
    of_inspect, shape, starts_common = inspected(monkeypatch, config, stand_ins(target))
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
