"""`pairwise`: the exchange in Ng groups, each step's experts beside the next step's rows.

Inputs: the t tokens of this device's MP group. Outputs: the same tokens, transformed. The D expert-parallel members
form a ring of Ng groups. In step s group g sends rows to group g - s (S_s), computes those that came from group
g + s (C_s) and sends them back (S'_s). One stream of transfers, S_0 .. S_{Ng-1}, S'_1 .. S'_{Ng-1}, S'_0, and one of
matmuls, C_0 .. C_{Ng-1}; C_s waits for S_s, and S'_s for C_s. Under MP and ESP tokens are split and rows dumped as in
`s1`. Source: FasterMoE, section 4.2.

A step is one transfer, because XLA keeps one in flight at a time (docs/bench/inspect.md): first each device collects
from its own group all rows that go to its place in any group, one all-to-all over the fast links that stands for S_0;
then S_s sends what it collected for group g - s to the device in its place there. The return runs in reverse order and
ends with S'_0. XLA schedules from the end, so S_{s+2} waits for C_s: else all matmuls would run after S_{Ng-1}.
Letters: docs/notation.md; Dg = D / Ng members of a group, Pg = Dg Ns devices of a group.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.exchange import shift_pairs
from moe_jax.collectives.ordering import both_ready
from moe_jax.collectives.replicated import own_part
from moe_jax.collectives.varying import cast_varying
from moe_jax.dispatch import Parcel, destinations, largest_bucket, pack, permute_tokens, route, unpermute_tokens
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles
from moe_jax.schedules.contract import LayerSizes, ScheduleOptions, register
from moe_jax.schedules.expert_group import ExpertGroup, build_expert_group, compute, repeat_for_shards
from moe_jax.schedules.mp_tokens import from_parts, to_parts
from moe_jax.schedules.passes import passes_needed, run_passes


def choose_groups(roles: Roles, wanted: int) -> int:
    """Return Ng: as configured, or one group of the members of each node, or of each member on a single node.

    Raises:
      UserError: where there is nothing to exchange, or Ng does not divide the members.
    """
    ep_size = roles.size(roles.expert)
    if ep_size == 1:
        raise UserError(
            "MoEConfig.schedule ('pairwise') needs MeshConfig.expert of at least 2, not 1: with one member nothing is "
            "exchanged; set MoEConfig.schedule = 's1' or raise MeshConfig.expert"
        )
    if wanted:
        if ep_size % wanted:
            raise UserError(
                f"MoEConfig.pairwise_groups ({wanted}) must divide MeshConfig.expert ({ep_size}); set it to a divisor, "
                "or to 0 for one group per node"
            )
        return wanted
    in_node = max(1, roles.config.devices_per_node // roles.size(roles.expert_shard))
    return ep_size // in_node if in_node < ep_size and ep_size % in_node == 0 else ep_size


@register("pairwise")
def build_pairwise(roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
    """Build FasterMoE's schedule; its drop groups are the N / N_MP tokens of one device."""
    groups = choose_groups(roles, options.pairwise_groups)
    sizes = sizes.split(roles.size(roles.model))
    group = build_expert_group(roles)
    rows = sizes.bucket_rows(group.ep_size)
    most = sizes.most_passes(rows)
    ring = Ring(group, groups)

    def schedule(x, token_ids, gate, placed):
        mine, ids = to_parts(x, roles, options), own_part(token_ids, roles.model)
        with jax.named_scope("gate"):
            choice, stats = gate(mine, ids)
            experts, tables = placed(stats)
        with jax.named_scope("route"):
            device, expert = destinations(tables, choice, sizes.groups)
            routing = route(choice, device, expert, group.ep_size, sizes.groups)
            needed = passes_needed(largest_bucket(routing, sizes.groups), rows, most, roles.all)
        order, source = ring.places(lax.axis_index(group.axes) // ring.local)

        def one_pass(index):
            with jax.named_scope("dispatch"):
                parcel = pack(routing, index, rows, sizes.top_k, sizes.groups)
                arriving = group.send_counts(parcel.counts)[source]  # [P, groups], step after step
                parcel = _reorder(parcel, order, rows)
                blocks = permute_tokens(mine, parcel).reshape(ring.each, groups, rows, -1)
                # every matmul needs the counts: they travel ahead of the rows
                blocks, arriving = lax.optimization_barrier((blocks, arriving))
            home = ring.run(blocks, arriving, experts)
            with jax.named_scope("combine"):
                return unpermute_tokens(home.reshape(group.ep_size * rows, -1), choice.weights, parcel)

        y = run_passes(one_pass, needed, most, before=stats)
        return from_parts(y, roles, options), stats, needed

    return schedule


class Ring:
    """The 3 Ng tasks of one layer: who sends to whom in each step, and in which order."""

    def __init__(self, group: ExpertGroup, groups: int):
        self.group, self.groups, self.each = group, groups, group.ep_size // groups
        self.local = self.each * group.esp_size

    def places(self, g):
        """Return where rows go and come from, for a device of group g.

        Returns:
          order int32 [D]: member to which the rows of place (k, s) go, that is member k of group g - s; source int32
          [P]: device from which those of place (s, l) come, that is device l of group g + s.
        """
        step = jnp.arange(self.groups, dtype=jnp.int32)
        k = jnp.arange(self.each, dtype=jnp.int32)[:, None]
        origin = (g + step)[:, None] % self.groups
        source = origin * self.local + jnp.arange(self.local, dtype=jnp.int32)[None]
        return ((g - step)[None] % self.groups * self.each + k).reshape(-1), source.reshape(-1)

    def share(self, blocks):
        """Exchange within the group: block l of [Pg, ...] to its device l; [Pg, ...], block l from there."""
        if self.local == 1:
            return blocks
        inside = [list(range(g * self.local, (g + 1) * self.local)) for g in range(self.groups)]
        blocks = cast_varying(blocks, self.group.axes)
        return lax.all_to_all(blocks, self.group.axes, 0, 0, axis_index_groups=inside, tiled=True)

    def move(self, block, steps: int):
        """Send a block to the device in the same place, `steps` groups ahead on the ring."""
        steps %= self.groups
        return lax.ppermute(block, self.group.axes, shift_pairs(self.groups, self.local, steps, 0)) if steps else block

    def send(self, collected, s: int):
        """S_s: [Pg, c, M] to group g - s; returns what came from group g + s, [Pg, c, M]."""
        with jax.named_scope("dispatch"):
            return self.move(collected, -s)

    def send_back(self, done, s: int):
        """S'_s: computed rows [Pg, c, M] back to group g + s; returns what came back from group g - s."""
        with jax.named_scope("combine"):
            return self.move(done, s)

    def compute(self, received, arriving, experts):
        """C_s: rows [Pg, c, M] as they arrived -> the same places, computed."""
        return compute(experts, received.reshape(-1, received.shape[-1]), arriving).reshape(received.shape)

    def run(self, blocks, arriving, experts):
        """Run all tasks: blocks [Dg, Ng, c, M] -> the same places, computed and summed over shards.

        Args:
          arriving: int32 [P, groups of experts], counts in step order; experts: of this device.
        """
        with jax.named_scope("dispatch"):
            esp_size = self.group.esp_size
            dumped = repeat_for_shards(blocks, esp_size) if esp_size > 1 else blocks
            collected = self.share(dumped.reshape((self.local,) + blocks.shape[1:]))  # [Pg, Ng, c, M]
            outgoing = [collected[:, s] for s in range(self.groups)]
        arriving = arriving.reshape(self.groups, self.local, -1)
        received, done = outgoing[:1], []
        for s in range(1, self.groups):
            if s > 1:  # C_{s-2} has run beside S_{s-1}
                outgoing[s], done[s - 2] = both_ready(outgoing[s], done[s - 2])
            # the stream of transfers keeps its order; C_{s-1} is free to run beside S_s
            outgoing[s], received[-1] = lax.optimization_barrier((outgoing[s], received[-1]))
            received.append(self.send(outgoing[s], s))
            done.append(self.compute(received[s - 1], arriving[s - 1], experts))
        last = self.groups - 1
        if last > 1:
            done[1], received[last] = lax.optimization_barrier((done[1], received[last]))
        done.append(self.compute(received[last], arriving[last], experts))
        home = done[:1]
        for s in range(1, self.groups):
            if s > 1:
                done[s], home[-1] = lax.optimization_barrier((done[s], home[-1]))
            home.append(self.send_back(done[s], s))
        with jax.named_scope("combine"):
            parts = self.share(jnp.stack(home, axis=1))  # [Pg, Ng, c, M]
            if esp_size == 1:
                return parts
            acc_dtype = jnp.promote_types(parts.dtype, jnp.float32)
            parts = parts.reshape((self.each, esp_size) + parts.shape[1:])
            return jnp.sum(parts, axis=1, dtype=acc_dtype).astype(parts.dtype)


def _reorder(parcel: Parcel, order, rows: int) -> Parcel:
    """Return the parcel with its buckets in the order of `order` (bucket at each place), a permutation of the D."""
    ep_size = order.shape[0]
    place_of = jnp.zeros_like(order).at[order].set(jnp.arange(ep_size, dtype=jnp.int32), unique_indices=True)
    row = parcel.row_of_choice
    moved = place_of[jnp.minimum(row // rows, ep_size - 1)] * rows + row % rows
    return Parcel(
        choice_of_row=parcel.choice_of_row.reshape(ep_size, rows)[order].reshape(-1),
        row_of_choice=jnp.where(row < ep_size * rows, moved, row),
        counts=parcel.counts[order],
    )
