"""Build the layer of `layer.py` from a config: router, schedule, sizes, and the checks that name what does not fit."""

from __future__ import annotations

import dataclasses
import logging

import jax.numpy as jnp

import moe_jax.moe.choosers
import moe_jax.moe.schedules  # noqa: F401 their files register themselves
from moe_jax.errors import UserError, check_choices
from moe_jax.kernels.float8 import BLOCK, E4M3
from moe_jax.kernels.grouped import MATMULS
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import RouterPlace, build_router
from moe_jax.moe.schedule import CHOOSERS, LayerSizes, Schedule, build_schedule, find_schedule, schedule_on, schedules
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.static_sizes import BucketRows
from moe_jax.planning import PlannerConfig
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.registry import PLANNERS

_LOG = logging.getLogger(__name__)


def make_moe(
    config: MoEConfig, roles: Roles, x, activation: str, plan: PlanShape | None = None, split_tokens: bool = False
) -> MoE:
    """Return the layer, which is called with this device's tokens; see `MoE`.

    Args:
      x: array or `jax.ShapeDtypeStruct` [t, M], or [b, Sq, M] where sequences are known, like the tokens of this
        device's MP group.
      plan: sizes of the placements to come; None is an even one without replicas.
      split_tokens: as in `LayerSizes`.

    Raises:
      UserError: as `make_schedule` and `check_router` do, or an unknown grouped matmul.
    """
    check_choices(config, {"grouped_matmul": ("auto", *sorted(MATMULS))}, "MoEConfig")
    router = build_router(config, router_place(config, roles, plan, x.shape[-2] if x.ndim == 3 else 0))
    router.check_tokens(x.size // x.shape[-1])
    schedule = make_schedule(config, roles, x, plan, split_tokens)
    for note in schedule.notes:
        _LOG.warning(note)
    return MoE(config, roles, activation, plan, router, schedule, config.record_choices)


def make_schedule(
    config: MoEConfig, roles: Roles, x, plan: PlanShape | None = None, split_tokens: bool = False
) -> Schedule:
    """Return the schedule that a config names, or the one that it chooses; arguments as of `make_moe`.

    The mesh may be abstract.

    Raises:
      UserError: an unknown name, or a mesh on which that schedule, transport or group count is not possible.
    """
    sizes = layer_sizes(config, roles, x.size // x.shape[-1], plan, x.shape[-1], jnp.dtype(x.dtype).itemsize)
    sizes = dataclasses.replace(sizes, split_tokens=split_tokens)
    return build_schedule((plan and plan.schedule) or config.schedule, roles, sizes)


def layer_sizes(
    config: MoEConfig, roles: Roles, tokens: int, plan: PlanShape | None = None, model_dim: int = 0, itemsize: int = 0
) -> LayerSizes:
    """Return the static sizes of one layer on a device whose MP group holds `tokens` tokens.

    model_dim, itemsize: M and the bytes of an element, where bytes of rows are asked for.
    """
    devices = roles.size(roles.expert)
    router = build_router(config, router_place(config, roles, plan))
    sizes = LayerSizes(
        config=config,
        tokens=tokens,
        groups=roles.most_homes(config.num_experts) if plan is None else plan.slots,
        capacity=None if config.dropless else config.capacity(tokens),
        sources=roles.mesh.size,
        row_bytes=model_dim * itemsize,
        sent_bytes=config.sent_bytes(model_dim) if model_dim else 0,
    )
    crossing, members, near = router.most_crossing(tokens), devices, roles.members_per_node
    if plan is not None and plan.bucket_rows is not None:
        sizes = dataclasses.replace(sizes, planned_rows=plan.bucket_rows)
    elif crossing is not None and near != members:  # the router bounds how many of the choices leave the node
        pairs = roles.mesh.size * members
        inside = sizes.rows_of((tokens * config.top_k - crossing) / near, pairs)
        far = sizes.rows_of(crossing / (members - near), pairs)
        sizes = dataclasses.replace(sizes, planned_rows=BucketRows(own=inside, node=inside, far=far))
    return sizes


def router_place(config: MoEConfig, roles: Roles, plan: PlanShape | None = None, length: int = 0) -> RouterPlace:
    """Return where the router of a layer runs; length: of a sequence, 0 where that is not known."""
    chooser, groups = CHOOSERS.get(config.schedule), (roles.size(roles.model), roles.size(roles.expert_shard))
    named = (config.schedule,) if chooser is None else chooser.possible(roles, config)
    return RouterPlace(
        roles=roles,
        slots=roles.most_homes(config.num_experts) if plan is None else plan.slots,
        splits_tokens=not any(schedule_on(name, *groups).gates_group for name in named),
        redirects=plan is not None and plan.after_gate is not None and plan.candidates > 1,
        length=length,
    )


def check_router(config: MoEConfig, roles: Roles, tokens: int, length: int, planner: PlannerConfig) -> None:
    """Refuse a mesh, schedule, planner or number of tokens that the router cannot serve, before there is a plan.

    Args:
      tokens: of an MP group; length: of a sequence.

    Raises:
      UserError: one of them.
    """
    place = router_place(config, roles, length=length)
    redirects = planner.decides_late and PLANNERS[planner.name].any_holder
    build_router(config, dataclasses.replace(place, redirects=redirects)).check_tokens(tokens)


def check_hidden_dim(name: str, hidden_dim: int, roles: Roles) -> None:
    """Raise a UserError unless the experts' hidden dim splits over the shards of an expert."""
    shards = roles.size(roles.expert_shard)
    if hidden_dim % shards:
        raise UserError(
            f"{name} ({hidden_dim}) must be divisible by MeshConfig.expert_shard ({shards}); set "
            f"MeshConfig.expert_shard to a divisor of {hidden_dim}"
        )


def check_one_piece(config: MoEConfig, binding: str, without: str) -> None:
    """Raise a UserError where a binding needs a schedule whose experts run in one piece, and the config's is none.

    Args:
      without: the value of the binding that needs none.
    """
    if not find_schedule(config.schedule).one_piece:
        possible = [name for name in schedules() if find_schedule(name).one_piece]
        raise UserError(
            f"{binding} needs a MoEConfig.schedule whose experts run in one piece, not {config.schedule!r}; set "
            f"MoEConfig.schedule to one of {', '.join(possible)}, or {binding} = {without!r}"
        )


def check_float8(config: MoEConfig, model_dim: int) -> None:
    """Raise a UserError where `dispatch_dtype` asks for float8 and the model dim or the schedule forbids it."""
    if config.dispatch_dtype == E4M3:
        check_one_piece(config, "MoEConfig.dispatch_dtype", "compute")
        if model_dim % min(model_dim, BLOCK):
            raise UserError(
                f"MoEConfig.dispatch_dtype ('float8_e4m3') needs the model dim ({model_dim}) of at most {BLOCK} or a "
                f"multiple of it: scales are kept for blocks of {BLOCK}; choose such a size, or "
                "MoEConfig.dispatch_dtype = 'compute'"
            )
