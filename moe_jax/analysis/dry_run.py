"""A run described as text: resolved config, mesh, parameters, bytes per device, FLOPs per token.

Sizes are checked as a run checks them, but no data is read, no array is made and no device is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax.numpy as jnp

from moe_jax.analysis.memory import Needs, count_bytes, lay_out, verdict
from moe_jax.cluster import cluster_named, cluster_of
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import Target
from moe_jax.config.run_config import BOUND, RunConfig, config_text
from moe_jax.kernels.float8 import E4M3
from moe_jax.models import LanguageModel
from moe_jax.models.attention import missing_for_cudnn, resolve_attention
from moe_jax.models.config import segments_of, with_experts
from moe_jax.models.counts import flops_per_token, parameter_counts
from moe_jax.models.model_group import rows_of
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.schedule import build_schedule
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.block_schedule import Prefetch, stage_seconds
from moe_jax.replan.costs import base_cost, layer_times
from moe_jax.replan.segments import segment_runs
from moe_jax.replan.session import PlanSession
from moe_jax.training.frozen_models import open_teacher

MORE_KERNELS = 75  # of one layer in two halves, both ways: (2,061 - 1,164) / 12 on GPT-MoE-S, compiled for H200
OPTIMIZER_STATES = {
    "adamw": "AdamW, two moments",
    "muon": "Muon, momentum of hidden matrices, two moments of the rest",
}
GROUP_NAMES = {
    "embedding": "embeddings",
    "attention": "attention matrices",
    "feed_forward": "dense FFN matrices",
    "shared_experts": "shared experts",
    "gate": "gates",
    "norm": "norms",
    "bias": "biases",
    "experts": "experts",
}


def dry_run(
    run: RunConfig, devices: int | None = None, target: str = "", bound: Collection[str] = (), everything: bool = False
) -> str:
    """Describe a run: whether the devices have the memory for it, and what to change, comes first.

    Args:
      run: the config.
      devices: devices that the run will have, from --host_devices; None takes the product of the mesh's sizes, with
        the least `expert` that works where that is -1.
      target: DEVICE:NODESxDEVICES that the run is for, as `python -m moe_jax.inspect` takes it: their number and node
        size, and what each 'auto' is there. '' describes a run on CPU devices.
      bound: the bindings that the user set, which are marked as in config.gin.
      everything: show the bindings that are defaults too.

    Raises:
      UserError: sizes that do not fit together, as the run itself would raise it.
    """
    plan = lay_out(run, devices, target)
    given, run, roles, described, teacher = run, plan.run, plan.roles, plan.target, plan.teacher
    needs = count_bytes(plan)
    shown = config_text(run, bound).splitlines()
    if not everything:
        shown = [line for line in shown if line.endswith(BOUND)] + [f"{len(shown)} bindings in all: --all"]
    sections = {
        "Memory": [verdict(plan, needs.held.total, given)],
        "Config": shown,
        "Choices": _choice_lines(run, roles, described, plan.end_id, plan.sessions),
        "Mesh": _mesh_lines(run, roles, given=devices is not None or plan.target is not None),
        "Segments": _segment_lines(run, roles),
        "Schedule": _schedule_lines(run, roles),
        "Parameters": _parameter_lines(run, plan.vocab_size),
        "Teacher": _teacher_lines(run, teacher) if teacher else [],
        "Bytes on each device": _byte_lines(run, needs),
        "FLOPs": _flop_lines(run, roles, plan.vocab_size, teacher),
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items() if lines) + "\n"


def _choice_lines(
    run: RunConfig, roles: Roles, target: Target | None, end_id: int, sessions: dict[str, PlanSession]
) -> list[str]:
    """Say what attention is on the target (or without one on CPU devices and on GPUs), what a layer would take in two
    halves, what id keeps packed documents apart, by what prices, and what the planner derives for each segment."""
    wanted = run.model
    line = f"ModelConfig.attention {wanted.attention!r}"
    if wanted.attention == "auto":
        reason = missing_for_cudnn(wanted, target)
        if target is None:
            on_gpus = f"and on GPUs: {reason}" if reason else "'cudnn' on GPUs that have it, see --target"
            line += f" is 'blocks' on CPU devices, {on_gpus}"
        else:
            resolved = resolve_attention(wanted, target).attention
            line += f" is {resolved!r} on {target.device}{reason and f': {reason}'}"
    lines = [line]
    if wanted.document_mask:
        apart = f"a document ends with the id {end_id}" if run.data.kind == "text" else "a document is a conversation"
        lines.append(f"ModelConfig.document_mask True: {apart}; its mask counts as activations")
    lines.append(f"ModelConfig.overlap {wanted.overlap!r}")
    # inside a node the compiler hides exchanges by itself; tokens that compete for places have to be gated together
    halves = roles.members_per_node < roles.size(roles.expert) and run.moe.dropless
    for name, own in segment_runs(run, roles).items() if target and halves else ():
        in_one_piece, in_halves = compare_halves(*own, target)
        lines.append(
            f"modelled by middle prices, even loads, an MoE block of {name}, forward and backward: "
            f"{1e3 * in_one_piece:.3g} ms in one piece, {1e3 * in_halves:.3g} ms in two halves"
        )
    cluster = cluster_named(run.planner.cluster or run.moe.cluster, roles.device_kind)
    lines.append(f"prices of {cluster.name}: {cluster.basis()}")
    for name, session in sessions.items():
        remark = session.planner.remark(session.cost)
        lines += [f"PlannerConfig.name {run.planner.name!r} for {name}: {remark}"] if remark else []
    return lines


def compare_halves(config: RunConfig, roles: Roles, target: Target) -> tuple[float, float]:
    """Return the modelled seconds of one layer of a segment under even loads, forward and backward: in one piece, and
    in two halves with their launches, as `timeline.Constants` has them. config, roles: `segment_runs`.
    """
    prices = Prices(target)
    times = layer_times(config, roles, base_cost(config, roles, cluster_of(prices)))
    launches, recompute = MORE_KERNELS * prices.launch, config.model.recomputes
    in_one_piece, in_halves = (
        float(stage_seconds(Prefetch(halves=halves), times, recompute)) for halves in (False, True)
    )
    return in_one_piece, in_halves + launches


def _mesh_lines(run: RunConfig, roles: Roles, given: bool) -> list[str]:
    mesh, resolved = run.mesh, roles.config
    lines = [
        f"{roles.num_devices} devices = data {resolved.data} x expert {resolved.expert} x expert_shard "
        f"{resolved.expert_shard}; model {resolved.model}; {resolved.devices_per_node} devices a node",
        "axes, slowest first: " + ", ".join(f"{axis} {size}" for axis, size in roles.mesh.shape.items()),
    ]
    for name in ("data", "expert", "expert_shard", "model", "dense"):
        axes = getattr(roles, name)
        title = "dense data parallel" if name == "dense" else name
        lines.append(f"{title:20} {roles.size(axes):5}  over {' x '.join(axes) or 'no axis'}")
    sequences = run.train.microbatch_size
    if (filled := rows_of(run.model, roles, sequences) * roles.size(roles.dense)) > sequences:
        lines.append(
            f"{filled - sequences} of {filled} sequences of a microbatch are padding: devices hold as many each"
        )
    for own, own_roles in segment_runs(run, roles).values():
        if own.moe.num_experts % (members := own_roles.size(own_roles.expert)):
            most = own_roles.most_homes(own.moe.num_experts)
            lines.append(f"{own.moe.num_experts} experts at home on {members} devices, {most - 1} or {most} on each")
    if not mesh.devices_per_node:
        lines.append(
            "a node is all of them here; a run on several hosts takes the devices of a host, because "
            "MeshConfig.devices_per_node = 0"
        )
    if mesh.expert == -1 and not given:
        lines.append(
            f"assumed: MeshConfig.expert = {resolved.expert}, so {roles.num_devices} device(s), because "
            "MeshConfig.expert = -1 takes the devices that are left and none were counted; give --host_devices=N or "
            "MeshConfig.expert"
        )
    return lines


def _segment_lines(run: RunConfig, roles: Roles) -> list[str]:
    """Say of which runs of equal units a model is made, and how each one's experts lie; nothing of a single one."""
    segments, lines, first = segments_of(run.model, run.moe), [], 0
    for segment in segments:
        config, own = segment.config, segment.roles(roles)
        what = f"dense, hidden dim {config.ffn_dim}"
        if segment.has_experts:
            what = (
                f"{config.moe_layers} MoE layers, {segment.moe.top_k} of {segment.moe.num_experts} experts, hidden dim "
                f"{config.hidden_dim}; expert parallel {own.size(own.expert)}, data parallel {own.size(own.data)}"
            )
        lines.append(f"blocks {first} to {first + config.layers - 1}: {what}")
        first += config.layers
    return lines if len(segments) > 1 else []


def _schedule_lines(run: RunConfig, roles: Roles) -> list[str]:
    """Say whether rows travel in float8, and what the schedule chooses for itself before there is a plan with buckets
    of its own, and by what; nothing of those that choose nothing."""
    lines, runs = [], segment_runs(run, roles)
    for name, (own, own_roles) in runs.items():
        moe, model, said = own.moe, own.model, []
        item = jnp.dtype(model.dtype).itemsize
        if moe.dispatch_dtype == E4M3:
            said.append(
                f"rows travel to experts in {E4M3}, {moe.sent_bytes(model.model_dim)} bytes each instead of "
                f"{model.model_dim * item}; back, and their gradients, in {model.dtype}"
            )
        tokens = rows_of(model, own_roles, own.train.microbatch_size) * own.data.sequence_length  # of an MP group
        tokens //= 2 if model.overlap == "halves" else 1
        sizes = layer_sizes(moe, own_roles, tokens, None, model.model_dim, item)
        sizes = dataclasses.replace(sizes, split_tokens=model.sequence_parallel)
        said += build_schedule(moe.schedule, own_roles, sizes).notes
        lines += [f"{name}: {line}" if len(runs) > 1 else line for line in said]
    return lines


def _parameter_lines(run: RunConfig, vocab_size: int) -> list[str]:
    total, active, as_papers, by_group = parameter_counts(run.model, run.moe, vocab_size)
    layers = with_experts(segments_of(run.model, run.moe))
    chosen = ", ".join(dict.fromkeys(f"{layer.moe.top_k} of {layer.moe.num_experts}" for layer in layers))
    lines = [
        f"{'total':22}{total:>20,}  {billions(total)}",
        f"{'active per token':22}{active:>20,}  {billions(active)}  ({chosen} experts)",
        f"{'as the papers count':22}{as_papers:>20,}  {billions(as_papers)}  "
        "(without embeddings, biases, gates and norms)",
        "of the total:",
    ]
    return lines + [f"  {GROUP_NAMES[name]:20}{size:>20,}" for name, size in by_group.items() if size]


def _teacher_lines(run: RunConfig, teacher: LanguageModel) -> list[str]:
    """Say which teacher a student has, and how large it is."""
    config = run.distillation
    total, active, *_ = parameter_counts(teacher.config, teacher.moe, teacher.vocab_size)
    until = "in all steps" if config.until is None else f"up to step {config.until}, then it leaves the memory"
    return [
        f"{config.teacher}, step {open_teacher(config)[2]}, {until}",
        f"loss of a token CE + {config.alpha:g} KL(teacher || student)",
        f"{'layers':22}{teacher.config.layers:>20,}  (student {run.model.layers})",
        f"{'parameters':22}{total:>20,}  {billions(total)}",
        f"{'active per token':22}{active:>20,}  {billions(active)}",
    ]


def billions(number: float) -> str:
    """Return a count of parameters in billions or millions, to two places."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _byte_lines(run: RunConfig, needs: Needs) -> list[str]:
    train, dtype, held = run.train, run.model.param_dtype, needs.held
    first_moment = f", first moment {train.first_moment_dtype}" if train.first_moment_dtype else ""
    rows = [
        ("parameters", held.parameters, f"{run.model.dtype}, adapters {dtype}" if run.lora.rank else dtype),
        ("optimizer state", held.optimizer, f"{OPTIMIZER_STATES[train.optimizer]}, {dtype}{first_moment}"),
        ("averaged parameters", held.ema, f"train.ema_decay {train.ema_decay}, {dtype}"),
        ("gradients", held.gradients, dtype),
        ("cast and gathered", held.compute_weights, f"weights cast to {run.model.dtype} or gathered by ZeRO-3"),
        ("activations", held.activations, f"estimate, remat {run.model.remat!r}, attention {needs.attention!r}"),
        ("replicas", held.replicas, f"planner {run.planner.name!r}, parameters and gradients of the layers alive"),
        ("overflow passes", held.overflow, "what later passes hold where buckets may be too small"),
        ("teacher", held.teacher, "its parameters and one layer's forward, estimate"),
        ("sum", held.total, "without other temporaries and buffers of collectives"),
    ]
    lines = [needs.stages]
    for name, size, note in rows:
        if size or name not in ("averaged parameters", "teacher"):
            binary = f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
            lines.append(f"{name:22}{size:>20,}  {binary}  ({note})")
    return lines


def _flop_lines(run: RunConfig, roles: Roles, vocab_size: int, teacher: LanguageModel | None) -> list[str]:
    length, sequences = run.data.sequence_length, run.train.batch_size
    forward, training = flops_per_token(run.model, run.moe, vocab_size, length, run.lora)
    rows = [
        ("forward per token", forward, f"2 per active matrix parameter; attention over all {length} positions"),
        ("training per token", training, f"{training // forward} x forward; what remat repeats is not counted"),
    ]
    if teacher is not None:
        taught, _ = flops_per_token(teacher.config, teacher.moe, vocab_size, length, teacher.lora)
        rows.append(("teacher per token", taught, "its forward, in the steps that learn from it"))
        training += taught
    tokens = sequences * length
    step, devices = training * tokens, roles.num_devices
    rows += [
        ("training per step", step, f"{sequences} sequences x {length} = {tokens:,} tokens"),
        ("per device and step", step // devices, f"{devices} device(s), even load"),
    ]
    return [f"{name:22}{flops:>24,}  ({note})" for name, flops, note in rows]
