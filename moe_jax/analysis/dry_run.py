"""A run described as text: whether it fits and what would make it, config, mesh, parameters, bytes, FLOPs per token.

Sizes are checked as a run checks them, but no data is read, no array is made and no device is needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator

import jax
import jax.numpy as jnp

from moe_jax.analysis.compile_ahead import on_target
from moe_jax.cluster import cluster_named, cluster_of
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import MEMORY_SHARE, Target, parse_target
from moe_jax.config.run_config import BOUND, RunConfig, config_text, with_bindings
from moe_jax.data.tokenizer import build_tokenizer
from moe_jax.errors import UserError
from moe_jax.kernels.float8 import E4M3
from moe_jax.kernels.grouped import choose_implementation
from moe_jax.models import LanguageModel
from moe_jax.models.attention import missing_for_cudnn, resolve_attention
from moe_jax.models.config import segments_of, with_experts
from moe_jax.models.counts import DeviceBytes, device_bytes, flops_per_token, parameter_counts, shapes_and_layout
from moe_jax.models.loss import check_step
from moe_jax.models.model_group import rows_of
from moe_jax.moe.build import check_router, layer_sizes, make_schedule
from moe_jax.moe.schedule import build_schedule, find_schedule
from moe_jax.parallel.mesh import Roles, build_mesh
from moe_jax.planning.block_schedule import Prefetch, stage_seconds
from moe_jax.planning.plan_shape import build_shape
from moe_jax.replan.segments import (
    base_cost,
    build_model,
    build_sessions,
    initial_placement,
    layer_times,
    most_shapes,
    segment_runs,
    settle_memory,
    sizes_of,
)
from moe_jax.replan.session import PlanSession
from moe_jax.training.feed import padded_vocabulary
from moe_jax.training.frozen_models import mesh_experts, open_teacher, teacher_model
from moe_jax.training.optimizer import state_bytes

GIB = 2**30  # bytes
MORE_KERNELS = 75  # of one layer in two halves, both ways: (2,061 - 1,164) / 12 on GPT-MoE-S, compiled for H200
MOST_SHARE = 0.9  # of a GPU's memory that jax may take: NCCL, CUDA and its graphs take theirs besides
# What is tried where memory is short, in this order: what costs a step little time comes first, what changes its
# numbers last.
CHANGES = {
    "train.grad_accum_steps": (2, 4, 8, 16),
    "ModelConfig.remat": ("block_but_attention", "block"),
    "train.zero_stage": (3,),
    "train.expert_zero_stage": (3,),
    "MeshConfig.expert_shard": (2, 4, 8),
    "train.first_moment_dtype": ("bfloat16",),
}
_MOST_CHANGES = 3
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run laid out on devices that need not exist."""

    run: RunConfig  # with the target's node boundary
    roles: Roles
    vocab_size: int
    end_id: int  # that ends a document
    target: Target | None  # None: CPU devices
    sessions: dict[str, PlanSession]  # of each segment; {} without a planner
    teacher: LanguageModel | None


def lay_out(run: RunConfig, devices: int | None, target: str) -> Plan:
    """Lay a run out, checked as building the run would; arguments and errors as of `dry_run`."""
    if devices is not None and devices < 1:
        raise UserError(f"--host_devices ({devices}) must be at least 1")
    described = parse_target(target) if target else None
    if described is not None:
        if devices is not None:
            raise UserError(f"--target={target} and --host_devices={devices} both count devices; give one of them")
        run, devices = on_target(run, described), described.devices
    mesh, count = run.mesh, devices
    if count is None:  # the least that the sizes given can be built on; `expert` = -1 counts as 1
        count = mesh.data * mesh.expert_shard * max(mesh.expert, 1)
        count = count if mesh.expert != -1 else math.lcm(count, mesh.model, mesh.devices_per_node or 1)
    roles = build_mesh(mesh, count, mesh_experts(run, count), "" if described is None else described.device_kind)
    tokenizer = build_tokenizer(run.data)
    vocab_size = padded_vocabulary(tokenizer, run.model)
    find_schedule(run.moe.schedule)
    length, sequences = run.data.sequence_length, run.train.microbatch_size
    resolved = dataclasses.replace(run, model=resolve_attention(run.model, described))
    check_step(build_model(resolved, roles, vocab_size), sequences, length, run.train.grad_accum_steps)
    tokens, sessions = rows_of(run.model, roles, sequences) * length, {}
    if run.planner.name != "none" and roles.size(roles.expert) > 1:  # one, where no devices were counted
        sessions = build_sessions(run, roles)
    for own, own_roles in segment_runs(run, roles).values():
        check_router(own.moe, own_roles, tokens, length, run.planner)
        x = jax.ShapeDtypeStruct((tokens, run.model.model_dim), run.model.dtype)
        make_schedule(own.moe, own_roles, x, split_tokens=run.model.sequence_parallel)
    teacher = teacher_model(run, roles, tokenizer, vocab_size, described)
    return Plan(run, roles, vocab_size, tokenizer.end_id, described, sessions, teacher)


def count_bytes(plan: Plan) -> tuple[DeviceBytes, str, str]:
    """Return what each device holds, with as many replicas as the planner may have, what attention is, and the stages
    of ZeRO in words."""
    run, roles, target = plan.run, plan.roles, plan.target
    resolved, moe = resolve_attention(run.model, target), run.moe
    if target is not None:
        dims = (run.model.model_dim, run.model.hidden_dim // roles.size(roles.expert_shard))
        chosen = choose_implementation(moe.grouped_matmul, target, jnp.dtype(run.model.dtype), dims)
        moe = dataclasses.replace(moe, grouped_matmul=chosen)
    sizes = sizes_of(dataclasses.replace(run, model=resolved, moe=moe), roles, plan.vocab_size)
    shapes, layout = shapes_and_layout(sizes.model)
    model = sizes.model
    state = state_bytes(run.train, model.trained(shapes), model.trained(layout.state), dict(roles.mesh.shape))
    placed, stages = None, f"ZeRO {run.train.zero_stage} of the dense parameters"
    if layout.dp_stage is not None:
        stages += f", {layout.dp_stage} of the experts"
    moves_tokens = find_schedule(run.moe.schedule).moves_tokens
    if moves_tokens and run.planner.name != "none":
        _, costs = settle_memory(run, roles)
        placed = most_shapes(run, roles, costs)
    elif moves_tokens:
        placed = {name: build_shape(initial_placement(*own)) for name, own in segment_runs(run, roles).items()}
    taught = None
    if plan.teacher is not None:  # it reads the batches and chunks of its student
        config = dataclasses.replace(plan.teacher.config, loss_chunk=run.model.loss_chunk)
        taught = dataclasses.replace(sizes, model=dataclasses.replace(plan.teacher, config=config), ema=False)
    return device_bytes(sizes, placed, state, taught), resolved.attention, stages


def verdict(plan: Plan, needed: int, given: RunConfig) -> str:
    """Return in one line whether each device has the bytes that a plan needs, and what to change where it has not.

    Args:
      plan: of the run.
      needed: bytes on each device.
      given: the config as the user gave it.
    """
    target, devices = plan.target, plan.roles.mesh.size
    line = f"{needed / GIB:.1f} GiB needed on each of {devices} "
    if target is None or not target.whole_memory:
        return f"{line}device(s); --target=h200:4x8 and the like say whether such GPUs have it"
    share = f"{target.usable_memory / GIB:.1f} of {target.whole_memory / GIB:.1f} GiB are jax's ({MEMORY_SHARE})"
    line += f"{target.device_kind}, {share}"
    if needed <= target.usable_memory:
        return f"fits: {line}"
    most, raised = target.usable_memory, ""
    if most < MOST_SHARE * target.whole_memory:
        most, raised = MOST_SHARE * target.whole_memory, f"{MEMORY_SHARE}={MOST_SHARE} in the environment"
        if needed <= most:
            return f"does not fit: {line}; {raised}, as scripts/launch sets it, would do"
    for changes in _changes(given):
        try:
            changed = lay_out(with_bindings(given, changes), None, f"{target.name}:{target.nodes}x{target.per_node}")
            needs = count_bytes(changed)[0].total
        except UserError:  # it does not go with the rest of this run
            continue
        if needs <= most:
            said = [f"{name} = {value!r}" for name, value in changes.items()]
            if raised and needs > target.usable_memory:
                said.append(raised)
            return f"does not fit: {line}; {' and '.join(said)} would do: {needs / GIB:.1f} GiB"
    return (
        f"does not fit: {line}; no {_MOST_CHANGES} changes of {', '.join(CHANGES)} suffice: take more devices, a "
        "smaller model or shorter sequences"
    )


def _changes(run: RunConfig) -> Iterator[dict[str, object]]:
    """Yield what to try: one change first, then two together, then three; of a count its multiples."""
    values = {name: list(found) for name, found in CHANGES.items()}
    values["train.grad_accum_steps"] = [
        run.train.grad_accum_steps * times for times in CHANGES["train.grad_accum_steps"]
    ]
    for size in range(1, _MOST_CHANGES + 1):
        for names in itertools.combinations(values, size):
            for chosen in itertools.product(*(values[name] for name in names)):
                yield dict(zip(names, chosen, strict=True))


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
    held, attention, stages = count_bytes(plan)
    shown = config_text(run, bound).splitlines()
    if not everything:
        shown = [line for line in shown if line.endswith(BOUND)] + [f"{len(shown)} bindings in all: --all"]
    sections = {
        "Memory": [verdict(plan, held.total, given)],
        "Config": shown,
        "Choices": _choice_lines(run, roles, described, plan.end_id, plan.sessions),
        "Mesh": _mesh_lines(run, roles, given=devices is not None or plan.target is not None),
        "Segments": _segment_lines(run, roles),
        "Schedule": _schedule_lines(run, roles),
        "Parameters": _parameter_lines(run, plan.vocab_size),
        "Teacher": _teacher_lines(run, teacher) if teacher else [],
        "Bytes on each device": _byte_lines(run, held, attention, stages),
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
            line += f" is {resolved!r} on {target.device_kind}{reason and f': {reason}'}"
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
    in two halves with their launches, as `Prices` has them. config, roles: `segment_runs`.
    """
    prices = Prices(target)
    times = layer_times(config, roles, base_cost(config, roles, cluster_of(prices)))
    launches, recompute = MORE_KERNELS * prices.assumed("launch"), config.model.recomputes
    in_one_piece, in_halves = (
        float(stage_seconds(Prefetch(halves=halves), times, recompute)) for halves in (False, True)
    )
    return in_one_piece, in_halves + launches


def _mesh_lines(run: RunConfig, roles: Roles, given: bool) -> list[str]:
    mesh, resolved = run.mesh, roles.config
    lines = [
        f"{roles.mesh.size} devices = data {resolved.data} x expert {resolved.expert} x expert_shard "
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
            f"assumed: MeshConfig.expert = {resolved.expert}, so {roles.mesh.size} device(s), because "
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


def _byte_lines(run: RunConfig, held: DeviceBytes, attention: str, stages: str) -> list[str]:
    train, dtype = run.train, run.model.param_dtype
    first_moment = f", first moment {train.first_moment_dtype}" if train.first_moment_dtype else ""
    rows = [
        ("parameters", held.parameters, f"{run.model.dtype}, adapters {dtype}" if run.lora.rank else dtype),
        ("optimizer state", held.optimizer, f"{OPTIMIZER_STATES[train.optimizer]}, {dtype}{first_moment}"),
        ("averaged parameters", held.ema, f"train.ema_decay {train.ema_decay}, {dtype}"),
        ("gradients", held.gradients, dtype),
        ("cast and gathered", held.compute_weights, f"weights cast to {run.model.dtype} or gathered by ZeRO-3"),
        ("activations", held.activations, f"estimate, remat {run.model.remat!r}, attention {attention!r}"),
        ("replicas", held.replicas, f"planner {run.planner.name!r}, parameters and gradients of the layers alive"),
        ("overflow passes", held.overflow, "what later passes hold where buckets may be too small"),
        ("teacher", held.teacher, "its parameters and one layer's forward, estimate"),
        ("sum", held.total, "without other temporaries and buffers of collectives"),
    ]
    lines = [stages]
    for name, size, note in rows:
        if size or name not in ("averaged parameters", "teacher"):
            binary = f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.2f} MiB"
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
    step, devices = training * tokens, roles.mesh.size
    rows += [
        ("training per step", step, f"{sequences} sequences x {length} = {tokens:,} tokens"),
        ("per device and step", step // devices, f"{devices} device(s), even load"),
    ]
    return [f"{name:22}{flops:>24,}  ({note})" for name, flops, note in rows]
