"""`auto`: the schedule that a plan names, chosen from observed loads by the planner `auto`; `s1` before the first plan.

Inputs of `schedule_lines`: mesh and sizes of a layer, and a cluster. Output: for each schedule that the mesh and config
allow, what a layer waits for its rows, as a line in the rows of a bucket. All of them compute the same sums.
"""

from __future__ import annotations

import dataclasses

from moe_jax.cluster import Cluster
from moe_jax.cluster.layer_seconds import ScheduleLine, schedule_line
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.routers import find
from moe_jax.moe.schedule import LayerSizes, Schedule, build_schedule, find_schedule, register
from moe_jax.moe.schedules.pairwise import choose_groups
from moe_jax.moe.schedules.parm import layer_shape
from moe_jax.parallel.mesh import Roles


@register("auto")
class Auto(Schedule):
    """No schedule by itself: a plan names one of `chooses_from`."""

    one_piece = True  # where that is needed, others are no candidates
    chooses_from = ("s1", "s2", "deepspeed", "pairwise", "ring")

    @classmethod
    def build(cls, roles, sizes):
        return build_schedule("s1", roles, sizes)

    @classmethod
    def sentences(cls, roles, sizes):
        listed = ", ".join(candidates(roles, sizes.config, False))
        return [f"schedule 'auto' starts with s1 and chooses from observed loads among {listed}"]


def candidates(roles: Roles, config: MoEConfig, one_piece: bool) -> tuple[str, ...]:
    """Return the names of the schedules that differ on this mesh and give the same results, `s1` first.

    Where tokens that are gated together compete, those are left out that gate other groups of tokens than `s1`.

    Args:
      one_piece: whether a block-wise schedule, halves or float8 need experts in one piece.
    """
    parts, shards = roles.size(roles.model), roles.size(roles.expert_shard)
    found = dict.fromkeys(find_schedule(name).on_mesh(parts, shards).name for name in Auto.chooses_from)
    records = [find_schedule(name) for name in found]
    alike = parts == 1 or (config.dropless and find(config.router).by_token)
    return tuple(
        record.name for record in records if (record.one_piece or not one_piece) and (alike or not record.gates_group)
    )


def schedule_lines(roles: Roles, sizes: LayerSizes, cluster: Cluster, one_piece: bool) -> tuple[ScheduleLine, ...]:
    """Return the line of each candidate, `s1` first; sizes: of a whole MP group, with the bytes of a row.

    Raises:
      UserError: the cluster lacks a figure; it names the figure.
    """
    lines, gather = [], "saa" if sizes.config.gather == "saa" else "aas"
    for name in candidates(roles, sizes.config, one_piece):
        groups = choose_groups(roles, sizes.config.pairwise_groups) if name == "pairwise" else 1
        shape = dataclasses.replace(layer_shape(name, roles, sizes, groups), members_in_node=1)
        line = schedule_line(shape, cluster, gather)
        # XLA for CPUs runs exchanges and experts one after the other: nothing hides
        lines.append(line._replace(groups=1) if roles.device_kind == "cpu" else line)
    return tuple(lines)
