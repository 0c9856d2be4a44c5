"""`pairwise`: the exchange in G groups, each step's experts beside the next step's rows.

Enters: the t tokens of this device's MP group. Leaves: the same tokens, transformed. The D expert-parallel members
stand in G groups on a ring. In step s group g sends rows to group g - s (S_s), computes those that came from group g
+ s (C_s) and sends them back (S'_s). One stream of transfers, S_0 .. S_{G-1}, S'_0 .. S'_{G-1}, and one of matmuls,
C_0 .. C_{G-1}; C_s waits for S_s, and S'_s for C_s. The quickest transfers stand at the ends: S_0 stays in the own
group, S'_{G-1} goes to a neighbour on the ring. Under MP and ESP tokens are split and rows dumped as in `s1`. Source:
FasterMoE, section 4.2. Letters: n = D / G members of a group, S shards of an expert, c rows of a bucket, P = D S.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.copies import own_part
from moe_jax.dispatch import Parcel, destinations, largest_bucket, pack, route, rows_to_tokens, tokens_to_rows
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles
from moe_jax.schedules.base import LayerSizes, ScheduleOptions, register
from moe_jax.schedules.expert_group import ExpertGroup, build_expert_group, compute
from moe_jax.schedules.mp_tokens import from_parts, to_parts
from moe_jax.schedules.passes import passes_needed, run_passes


def choose_groups(roles: Roles, wanted: int) -> int:
    """Return G: what is asked for, or one group of the members of each node, or of each member on a single node.

    Raises:
      UserError: where there is nothing to exchange, or G does not divide the members.
    """
    members = roles.size(roles.expert)
    if members == 1:
        raise UserError(
            "MoEConfig.schedule ('pairwise') needs MeshConfig.expert of at least 2, not 1: with one member nothing is "
            "exchanged; set MoEConfig.schedule = 's1' or raise MeshConfig.expert"
        )
    if wanted:
        if members % wanted:
            raise UserError(
                f"MoEConfig.pairwise_groups ({wanted}) must divide MeshConfig.expert ({members}); set it to a divisor, "
                "or to 0 for one group per node"
            )
        return wanted
    in_node = max(1, roles.config.devices_per_node // roles.size(roles.expert_shard))
    return members // in_node if in_node < members and members % in_node == 0 else members


@register("pairwise")
def build_pairwise(roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
    """Build FasterMoE's schedule; its drop groups are the N / N_MP tokens of one device."""
    groups = choose_groups(roles, options.pairwise_groups)
    sizes = sizes.split(roles.size(roles.model))
    group = build_expert_group(roles)
    rows = sizes.bucket_rows(group.members)
    most = sizes.most_passes(rows)
    ring = Ring(group, groups)

    def schedule(x, token_ids, gate, placed):
        mine, ids = to_parts(x, roles, options), own_part(token_ids, roles.model)
        with jax.named_scope("gate"):
            choice, stats = gate(mine, ids)
            experts, tables = placed(stats)
        with jax.named_scope("route"):
            device, expert = destinations(tables, choice, sizes.groups)
            routing = route(choice, device, expert, group.members, sizes.groups)
            needed = passes_needed(largest_bucket(routing, sizes.groups), rows, most, roles.all)
        order, source = ring.places(lax.axis_index(roles.expert), lax.axis_index(roles.expert_shard))

        def one_pass(index):
            with jax.named_scope("dispatch"):
                parcel = pack(routing, index, rows, sizes.top_k, sizes.groups)
                arriving = group.send_counts(parcel.counts)[source]  # [P, groups], step after step
                parcel = _reorder(parcel, order, rows)
                blocks = tokens_to_rows(mine, parcel).reshape(groups, group.members // groups, rows, -1)
            home = ring.run(blocks, arriving, experts)
            with jax.named_scope("combine"):
                return rows_to_tokens(home.reshape(group.members * rows, -1), choice.weights, parcel)

        y = run_passes(one_pass, needed, most, before=stats)
        return from_parts(y, roles, options), stats, needed

    return schedule


class Ring:
    """The 3 G tasks of one layer: who sends to whom in each step, and in which order."""

    def __init__(self, group: ExpertGroup, groups: int):
        self.group, self.groups, self.each = group, groups, group.members // groups

    def places(self, member, shard):
        """Return where rows go and come from, step after step, for this device.

        Returns:
          order int32 [D]: member to which the rows of place (s, j) go; source int32 [P]: device of the group from which
          those of place (s, j, i) come.
        """
        g, k = member // self.each, member % self.each
        step = jnp.arange(self.groups, dtype=jnp.int32)[:, None]
        j = jnp.arange(self.each, dtype=jnp.int32)[None]
        order = (g - step) % self.groups * self.each + (k + j) % self.each
        origin = (g + step) % self.groups * self.each + (k - j) % self.each
        i = jnp.arange(self.group.shards, dtype=jnp.int32)
        source = origin[..., None] * self.group.shards + (shard - i)[None, None] % self.group.shards
        return order.reshape(-1), source.reshape(-1)

    def pairs(self, s: int, j: int, i: int, back: bool = False) -> list[tuple[int, int]]:
        """Return (source, target) of all devices in round (j, i) of step s, or of its way back."""
        forth = []
        for g in range(self.groups):
            for k in range(self.each):
                target = (g - s) % self.groups * self.each + (k + j) % self.each
                for shard in range(self.group.shards):
                    me = (g * self.each + k) * self.group.shards + shard
                    forth.append((me, target * self.group.shards + (shard + i) % self.group.shards))
        return [(b, a) for a, b in forth] if back else forth

    def move(self, block, s: int, j: int, i: int, back: bool = False):
        return block if s == j == i == 0 else lax.ppermute(block, self.group.axes, self.pairs(s, j, i, back))

    def rounds(self):
        """Return the rounds (j, i) of one step."""
        return [(j, i) for j in range(self.each) for i in range(self.group.shards)]

    def send(self, blocks, s: int):
        """S_s: [n, c, M] to group g - s; returns what came from group g + s, [n S, c, M]."""
        with jax.named_scope("dispatch"):
            return jnp.stack([self.move(blocks[j], s, j, i) for j, i in self.rounds()])

    def send_back(self, done, s: int):
        """S'_s: computed rows [n S, c, M] home; returns the own ones, summed over shards, [n, c, M]."""
        with jax.named_scope("combine"):
            parts = [self.move(done[r], s, j, i, back=True) for r, (j, i) in enumerate(self.rounds())]
            wide = jnp.promote_types(done.dtype, jnp.float32)
            home = jnp.stack(parts).reshape((self.each, self.group.shards) + done.shape[1:])
            return jnp.sum(home, axis=1, dtype=wide).astype(done.dtype)

    def run(self, blocks, arriving, experts):
        """Run all tasks: blocks [G, n, c, M] in step order -> the same places, computed.

        Args:
          arriving: int32 [P, groups of experts], counts in step order; experts: of this device.
        """
        outgoing = [blocks[s] for s in range(self.groups)]
        arriving = arriving.reshape(self.groups, self.each * self.group.shards, -1)
        received, done, home = [], [], []
        for s in range(self.groups):
            if s:  # the stream of transfers keeps its order; C_{s-1} is free to run beside S_s
                outgoing[s], received[-1] = lax.optimization_barrier((outgoing[s], received[-1]))
            received.append(self.send(outgoing[s], s))
        for s in range(self.groups):
            shape = received[s].shape
            rows = compute(experts, received[s].reshape(-1, shape[-1]), arriving[s])
            done.append(rows.reshape(shape))
        for s in range(self.groups):
            before = home if s else received
            done[s], before[-1] = lax.optimization_barrier((done[s], before[-1]))
            home.append(self.send_back(done[s], s))
        return jnp.stack(home)


def _reorder(parcel: Parcel, order, rows: int) -> Parcel:
    """Return the parcel with its buckets in the order of `order` (bucket at each place), a permutation of the D."""
    members = order.shape[0]
    place_of = jnp.zeros_like(order).at[order].set(jnp.arange(members, dtype=jnp.int32), unique_indices=True)
    row = parcel.row_of_choice
    moved = place_of[jnp.minimum(row // rows, members - 1)] * rows + row % rows
    return Parcel(
        choice_of_row=parcel.choice_of_row.reshape(members, rows)[order].reshape(-1),
        row_of_choice=jnp.where(row < members * rows, moved, row),
        counts=parcel.counts[order],
    )
