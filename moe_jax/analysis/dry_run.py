"""A run described as text: resolved config, mesh, parameters, bytes per device, FLOPs per token.

Inputs: a `RunConfig` and, if the user gave one, a number of devices. Outputs: text. Sizes are checked as a run checks
them, but no data is read, no array is made and no device is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax

from moe_jax.analysis.compile_ahead import on_target
from moe_jax.cluster import read_named_cluster
from moe_jax.cluster.layer_seconds import pairwise_seconds
from moe_jax.cluster.targets import Target, parse_target
from moe_jax.config.run_config import RunConfig, config_text
from moe_jax.data import build_tokenizer
from moe_jax.errors import UserError
from moe_jax.kernels.blocked import expert_work
from moe_jax.kernels.float8_blocks import E4M3
from moe_jax.models import LanguageModel
from moe_jax.models.attention import check_document_mask, missing_for_cudnn, resolve_attention
from moe_jax.models.counts import (
    Sizes,
    device_bytes,
    forward_flops_per_token,
    half_work,
    itemsize,
    moment_layout,
    parameter_counts,
    training_flops_per_token,
)
from moe_jax.models.model_group import check_sequence_parallel, make_model_group
from moe_jax.models.segments import joined, segments_of, with_experts
from moe_jax.moe.build import check_router, layer_sizes, make_schedule, schedule_options
from moe_jax.moe.schedules import schedule_record, schedules
from moe_jax.moe.schedules.automatic import layer_shape
from moe_jax.moe.schedules.pairwise import choose_groups
from moe_jax.parallel.abstract import assumed_devices, build_abstract_roles
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.plan_shape import PlanShape, build_shape
from moe_jax.training.feed import padded_vocabulary
from moe_jax.training.optimizer import state_bytes
from moe_jax.training.overlap_choice import layer_seconds, settle_overlap, why_not_halves
from moe_jax.training.plan_cost import (
    initial_placement,
    largest_shapes,
    plan_cost,
    segment_runs,
    sizes_of,
    with_replica_slots,
)
from moe_jax.training.replanner import check_planner, check_transfer
from moe_jax.training.teacher import mesh_experts, teacher_model, teacher_step

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
    count = assumed_devices(run.mesh) if devices is None else devices
    roles = build_abstract_roles(run.mesh, count, mesh_experts(run, count))
    vocab_size = padded_vocabulary(build_tokenizer(run.data), run.model)
    check_sizes(run, roles, vocab_size)
    check_document_mask(resolve_attention(run.model, described), run.data.sequence_length)
    teacher = teacher_model(run, roles, build_tokenizer(run.data), vocab_size, described)
    segments, schedule = _segment_lines(run, roles), _schedule_lines(run, roles, described)
    sections = [
        _section("Config", config_text(run, bound).splitlines()),
        _section(
            "Choices",
            [
                attention_line(run, described),
                *document_lines(run),
                *overlap_lines(run, roles, described),
                *planner_lines(run, roles),
            ],
        ),
        _section("Mesh", _mesh_lines(run, roles, given=devices is not None)),
        *([_section("Segments", segments)] if segments else []),
        *([_section("Schedule", schedule)] if schedule else []),
        _section("Parameters", _parameter_lines(run, vocab_size)),
        *([_section("Teacher", _teacher_lines(run, teacher))] if teacher else []),
        _section("Bytes on each device", _byte_lines(run, roles, vocab_size, described, teacher)),
        _section("FLOPs", _flop_lines(run, roles, vocab_size, teacher)),
    ]
    return "\n\n".join(sections) + "\n"


def print_dry_run(
    run: RunConfig, *, host_devices: int | None = None, target: str = "", bound: Collection[str] = ()
) -> None:
    """Print what `dry_run` returns."""
    print(dry_run(run, host_devices, target, bound), end="")


def attention_line(run: RunConfig, target: Target | None) -> str:
    """Say what ModelConfig.attention is on the target, or without one on CPU devices and on GPUs.

    Raises:
      UserError: 'cudnn' where it cannot be.
    """
    wanted, resolved = run.model.attention, resolve_attention(run.model, target).attention
    if wanted != "auto":
        return f"ModelConfig.attention {wanted!r}"
    if target is not None:
        reason = missing_for_cudnn(run.model, target)
        return f"ModelConfig.attention 'auto' is {resolved!r} on {target.device}{reason and f': {reason}'}"
    reason = missing_for_cudnn(run.model)
    on_gpus = f"'xla' on GPUs too: {reason}" if reason else "'cudnn' on GPUs that have it, see --target"
    return f"ModelConfig.attention 'auto' is 'xla' on CPU devices, {on_gpus}"


def document_lines(run: RunConfig) -> list[str]:
    """Say which id keeps packed documents apart, where they are."""
    if not run.model.document_mask:
        return []
    end = build_tokenizer(run.data).end_id
    return [f"ModelConfig.document_mask True: a document ends with the id {end}; its mask counts as activations"]


def overlap_lines(run: RunConfig, roles: Roles, target: Target | None) -> list[str]:
    """Say what ModelConfig.overlap is on the target, and by which seconds of a layer."""
    wanted, settled = run.model.overlap, settle_overlap(run, roles, target).model.overlap
    first = f"ModelConfig.overlap {wanted!r}" + (f" is {settled!r} here" if wanted == "auto" else "")
    why = why_not_halves(run, roles)
    if target is None or why:
        return [first + (f": {why or 'CPU devices, or GPUs that --target would name'}" if wanted == "auto" else "")]
    lines = [first]
    for name in segment_runs(run, roles):
        seconds = layer_seconds(run, roles, target, name)
        lines.append(
            f"modelled at peak rates, even loads, an MoE block of {name}, forward and backward: "
            f"{1e3 * seconds.none:.3g} ms in one piece, {1e3 * seconds.halves:.3g} ms in two halves"
        )
    return lines


def planner_lines(run: RunConfig, roles: Roles) -> list[str]:
    """Say what the planner derives for each segment, if it derives anything."""
    if run.planner.name == "none" or roles.size(roles.expert) == 1:
        return []
    planner, sized = build_planner(run.planner), with_replica_slots(run, roles)
    remarks = ((name, planner.remark(plan_cost(sized, roles, name))) for name in segment_runs(sized, roles))
    return [f"PlannerConfig.name {run.planner.name!r} for {name}: {text}" for name, text in remarks if text]


def check_sizes(run: RunConfig, roles: Roles, vocab_size: int) -> LanguageModel:
    """Return the model on this mesh, or raise the UserError that building the run would raise."""
    if run.moe.schedule not in schedules():
        known = ", ".join(schedules())
        raise UserError(f"MoEConfig.schedule ({run.moe.schedule!r}) is unknown; choose one of {known}")
    model = LanguageModel(
        config=run.model,
        moe=run.moe,
        vocab_size=vocab_size,
        roles=roles,
        zero_stage=run.train.zero_stage,
        expert_zero_stage=run.train.expert_zero_stage,
    )
    shards, rows, length = (
        roles.size(roles.dense),
        run.train.batch_size // run.train.grad_accum_steps,
        run.data.sequence_length,
    )
    if rows % shards:
        raise UserError(
            f"train.batch_size per accumulation step ({rows}) must be divisible by the {shards} data-parallel devices; "
            f"set it to a multiple of {shards}"
        )
    if run.model.positions == "learned" and length > run.model.max_length:
        raise UserError(
            f"DataConfig.sequence_length ({length}) must not exceed ModelConfig.max_length ({run.model.max_length}); "
            "raise ModelConfig.max_length or set ModelConfig.positions = 'rotary'"
        )
    check_sequence_parallel(run.model.sequence_parallel, length, roles)
    make_model_group(roles, rows // shards, run.model.sequence_parallel, run.model.block_wise.halves)
    check_transfer(run, roles)
    if run.planner.name != "none" and roles.size(roles.expert) > 1:  # one, where no devices were counted
        check_planner(run, roles)
    for own, own_roles in segment_runs(run, roles).values():
        check_router(own.moe, own_roles, rows // shards * length, length, run.planner.decides_late)
        make_schedule(own.moe, own_roles, rows // shards * length, split_tokens=run.model.sequence_parallel)
    return model


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


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
        line = f"blocks {first} to {first + config.layers - 1}: "
        if segment.has_experts:
            line += f"{config.moe_layers} MoE layers, {segment.moe.top_k} of {segment.moe.num_experts} experts, "
            line += f"hidden dim {config.hidden_dim}; expert parallel {own.size(own.expert)}, "
            line += f"data parallel {own.size(own.data)}"
        else:
            line += f"dense, hidden dim {config.ffn_dim}"
        lines.append(line)
        first += config.layers
    return lines if len(segments) > 1 else []


def _schedule_lines(run: RunConfig, roles: Roles, target: Target | None) -> list[str]:
    """Say what the schedule chooses for itself, and by what; nothing of those that choose nothing."""
    runs = segment_runs(settle_overlap(run, roles, target), roles)
    named = [(name, [*_float8_lines(own[0]), *_choice_lines(*own, target)]) for name, own in runs.items()]
    return [f"{name}: {line}" if len(runs) > 1 else line for name, lines in named for line in lines]


def _float8_lines(run: RunConfig) -> list[str]:
    """Say what is in float8, if anything is."""
    moe, model, lines = run.moe, run.model, []
    if moe.dispatch_dtype == E4M3:
        plain = model.model_dim * itemsize(model.dtype)
        lines.append(
            f"rows travel to experts in {E4M3}, {moe.sent_bytes(model.model_dim)} bytes each instead of {plain}; "
            f"back, and their gradients, in {model.dtype}"
        )
    if moe.expert_dtype == E4M3:
        lines.append(
            f"experts multiply in {E4M3}, forward and for the gradients of rows; gradients of weights in {model.dtype}"
        )
    return lines


def _choice_lines(run: RunConfig, roles: Roles, target: Target | None) -> list[str]:
    """Say what a schedule chooses before there is a plan with buckets of its own; target: None for CPU devices."""
    moe, model = run.moe, run.model
    tokens = run.train.batch_size // run.train.grad_accum_steps * run.data.sequence_length // roles.size(roles.dense)
    if moe.schedule == "pairwise":
        return _pairwise_lines(run, roles, tokens)
    sentences = schedule_record(moe.schedule).sentences
    if sentences is None:
        return []
    tokens //= 2 if model.block_wise.halves else 1
    own, hides = tokens // roles.size(roles.model), model.block_wise.halves and target is not None
    beside = half_work(model, moe, own, run.data.sequence_length) if hides else None
    options = schedule_options(moe, model.sequence_parallel, beside)
    row_bytes = model.model_dim * itemsize(model.dtype)
    return sentences(roles, layer_sizes(moe, roles, tokens), options, row_bytes, moe.sent_bytes(model.model_dim))


def _pairwise_lines(run: RunConfig, roles: Roles, tokens: int) -> list[str]:
    """Say how the layer is pipelined, and what that can gain at most; tokens: of an MP group."""
    moe, model = run.moe, run.model
    sizes = layer_sizes(moe, roles, tokens)
    groups = choose_groups(roles, moe.pairwise_groups)
    item, hidden = itemsize(model.dtype), model.hidden_dim // roles.size(roles.expert_shard)
    shape = layer_shape("pairwise", roles, sizes, model.model_dim * item, model.sequence_parallel, groups)
    lines = [f"pairwise: {shape.ep_size} expert-parallel devices in {groups} group(s), {3 * groups} tasks in a pass"]
    path = moe.cluster or run.planner.cluster
    if not path:
        return [*lines, "bound (comm + comp) / max(comm, comp) unknown: name a file in MoEConfig.cluster"]
    arriving = moe.top_k * (tokens // shape.mp_size) * shape.esp_size
    even = [round(arriving / sizes.groups)] * sizes.groups
    flops, _, step_bytes = expert_work(even, shape.esp_size * shape.sent_rows, model.model_dim, hidden, item)
    try:
        load = 3 * flops, step_bytes
        moving, experts, by = pairwise_seconds(shape, load, read_named_cluster(path))
    except UserError as error:
        return [*lines, f"bound (comm + comp) / max(comm, comp) unknown: {error}"]
    return [
        *lines,
        f"a layer's transfers {1e3 * moving:.3g} ms, its experts {1e3 * experts:.3g} ms, "
        f"forward and backward, evenly loaded, by {by} in {path}",
        f"bound (comm + comp) / max(comm, comp) = {(moving + experts) / max(moving, experts):.2f}: at most so many "
        "times faster than one after the other (FasterMoE, section 4.2)",
    ]


def _parameter_lines(run: RunConfig, vocab_size: int) -> list[str]:
    counts = parameter_counts(run.model, run.moe, vocab_size)
    layers = with_experts(segments_of(run.model, run.moe))
    chosen = ", ".join(dict.fromkeys(f"{layer.moe.top_k} of {layer.moe.num_experts}" for layer in layers))
    lines = [
        f"{'total':22}{counts.total:>20,}  {billions(counts.total)}",
        f"{'active per token':22}{counts.active:>20,}  {billions(counts.active)}  ({chosen} experts)",
        f"{'as the papers count':22}{counts.as_papers:>20,}  {billions(counts.as_papers)}  "
        "(without embeddings, biases, gates and norms)",
        "of the total:",
    ]
    return lines + [f"  {GROUP_NAMES[name]:20}{size:>20,}" for name, size in counts.by_group.items() if size]


def _teacher_lines(run: RunConfig, teacher: LanguageModel) -> list[str]:
    """Say which teacher a student has, and how large it is."""
    config = run.distillation
    counts = parameter_counts(teacher.config, teacher.moe, teacher.vocab_size)
    until = "in all steps" if config.until is None else f"up to step {config.until}, then it leaves the memory"
    return [
        f"{config.teacher}, step {teacher_step(config)}, {until}",
        f"loss of a token CE + {config.alpha:g} KL(teacher || student)",
        f"{'layers':22}{teacher.config.layers:>20,}  (student {run.model.layers})",
        f"{'parameters':22}{counts.total:>20,}  {billions(counts.total)}",
        f"{'active per token':22}{counts.active:>20,}  {billions(counts.active)}",
    ]


def billions(number: float) -> str:
    """Return a count of parameters in billions or millions, to two places."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _byte_lines(
    run: RunConfig, roles: Roles, vocab_size: int, target: Target | None, teacher: LanguageModel | None
) -> list[str]:
    train = run.train
    model = resolve_attention(run.model, target)
    sizes = sizes_of(dataclasses.replace(run, model=model), vocab_size)
    dtype = run.model.param_dtype
    shapes, specs = moment_layout(sizes, roles)
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=lambda node: isinstance(node, tuple)
    )
    state = state_bytes(train, shapes, specs, dict(roles.mesh.shape))
    held = device_bytes(
        sizes, roles, _plan(run, roles), state, None if teacher is None else _of_teacher(sizes, teacher)
    )
    first_moment = f", first moment {train.first_moment_dtype}" if train.first_moment_dtype else ""
    rows = [
        ("parameters", held.parameters, dtype),
        ("optimizer state", held.optimizer, f"{OPTIMIZER_STATES[train.optimizer]}, {dtype}{first_moment}"),
        *([("averaged parameters", held.ema, f"train.ema_decay {train.ema_decay}, {dtype}")] if held.ema else []),
        ("gradients", held.gradients, "sum and microbatch" if train.grad_accum_steps > 1 else dtype),
        ("cast and gathered", held.compute_weights, f"weights cast to {run.model.dtype} or gathered by ZeRO-3"),
        ("activations", held.activations, f"estimate, remat {model.remat!r}, attention {model.attention!r}"),
        ("replicas", held.replicas, f"planner {run.planner.name!r}, parameters and gradients of the layers alive"),
        ("overflow passes", held.overflow, "what later passes hold where buckets may be too small"),
        *([("float8", held.float8, "copies of experts' weights, the most of them")] if held.float8 else []),
        *([("teacher", held.teacher, "its parameters and one layer's forward, estimate")] if held.teacher else []),
        ("sum", held.total, "without other temporaries and buffers of collectives"),
    ]
    stages = f"ZeRO {train.zero_stage} of the dense parameters"
    if not schedule_record(run.moe.schedule).moves_tokens:
        stages += f", {train.expert_zero_stage} of the experts"
    return [stages] + [f"{name:22}{size:>20,}  {gibibytes(size)}  ({note})" for name, size, note in rows]


def _of_teacher(sizes: Sizes, teacher: LanguageModel) -> Sizes:
    """Return the sizes of a teacher that reads the batches and chunks of its student, whose sizes are given."""
    config = dataclasses.replace(teacher.config, loss_chunk=sizes.config.loss_chunk)
    return dataclasses.replace(
        sizes, config=config, moe=teacher.moe, zero_stage=teacher.zero_stage,
        expert_zero_stage=teacher.expert_zero_stage, ema=False,
    )  # fmt: skip


def _plan(run: RunConfig, roles: Roles) -> PlanShape | dict[str, PlanShape] | None:
    """Return the shape of a plan with as many replicas as the planner may have; None where a bank has no owners.

    Of several segments with experts {segment: that}.
    """
    if not schedule_record(run.moe.schedule).moves_tokens:
        return None
    if run.planner.name != "none":
        return joined(largest_shapes(with_replica_slots(run, roles), roles))
    runs = segment_runs(run, roles)
    return joined({name: build_shape(initial_placement(*own)) for name, own in runs.items()})


def gibibytes(number: float) -> str:
    """Return bytes in GiB or MiB, to two places."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.2f} MiB"


def _flop_lines(run: RunConfig, roles: Roles, vocab_size: int, teacher: LanguageModel | None) -> list[str]:
    length = run.data.sequence_length
    arguments = (run.model, run.moe, vocab_size, length)
    forward, training = forward_flops_per_token(*arguments), training_flops_per_token(*arguments)
    tokens = run.train.batch_size * length
    taught = 0
    if teacher is not None:
        taught = forward_flops_per_token(teacher.config, teacher.moe, vocab_size, length)
    rows = [
        ("forward per token", forward, f"2 per active matrix parameter; attention over all {length} positions"),
        ("training per token", training, "3 x forward; what remat repeats is not counted"),
        *([("teacher per token", taught, "its forward, in the steps that learn from it")] if taught else []),
        (
            "training per step",
            (training + taught) * tokens,
            f"{run.train.batch_size} sequences x {length} = {tokens:,} tokens",
        ),
        (
            "per device and step",
            (training + taught) * tokens // roles.num_devices,
            f"{roles.num_devices} device(s), even load",
        ),
    ]
    return [f"{name:22}{flops:>24,}  ({note})" for name, flops, note in rows]
