"""Compile the training step of a run for devices that need not be present, and return the compiler's output.

Inputs: a RunConfig, and a target or the devices of this machine. Outputs: a `Compiled`: scheduled text, bytes per
device, seconds. The step is the one that training runs; no array is made and no data is read.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import lzma
import os
import re
import time
import zlib
from pathlib import Path

import jax
import numpy as np

from moe_jax.cluster.costs import Buckets
from moe_jax.cluster.targets import Target
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.models.counts import flops_per_token
from moe_jax.planning.placement import Placement
from moe_jax.replan.segments import build_sessions, stated_buckets
from moe_jax.training.compiling import compile_guided
from moe_jax.training.program import build_program


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The output of the compiler."""

    text: str  # the scheduled program
    memory: dict[str, int]  # bytes per device by kind
    lower_seconds: float  # tracing and lowering
    compile_seconds: float  # the compiler alone
    options: dict[str, str]  # that the compiler was given
    guided: bool  # whether its scheduler was given modelled seconds
    mesh: dict[str, int]  # axis -> size
    resolved: dict[str, str | bool]  # what 'auto' is on these devices, by binding
    plan: object  # shape of the plans that the step takes, None without a planner
    executable: object  # to run, None where the devices are not real
    common: bool  # whether it is the common program of optimistic steps
    buckets: tuple[Buckets, ...]  # of the program's exchanges
    model_flops: float  # of one step on one device, without recomputation and padding


def described_devices(target: Target) -> list:
    """Return the devices of a topology that exists as a description only, in the order of their ids.

    To be called before jax starts a backend, which it then does without a GPU although the CUDA plugin is installed.

    Raises:
      UserError: this Python has no CUDA wheels, or those of a version that no longer compiles for the target.
    """
    cuda = next((version for version in (13, 12) if importlib.util.find_spec(f"jax_cuda{version}_plugin")), None)
    if cuda is None:
        raise UserError(
            f"compiling for a GPU needs the CUDA wheels of jax, which this Python lacks: pip install "
            f"'jax[cuda13]=={jax.__version__}' (2 GB to download, 4.8 GB on disk), best in an environment of its own"
        )
    target.check_compilable(cuda)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else the compiler warns that nothing was tuned
    from jax.experimental import topologies

    shape = f"1x{target.nodes}x{target.per_node}"  # slices x hosts x devices of a host
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=target.name, topology=shape, target_config=target.config
    )
    return sorted(topology.devices, key=lambda device: device.id)


def on_target(config: RunConfig, target: Target) -> RunConfig:
    """Return the config with the target's node boundary.

    Raises:
      UserError: other device counts, nodes of another size, or no matmul of the run's dtype; the message names them.
    """
    mesh, dtype, capability = config.mesh, config.model.dtype, target.compute_capability
    wanted = mesh.data * mesh.expert_shard * max(mesh.expert, 1)
    named = f"--target={target.name}:{target.nodes}x{target.per_node}"
    if target.devices % wanted if mesh.expert == -1 else target.devices != wanted:
        expert, multiple = ("what is left", "a multiple of ") if mesh.expert == -1 else (mesh.expert, "")
        raise UserError(
            f"{named} has {target.devices} devices, but "
            f"MeshConfig.data ({mesh.data}) x expert ({expert}) x expert_shard ({mesh.expert_shard}) needs "
            f"{multiple}{wanted}; change one of them"
        )
    if mesh.devices_per_node not in (0, target.per_node):
        raise UserError(
            f"{named} has {target.per_node} devices a node, but "
            f"MeshConfig.devices_per_node is {mesh.devices_per_node}; set it to {target.per_node} or 0"
        )
    if dtype == "bfloat16" and capability and int(capability.partition(".")[0]) < 8:
        raise UserError(
            f"target {target.name!r} ({target.device_kind}) has no bfloat16 matmuls, and ModelConfig.dtype is "
            f"{dtype!r}; set ModelConfig.dtype = 'float32'"
        )
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, devices_per_node=target.per_node))


def compile_step(
    config: RunConfig, devices: list, *, skew: float, options: dict[str, str], real: bool, complete: bool = False
) -> Compiled:
    """Compile the training step; of optimistic steps the common program.

    Args:
      skew: of the loads that a planner is shown, see `skewed_loads`.
      options: compiler options besides those that training sets.
      real: whether the devices can run the program; if not, kernels are not tuned.
      complete: of optimistic steps the complete program.

    Raises:
      UserError: what training itself would refuse, or an option that the compiler does not have.
    """
    program = build_program(config, devices)
    config = program.config
    shape = planned_shapes(config, program.roles, skew)
    started = time.monotonic()
    common = not complete and program.is_optimistic(shape)
    lowered = program.trace_step(shape, common).lower()
    lowered_at = time.monotonic()
    untuned = {} if real else {"xla_gpu_autotune_level": "0"}
    options = {**untuned, **program.compiler_options(), **options}
    try:
        guide = program.guiding_target()
        buckets = stated_buckets(config, program.roles, shape)
        executable, _ = compile_guided(lowered, options, guide, buckets)
    except Exception as error:
        what = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        if what.startswith(("No such compile option", "While setting option")):
            raise UserError(
                f"--compiler_option: {what}; leave it out, or see what this jax's compiler knows"
            ) from error
        raise
    compiled_at = time.monotonic()
    length, vocab_size = config.data.sequence_length, program.model.vocab_size
    _, flops = flops_per_token(config.model, config.moe, vocab_size, length, config.lora)
    return Compiled(
        text=executable.as_text(),
        memory=memory_of(executable),
        lower_seconds=lowered_at - started,
        compile_seconds=compiled_at - lowered_at,
        options=options,
        guided=guide is not None,
        mesh=dict(program.roles.mesh.shape),
        resolved=program.resolved(),
        plan=shape,
        executable=executable if real else None,
        common=common,
        buckets=buckets,
        model_flops=flops * config.train.batch_size * config.data.sequence_length / len(devices),
    )


def planned_shapes(config: RunConfig, roles, skew: float) -> dict | None:
    """Return {segment: `PlanShape`} of the plans for loads of this skew, see `skewed_loads`; None without a planner."""
    if config.planner.name == "none":
        return None
    tokens, found = config.train.batch_size * config.data.sequence_length, {}
    for name, own in build_sessions(config, roles).items():  # after as many such steps as its predictor looks back
        loads = skewed_loads(own.start, tokens, config.moe.top_k, skew)
        found[name], _ = own.planned([loads] * own.config.window, own.config.interval)
    return found


def memory_of(executable) -> dict[str, int]:
    """Return bytes per device: arguments, outputs, outputs that reuse arguments, temporaries, and the peak of them."""
    stats = executable.memory_analysis()
    if stats is None:
        return {}
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    reused, temporaries = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    return {
        "arguments": arguments,
        "outputs": outputs,
        "reused": reused,
        "temporaries": temporaries,
        "peak": arguments + outputs - reused + temporaries,
    }


def skewed_loads(start: Placement, tokens: int, top_k: int, skew: float) -> np.ndarray:
    """Return made-up counts int64 [L, D, E] of one step's tokens: the expert of rank r gets a share of (r + 1)^-skew.

    The order of the experts differs from layer to layer and is the same in every run of the command; all sources are
    alike, and each layer's counts add up to K times the tokens.
    """
    layers, experts, sources = start.layers, start.experts, start.devices
    share = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    choices = tokens * top_k // sources
    counts = np.floor(choices * share / share.sum()).astype(np.int64)
    counts[: choices - counts.sum()] += 1
    order = np.random.default_rng(0)
    rows = [counts[order.permutation(experts)] for _ in range(layers)]
    return np.repeat(np.stack(rows)[:, None], sources, axis=1)


def read_text(path: str) -> str:
    """Return a saved schedule."""
    try:
        data = Path(path).read_bytes()
        packed = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(Path(path).suffix, bytes)
        return packed(data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"--hlo ({path!r}) cannot be read: {error}") from error


def without_places(text: str) -> str:
    """Return a schedule without the tables of source files and lines, which name this machine's folders."""
    text = re.sub(r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", "\n", text)
    places = ("stack_frame_id", "source_line", "source_end_line", "source_column", "source_end_column")
    return re.sub(rf" (?:{'|'.join(places)})=\d+| source_file=\"[^\"]*\"", "", text)
