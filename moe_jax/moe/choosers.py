"""What `MoEConfig.schedule` may name instead of a schedule: `parm`, by sizes alone, and `auto`, by observed loads.

Inputs: mesh and sizes of a layer, and a cluster. Outputs: a name and why; for the planner `auto` what a layer waits for
its rows under each schedule, as a line in the rows of a bucket. All schedules compute the same sums.
"""

from __future__ import annotations

import dataclasses

from moe_jax.cluster import Cluster, cluster_named
from moe_jax.cluster.layer_seconds import ScheduleLine, layer_seconds, moving_seconds, schedule_line
from moe_jax.moe.schedule import CHOOSERS, Chooser, LayerSizes, layer_shape, schedule_on
from moe_jax.moe.schedules.pairwise import choose_groups
from moe_jax.moe.schedules.s2 import PauseAfterGate, choose_gather
from moe_jax.parallel.mesh import Roles
from moe_jax.registry import ROUTERS

_RULES = {
    "links": "Parm's equations 13 and 14 on the links of {!r}, which has no fits",
    "equations": "Parm's equations 13 and 14 on the fits of {!r}",
    "parts": "the sum of a layer's parts, gate and moved rows too, on the fits of {!r}",
    "layers": "the whole-layer fits ('layer:SCHEDULE') of {!r}",
}


class Parm(Chooser):
    """s1 or s2, whichever is predicted to take less time; with a calibration of whole layers also the baseline.

    Compared are a layer's exchanges by the links of a cluster, with start-ups and what SAA lets run at the same time,
    or by a calibration's fits; with fits of the gate and of moved rows those too, with fits of whole layers whole
    layers. The choice is made once, for static sizes. Source: Parm, section V, algorithm 1; `deepspeed` for small
    layers is our addition.
    """

    among = ("deepspeed", "s1", "s2")

    def choose(self, roles, sizes):
        cluster = cluster_named(sizes.config.cluster, roles.device_kind)
        cluster = cluster.on_mesh(roles.mesh.size, roles.config.devices_per_node)
        rule = rule_of(cluster)
        # without MP s1 and s2 are one, and without ESP deepspeed is the same too
        if roles.size(roles.model) == 1 and (roles.size(roles.expert_shard) == 1 or rule != "layers"):
            return "s1", "schedule 'parm' takes s1 without a comparison: with MeshConfig.model = 1 it is what s2 is"
        seconds = parm_seconds(roles, sizes, cluster)
        name = min(seconds, key=seconds.__getitem__)
        listed = ", ".join(f"{other} {value:.4g} s" for other, value in seconds.items())
        by = _RULES[rule].format(cluster.name)
        return name, f"schedule 'parm' takes {name} by {by}: {listed} in one layer"


class Auto(Chooser):
    """The schedule that a plan names, chosen from observed loads by the planner `auto`; `s1` before the first plan."""

    among = ("s1", "s2", "deepspeed", "pairwise", "ring")

    def choose(self, roles, sizes):
        listed = ", ".join(self.possible(roles, sizes.config))
        return "s1", f"schedule 'auto' starts with s1 and chooses from observed loads among {listed}"

    def possible(self, roles, config, one_piece=False):
        """Return the names of the schedules that differ on this mesh and give the same results, `s1` first.

        Where tokens that are gated together compete, those are left out that gate other groups of tokens than `s1`.

        Args:
          one_piece: whether a block-wise schedule, halves or float8 need experts in one piece.
        """
        parts, shards = roles.size(roles.model), roles.size(roles.expert_shard)
        different = dict.fromkeys(schedule_on(name, parts, shards) for name in self.among)
        alike = parts == 1 or (config.dropless and ROUTERS[config.router].by_token)
        return tuple(
            schedule.name
            for schedule in different
            if (schedule.one_piece or not one_piece) and (alike or not schedule.gates_group)
            if schedule.name != "deepspeed" or config.transport != "coordinated"  # by which it cannot exchange rows
        )


CHOOSERS |= {"parm": Parm(), "auto": Auto()}


def schedule_lines(roles: Roles, sizes: LayerSizes, cluster: Cluster, one_piece: bool) -> tuple[ScheduleLine, ...]:
    """Return the line of each schedule that `auto` may name, `s1` first; sizes: of a whole MP group, with row_bytes.

    Raises:
      UserError: the cluster lacks a figure; it names the figure.
    """
    lines, gather = [], "saa" if sizes.config.gather == "saa" else "aas"
    for name in Auto().possible(roles, sizes.config, one_piece):
        groups = choose_groups(roles, sizes.config.pairwise_groups) if name == "pairwise" else 1
        shape = dataclasses.replace(layer_shape(name, roles, sizes, groups), members_in_node=1)
        line = schedule_line(shape, cluster, gather)
        # XLA for CPUs runs exchanges and experts one after the other: nothing hides
        lines.append(line._replace(groups=1) if roles.device_kind == "cpu" else line)
    return tuple(lines)


def rule_of(cluster: Cluster) -> str:
    """Return by which of `_RULES` a choice is made."""
    known = {name for name, _ in cluster.fits}
    if not known >= {"gate", "regroup", "expert_step", "call"}:
        return "equations" if known else "links"
    return "layers" if known >= {"layer:s1", "layer:deepspeed"} else "parts"


def parm_seconds(roles: Roles, sizes: LayerSizes, cluster: Cluster) -> dict[str, float]:
    """Return {schedule: seconds of one layer, forward and backward}; `parm` takes the least, of equal ones s1.

    By exchanges alone, rules 'links' and 'equations', s1 and s2 both have two of x and one gather, so without SAA
    start-ups are alike and only what is gathered counts: N M bytes under s1, E C M = K f N M under s2. s2 is then taken
    where K f < 1, in no layer of Parm's table III (f of 1.2 and 2.4). With SAA it gains where its gathers run on other
    links than its rounds, as inside nodes while rows cross them.

    Rules 'parts' and 'layers' compare the whole step but for the experts, which do the same work under all: s2 gates
    every token on each device of its MP group, and that may cost more than it saves. Only 'layers' has `deepspeed`.
    There calibrations timed s2 with SAA, and the start of its layers belongs to that: under 'auto' s2 is judged so,
    even where it will run with AAS.

    Args:
      sizes: of the whole MP group's tokens, with the bytes of a row.

    Raises:
      UserError: the cluster lacks a fit.
    """
    rule, config = rule_of(cluster), sizes.config
    timed_with = "saa" if rule == "layers" and config.gather == "auto" else config.gather
    far_rows = PauseAfterGate(roles, sizes).layout.rows.far
    gather = choose_gather(timed_with, roles, far_rows, sizes.row_bytes, cluster, config.transport)[0]
    how, seconds = (cluster, gather, config.transport), {}
    # deepspeed cannot exchange rows by 'coordinated'
    names = ("s1", "s2", "deepspeed") if rule == "layers" and config.transport != "coordinated" else ("s1", "s2")
    for name in names:
        shape = layer_shape(name, roles, sizes)
        by_exchanges = rule in ("links", "equations")
        seconds[name] = moving_seconds(shape, *how) if by_exchanges else sum(layer_seconds(shape, None, *how))
    return seconds
