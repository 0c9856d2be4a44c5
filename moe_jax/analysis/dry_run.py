"""A run described as text: resolved config, mesh, parameters, bytes per device, FLOPs per token.

Sizes are checked as a run checks them, but no data is read, no array is made and no device is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import jax
import jax.numpy as jnp

from moe_jax.analysis.compile_ahead import on_target
from moe_jax.cluster import cluster_named
from moe_jax.cluster.layer_seconds import pairwise_seconds
from moe_jax.cluster.targets import MEMORY_SHARE, Target, parse_target
from moe_jax.config.run_config import RunConfig, config_text
from moe_jax.data.tokenizer import build_tokenizer
from moe_jax.errors import UserError
from moe_jax.kernels.blocked import expert_work
from moe_jax.kernels.float8 import E4M3
from moe_jax.kernels.grouped import choose_implementation
from moe_jax.models import LanguageModel
from moe_jax.models.attention import missing_for_cudnn, resolve_attention
from moe_jax.models.config import segments_of, with_experts
from moe_jax.models.counts import device_bytes, flops_per_token, half_work, parameter_counts, shapes_and_layout
from moe_jax.models.loss import check_step
from moe_jax.moe.build import check_router, layer_sizes, make_schedule
from moe_jax.moe.schedule import find_schedule
from moe_jax.moe.schedules.pairwise import choose_groups
from moe_jax.moe.schedules.parm import layer_shape
from moe_jax.parallel.mesh import Roles, build_mesh
from moe_jax.planning.plan_shape import build_shape
from moe_jax.training.feed import padded_vocabulary
from moe_jax.training.optimizer import state_bytes
from moe_jax.training.overlap import compare_halves, why_not_halves
from moe_jax.training.plan_cost import most_shapes, settle_memory
from moe_jax.training.replanner import Replanner, build_replanners
from moe_jax.training.segments import build_model, initial_placement, segment_runs, sizes_of
from moe_jax.training.teacher import mesh_experts, teacher_checkpoint, teacher_model

MOST_SHARE = 0.9  # of a GPU's memory that jax may take: NCCL, CUDA and its graphs take theirs besides
OPTIMIZER_STATES = {
    "adamw": "AdamW, two moments",
    "adafactor": "Adafactor, rows and columns of second moments",
    "muon": "Muon, momentum of hidden matrices, two moments of the rest",
    "lion": "Lion, one moment",
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


def dry_run(run: RunConfig, devices: int | None = None, target: str = "", bound: Collection[str] = ()) -> str:
    """Describe a run.

    Args:
      run: the config.
      devices: devices that the run will have, from --host_devices; None takes the product of the mesh's sizes, with
        the least `expert` that works where that is -1.
      target: DEVICE:NODESxDEVICES that the run is for, as `python -m moe_jax.inspect` takes it: their number and node
        size, and what each 'auto' is there. '' describes a run on CPU devices.
      bound: the bindings that the user set, which are marked as in config.gin.

    Raises:
      UserError: sizes that do not fit together, as the run itself would raise it.
    """
    if devices is not None and devices < 1:
        raise UserError(f"--host_devices ({devices}) must be at least 1")
    described = parse_target(target) if target else None
    if described is not None:
        if devices is not None:
            raise UserError(f"--target={target} and --host_devices={devices} both count devices; give one of them")
        run, devices = on_target(run, described), described.devices
    mesh, count = run.mesh, devices
    if devices is None:  # the least that the sizes given can be built on; `expert` = -1 counts as 1
        count = mesh.data * mesh.expert_shard * max(mesh.expert, 1)
        count = count if mesh.expert != -1 else math.lcm(count, mesh.model, mesh.devices_per_node or 1)
    roles = build_mesh(run.mesh, count, mesh_experts(run, count), "" if described is None else described.device)
    tokenizer = build_tokenizer(run.data)
    vocab_size = padded_vocabulary(tokenizer, run.model)
    replanners = check_sizes(run, roles, vocab_size, described)
    teacher = teacher_model(run, roles, tokenizer, vocab_size, described)
    sections = {
        "Config": config_text(run, bound).splitlines(),
        "Choices": _choice_lines(run, roles, described, tokenizer.end_id, replanners),
        "Mesh": _mesh_lines(run, roles, given=devices is not None),
        "Segments": _segment_lines(run, roles),
        "Schedule": _schedule_lines(run, roles, described),
        "Parameters": _parameter_lines(run, vocab_size),
        "Teacher": _teacher_lines(run, teacher) if teacher else [],
        "Bytes on each device": _byte_lines(run, roles, vocab_size, described, teacher),
        "FLOPs": _flop_lines(run, roles, vocab_size, teacher),
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items() if lines) + "\n"


def check_sizes(run: RunConfig, roles: Roles, vocab_size: int, target: Target | None) -> dict[str, Replanner]:
    """Raise the UserError that building the run would raise; return the planner of each segment, {} without any."""
    find_schedule(run.moe.schedule)
    shards, length = roles.size(roles.dense), run.data.sequence_length
    rows = run.train.microbatch_size
    resolved = dataclasses.replace(run, model=resolve_attention(run.model, target))
    check_step(build_model(resolved, roles, vocab_size), rows, length, run.train.grad_accum_steps)
    replanners = {}
    if run.planner.name != "none" and roles.size(roles.expert) > 1:  # one, where no devices were counted
        replanners = build_replanners(run, roles)
    for own, own_roles in segment_runs(run, roles).values():
        check_router(own.moe, own_roles, rows // shards * length, length, run.planner.decides_late)
        x = jax.ShapeDtypeStruct((rows // shards * length, run.model.model_dim), run.model.dtype)
        make_schedule(own.moe, own_roles, x, split_tokens=run.model.sequence_parallel)
    return replanners


def _choice_lines(
    run: RunConfig, roles: Roles, target: Target | None, end_id: int, replanners: dict[str, Replanner]
) -> list[str]:
    """Say what attention is on the target (or without one on CPU devices and on GPUs), what a layer would take in two
    halves, what id keeps packed documents apart, by what prices, and what the planner derives for each segment."""
    wanted = run.model
    line = f"ModelConfig.attention {wanted.attention!r}"
    if wanted.attention == "auto":
        reason = missing_for_cudnn(wanted, target)
        if target is None:
            on_gpus = f"'xla' on GPUs: {reason}" if reason else "'cudnn' on GPUs that have it, see --target"
            line += f" is 'blocks' on CPU devices, {on_gpus}"
        else:
            resolved = resolve_attention(wanted, target).attention
            line += f" is {resolved!r} on {target.device}{reason and f': {reason}'}"
    lines = [line]
    if wanted.document_mask:
        lines.append(
            f"ModelConfig.document_mask True: a document ends with the id {end_id}; its mask counts as activations"
        )
    lines.append(f"ModelConfig.overlap {wanted.overlap!r}")
    for name, own in segment_runs(run, roles).items() if target and not why_not_halves(run, roles) else ():
        in_one_piece, in_halves = compare_halves(*own, target)
        lines.append(
            f"modelled by middle prices, even loads, an MoE block of {name}, forward and backward: "
            f"{1e3 * in_one_piece:.3g} ms in one piece, {1e3 * in_halves:.3g} ms in two halves"
        )
    cluster = cluster_named(run.planner.cluster or run.moe.cluster, roles.device_kind)
    lines.append(f"prices of {cluster.name}: {cluster.basis()}")
    for name, replanner in replanners.items():
        remark = replanner.plans.planner.remark(replanner.plans.cost)
        lines += [f"PlannerConfig.name {run.planner.name!r} for {name}: {remark}"] if remark else []
    return lines


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


def _schedule_lines(run: RunConfig, roles: Roles, target: Target | None) -> list[str]:
    """Say what is in float8, and what the schedule chooses for itself before there is a plan with buckets of its own,
    and by what; nothing of those that choose nothing."""
    lines, runs = [], segment_runs(run, roles)
    for name, (own, own_roles) in runs.items():
        moe, model, said = own.moe, own.model, []
        item = jnp.dtype(model.dtype).itemsize
        if moe.dispatch_dtype == E4M3:
            said.append(
                f"rows travel to experts in {E4M3}, {moe.sent_bytes(model.model_dim)} bytes each instead of "
                f"{model.model_dim * item}; back, and their gradients, in {model.dtype}"
            )
        if moe.expert_dtype == E4M3:
            said.append(
                f"experts multiply in {E4M3}, forward and for the gradients of rows; gradients of weights in "
                f"{model.dtype}"
            )
        rows = own.train.microbatch_size
        tokens = rows * own.data.sequence_length // own_roles.size(own_roles.dense)  # of an MP group
        if moe.schedule == "pairwise":
            said += _pairwise_lines(own, own_roles, tokens)
        else:
            halves, other_half = model.overlap == "halves", None
            tokens //= 2 if halves else 1
            if halves and target is not None:
                other_half = half_work(model, moe, tokens // own_roles.size(own_roles.model), own.data.sequence_length)
            sizes = layer_sizes(moe, own_roles, tokens, None, model.model_dim, item)
            sizes = dataclasses.replace(sizes, split_tokens=model.sequence_parallel, other_half=other_half)
            said += find_schedule(moe.schedule).sentences(own_roles, sizes)
        lines += [f"{name}: {line}" if len(runs) > 1 else line for line in said]
    return lines


def _pairwise_lines(run: RunConfig, roles: Roles, tokens: int) -> list[str]:
    """Say how the layer is pipelined, and what that can gain at most; tokens: of an MP group."""
    moe, model = run.moe, run.model
    groups = choose_groups(roles, moe.pairwise_groups)
    item, hidden = jnp.dtype(model.dtype).itemsize, model.hidden_dim // roles.size(roles.expert_shard)
    sizes = layer_sizes(moe, roles, tokens, None, model.model_dim, item)
    sizes = dataclasses.replace(sizes, split_tokens=model.sequence_parallel, sent_bytes=0)
    shape = layer_shape("pairwise", roles, sizes, groups)
    lines = [f"pairwise: {shape.ep_size} expert-parallel devices in {groups} group(s), {3 * groups} tasks in a pass"]
    cluster = cluster_named(moe.cluster or run.planner.cluster, roles.device_kind)
    cluster = cluster.on_mesh(roles.num_devices, roles.config.devices_per_node)
    arriving = moe.top_k * (tokens // shape.mp_size) * shape.esp_size
    even = [round(arriving / sizes.groups)] * sizes.groups
    load = expert_work(even, shape.esp_size * shape.sent_rows, model.model_dim, hidden, item)
    try:
        moving, experts, by = pairwise_seconds(shape, load, cluster)
    except UserError as error:
        return [*lines, f"bound (comm + comp) / max(comm, comp) unknown: {error}"]
    return [
        *lines,
        f"a layer's transfers {1e3 * moving:.3g} ms, its experts {1e3 * experts:.3g} ms, "
        f"forward and backward, evenly loaded, by {by} in {cluster.name}",
        f"bound (comm + comp) / max(comm, comp) = {(moving + experts) / max(moving, experts):.2f}: at most so many "
        "times faster than one after the other (FasterMoE, section 4.2)",
    ]


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
        f"{config.teacher}, step {teacher_checkpoint(config)[1]}, {until}",
        f"loss of a token CE + {config.alpha:g} KL(teacher || student)",
        f"{'layers':22}{teacher.config.layers:>20,}  (student {run.model.layers})",
        f"{'parameters':22}{total:>20,}  {billions(total)}",
        f"{'active per token':22}{active:>20,}  {billions(active)}",
    ]


def billions(number: float) -> str:
    """Return a count of parameters in billions or millions, to two places."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _byte_lines(
    run: RunConfig, roles: Roles, vocab_size: int, target: Target | None, teacher: LanguageModel | None
) -> list[str]:
    train, dtype = run.train, run.model.param_dtype
    resolved, moe = resolve_attention(run.model, target), run.moe
    if target is not None and moe.expert_dtype != E4M3:
        dims = (run.model.model_dim, run.model.hidden_dim // roles.size(roles.expert_shard))
        chosen = choose_implementation(moe.grouped_matmul, target, jnp.dtype(run.model.dtype), dims)
        moe = dataclasses.replace(moe, grouped_matmul=chosen)
    sizes = sizes_of(dataclasses.replace(run, model=resolved, moe=moe), roles, vocab_size)
    shapes, layout = shapes_and_layout(sizes.model)
    state = state_bytes(train, shapes, layout.state, dict(roles.mesh.shape))
    plan, stages = None, f"ZeRO {train.zero_stage} of the dense parameters"
    if layout.dp_stage is not None:
        stages += f", {layout.dp_stage} of the experts"
    moves_tokens = find_schedule(run.moe.schedule).moves_tokens
    if moves_tokens and run.planner.name != "none":  # with as many replicas as the planner may have
        _, costs = settle_memory(run, roles)
        plan = most_shapes(run, roles, costs)
    elif moves_tokens:
        runs = segment_runs(run, roles)
        plan = {name: build_shape(initial_placement(*own)) for name, own in runs.items()}
    taught = None
    if teacher is not None:  # it reads the batches and chunks of its student
        config = dataclasses.replace(teacher.config, loss_chunk=run.model.loss_chunk)
        taught = dataclasses.replace(sizes, model=dataclasses.replace(teacher, config=config), ema=False)
    held = device_bytes(sizes, plan, state, taught)
    first_moment = f", first moment {train.first_moment_dtype}" if train.first_moment_dtype else ""
    rows = [
        ("parameters", held.parameters, dtype),
        ("optimizer state", held.optimizer, f"{OPTIMIZER_STATES[train.optimizer]}, {dtype}{first_moment}"),
        ("averaged parameters", held.ema, f"train.ema_decay {train.ema_decay}, {dtype}"),
        ("gradients", held.gradients, dtype),
        ("cast and gathered", held.compute_weights, f"weights cast to {run.model.dtype} or gathered by ZeRO-3"),
        ("activations", held.activations, f"estimate, remat {run.model.remat!r}, attention {resolved.attention!r}"),
        ("replicas", held.replicas, f"planner {run.planner.name!r}, parameters and gradients of the layers alive"),
        ("overflow passes", held.overflow, "what later passes hold where buckets may be too small"),
        ("float8", held.float8, "copies of experts' weights, the most of them"),
        ("teacher", held.teacher, "its parameters and one layer's forward, estimate"),
        ("sum", held.total, "without other temporaries and buffers of collectives"),
    ]
    lines = [stages]
    for name, size, note in rows:
        if size or name not in ("averaged parameters", "float8", "teacher"):
            binary = f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
            lines.append(f"{name:22}{size:>20,}  {binary}  ({note})")
    return lines + ([_room_line(held.total, target)] if target is not None and target.whole_memory else [])


def _room_line(needed: int, target: Target) -> str:
    """Say whether a device has so many bytes for jax, and what to change where it has not."""
    line = f"{target.usable_memory / 2**30:.1f} GiB of {target.device}'s {target.whole_memory / 2**30:.1f} are jax's"
    if needed <= target.usable_memory:
        return f"fits: {line} ({MEMORY_SHARE})"
    change = f"set {MEMORY_SHARE}={MOST_SHARE}, as scripts/launch does"
    if needed > MOST_SHARE * target.whole_memory:
        change = (
            "raise train.grad_accum_steps, lower DataConfig.sequence_length or train.batch_size, set ModelConfig.remat "
            "= 'block', train.zero_stage = 3 or train.first_moment_dtype = 'bfloat16', or take more devices"
        )
    return f"does not fit: {line}, {(needed - target.usable_memory) / 2**30:.1f} GiB too few; {change}"


def _flop_lines(run: RunConfig, roles: Roles, vocab_size: int, teacher: LanguageModel | None) -> list[str]:
    length, sequences = run.data.sequence_length, run.train.batch_size
    forward, training = flops_per_token(run.model, run.moe, vocab_size, length)
    rows = [
        ("forward per token", forward, f"2 per active matrix parameter; attention over all {length} positions"),
        ("training per token", training, "3 x forward; what remat repeats is not counted"),
    ]
    if teacher is not None:
        taught, _ = flops_per_token(teacher.config, teacher.moe, vocab_size, length)
        rows.append(("teacher per token", taught, "its forward, in the steps that learn from it"))
        training += taught
    tokens = sequences * length
    step, devices = training * tokens, roles.num_devices
    rows += [
        ("training per step", step, f"{sequences} sequences x {length} = {tokens:,} tokens"),
        ("per device and step", step // devices, f"{devices} device(s), even load"),
    ]
    return [f"{name:22}{flops:>24,}  ({note})" for name, flops, note in rows]
