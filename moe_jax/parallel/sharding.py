"""How parameters and optimizer state lie on the mesh: one decision per leaf, in one place.

Inputs: shapes and roles. Outputs: partition specs. Nothing here moves data; `parallel/gather.py` brings together
what these specs split.

ZeRO stages for dense leaves, over all dense data-parallel axes: 0 keeps everything on every device, 1 shards the
optimizer state, 3 shards the parameters too. Expert leaves lie on the expert axis whatever the stage; from stage 1 on
their optimizer state is split over `data` as well. Source: ZeRO (Rajbhandari et al. 2020), section 5.
"""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.parallel.mesh import Roles


def check_zero_stages(dense: int, experts: int) -> None:
    """Raise a UserError for a ZeRO stage that dense parameters, or experts under the schedule `dp`, cannot have."""
    if dense not in (0, 1, 3):
        raise UserError(f"train.zero_stage ({dense}) must be 0, 1 or 3")
    if experts not in (0, 1, 2, 3):
        raise UserError(f"train.expert_zero_stage ({experts}) must be 0, 1, 2 or 3")


def spec_of(ndim: int, entries: dict[int | None, tuple[str, ...]]) -> P:
    """Return a PartitionSpec of `ndim` dims from {dim: axes}; an entry for dim None is left out."""
    return P(*(entries.get(dim) or None for dim in range(ndim)))


def dense_specs(shapes, model_dims, stacked, roles: Roles, zero_stage: int):
    """Return (param specs, optimizer specs, gather dims) for a tree of dense leaves.

    Args:
      shapes: pytree of shapes (tuples) of the global leaves.
      model_dims: matching pytree: dim that the MP group splits (not counting a stacked layer dim), -1 for none.
      stacked: matching pytree of bool: leaf has a leading layer dim.
      roles: the mesh.
      zero_stage: 0, 1 or 3.

    Returns:
      pytrees of PartitionSpec, PartitionSpec and int (gather dim without the stacked dim, -1 for none).
    """
    parts, model_parts = roles.size(roles.dense), roles.size(roles.model)

    def one(shape, model_dim, is_stacked):
        body = shape[1:] if is_stacked else shape
        offset = 1 if is_stacked else 0
        taken = model_dim if model_dim >= 0 and model_parts > 1 else None
        # the largest dim that divides among the devices, the last among equals
        fitting = [dim for dim, size in enumerate(body) if parts > 1 and dim != taken and size % parts == 0]
        dim = max(fitting, key=lambda dim: (body[dim], dim), default=None)
        model = {} if taken is None else {taken + offset: roles.model}
        both = dict(model) if dim is None else {**model, dim + offset: roles.dense}
        params = both if zero_stage == 3 else model
        state = both if zero_stage >= 1 else model
        ndim = len(shape)
        return spec_of(ndim, params), spec_of(ndim, state), dim if zero_stage == 3 and dim is not None else -1

    dims, tree = jax.tree.flatten(model_dims)
    leaves = map(one, tree.flatten_up_to(shapes), dims, jax.tree.leaves(stacked))
    return tuple(tree.unflatten(part) for part in zip(*leaves, strict=True))


def expert_specs(shapes: dict, roles: Roles, zero_stage: int, dp_stage: int | None):
    """Return (param specs, grad_sink specs, optimizer specs) for the bank {name: [D Rb, ...]}.

    Args:
      shapes: {name: shape}; `w_out` has its hidden dim first, all others last. Of the low-rank factors of a weight one
        has it, and the other has none.
      roles: the mesh.
      zero_stage: stage of the run; from 1 on the optimizer state is split over `data`.
      dp_stage: ZeRO stage 0-3 of the experts under the `dp` schedule, None under every other.
    """
    shard_axes = roles.expert_shard if roles.size(roles.expert_shard) > 1 else ()
    data_parts = roles.size(roles.data)
    stage = zero_stage if dp_stage is None else dp_stage
    params, grad_sinks, states = {}, {}, {}
    for name, shape in shapes.items():
        hidden = hidden_dim_of(name)
        base = {0: roles.expert, hidden: shard_axes}
        fine = base
        if hidden is not None and data_parts > 1 and shape[hidden] % (data_parts * roles.size(shard_axes)) == 0:
            fine = {0: roles.expert, hidden: shard_axes + roles.data}
        states[name] = spec_of(len(shape), fine if stage >= 1 else base)
        grad_sinks[name] = spec_of(len(shape), fine if dp_stage in (2, 3) else base)
        params[name] = spec_of(len(shape), fine if dp_stage == 3 else base)
    return params, grad_sinks, states


def hidden_dim_of(name: str) -> int | None:
    """Return the dim of a leaf of the bank that is the experts' hidden dim; None where it has none."""
    if name in ("w_out_lora_b", "w_in_lora_a", "w_gate_lora_a"):
        return None
    return 1 if name.startswith("w_out") else 2


def split_dims(specs: dict, axes: tuple[str, ...]) -> dict[str, int]:
    """Return {name: the dim that its PartitionSpec splits over all of `axes`, or -1}, as `gather_tree` takes them."""

    def is_split(entry) -> bool:
        return bool(axes) and set(axes) <= set(entry if isinstance(entry, tuple) else (entry,))

    return {name: next((dim for dim, own in enumerate(spec) if is_split(own)), -1) for name, spec in specs.items()}
