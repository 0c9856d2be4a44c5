"""The bytes that a run needs on each device, and what to change where a device lacks them.

Inputs: a RunConfig, and the devices that it is for. Outputs: a `Plan` (the run laid out on them, no arrays), its
`Needs`, and a verdict in words, whose changes were laid out and counted like the run itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from moe_jax.analysis.compile_ahead import on_target
from moe_jax.cluster.targets import MEMORY_SHARE, Target, parse_target
from moe_jax.config.run_config import RunConfig, with_bindings
from moe_jax.data.tokenizer import build_tokenizer
from moe_jax.errors import UserError
from moe_jax.kernels.grouped import choose_implementation
from moe_jax.models import LanguageModel
from moe_jax.models.attention import resolve_attention
from moe_jax.models.counts import DeviceBytes, device_bytes, shapes_and_layout
from moe_jax.models.loss import check_step
from moe_jax.models.model_group import rows_of
from moe_jax.moe.build import check_router, make_schedule
from moe_jax.moe.schedule import find_schedule
from moe_jax.parallel.mesh import Roles, build_mesh
from moe_jax.planning.plan_shape import build_shape
from moe_jax.replan.costs import build_sessions, most_shapes, settle_memory
from moe_jax.replan.segments import build_model, initial_placement, segment_runs, sizes_of
from moe_jax.replan.session import PlanSession
from moe_jax.training.feed import padded_vocabulary
from moe_jax.training.frozen_models import mesh_experts, teacher_model
from moe_jax.training.optimizer import state_bytes

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


@dataclasses.dataclass(frozen=True)
class Needs:
    """The bytes of a plan on each device."""

    held: DeviceBytes
    attention: str  # what 'auto' is
    stages: str  # of ZeRO, in words


def lay_out(run: RunConfig, devices: int | None, target: str) -> Plan:
    """Lay a run out; arguments and errors as of `dry_run`."""
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
    roles = build_mesh(mesh, count, mesh_experts(run, count), "" if described is None else described.device)
    tokenizer = build_tokenizer(run.data)
    vocab_size = padded_vocabulary(tokenizer, run.model)
    sessions = _check_sizes(run, roles, vocab_size, described)
    teacher = teacher_model(run, roles, tokenizer, vocab_size, described)
    return Plan(run, roles, vocab_size, tokenizer.end_id, described, sessions, teacher)


def _check_sizes(run: RunConfig, roles: Roles, vocab_size: int, target: Target | None) -> dict[str, PlanSession]:
    """Raise the UserError that building the run would raise; return the planner of each segment, {} without any."""
    find_schedule(run.moe.schedule)
    length, sequences = run.data.sequence_length, run.train.microbatch_size
    resolved = dataclasses.replace(run, model=resolve_attention(run.model, target))
    check_step(build_model(resolved, roles, vocab_size), sequences, length, run.train.grad_accum_steps)
    tokens = rows_of(run.model, roles, sequences) * length
    sessions = {}
    if run.planner.name != "none" and roles.size(roles.expert) > 1:  # one, where no devices were counted
        sessions = build_sessions(run, roles)
    for own, own_roles in segment_runs(run, roles).values():
        check_router(own.moe, own_roles, tokens, length, run.planner)
        x = jax.ShapeDtypeStruct((tokens, run.model.model_dim), run.model.dtype)
        make_schedule(own.moe, own_roles, x, split_tokens=run.model.sequence_parallel)
    return sessions


def count_bytes(plan: Plan) -> Needs:
    """Return what each device holds, with as many replicas as the planner may have."""
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
    return Needs(device_bytes(sizes, placed, state, taught), resolved.attention, stages)


def verdict(plan: Plan, needed: int, given: RunConfig) -> str:
    """Return in one line whether each device has the bytes that a plan needs, and what to change where it has not.

    Args:
      plan: of the run.
      needed: bytes on each device.
      given: the config as the user gave it.
    """
    target, devices = plan.target, plan.roles.num_devices
    line = f"{_gib(needed)} GiB needed on each of {devices} "
    if target is None or not target.whole_memory:
        return f"{line}device(s); --target=h200:4x8 and the like say whether such GPUs have it"
    share = f"{_gib(target.usable_memory)} of {_gib(target.whole_memory)} GiB are jax's ({MEMORY_SHARE})"
    line += f"{target.device}, {share}"
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
            needs = count_bytes(changed).held.total
        except UserError:  # it does not go with the rest of this run
            continue
        if needs <= most:
            said = [f"{name} = {value!r}" for name, value in changes.items()]
            if raised and needs > target.usable_memory:
                said.append(raised)
            return f"does not fit: {line}; {' and '.join(said)} would do: {_gib(needs)} GiB"
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


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
