"""`pairwise`: the exchange in Ng groups, each step's experts next to the next step's rows.

The D expert-parallel members form a ring of Ng groups. In step s group g sends rows to group g - s (S_s), computes
those that came from group g + s (C_s) and sends them back (S'_s). One stream of transfers, S_0 .. S_{Ng-1},
S'_1 .. S'_{Ng-1}, S'_0, and one of matmuls; C_s waits for S_s, and S'_s for C_s. Under MP and ESP as in `s1`. S_0 is
one all-to-all inside the group that collects all rows for a place in any group; S_s then is one transfer between
devices of equal place. Longer buckets for the own node belong to S_0, C_0 and S'_0. Source: FasterMoE, section 4.2.
Letters: docs/notation.md; Dg = D / Ng members of a group, Pg = Dg Ns devices of a group.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.errors import UserError
from moe_jax.moe.layer import ExpertParallel
from moe_jax.moe.permute import permute_rows, permute_tokens, unpermute_rows, unpermute_tokens
from moe_jax.moe.routing import Parcel, counts_within, members_of, pack, regroup_pieces
from moe_jax.moe.schedule import LayerSizes, register
from moe_jax.parallel.exchange import ExpertGroup, cut, join, repeat_for_shards, shift_pairs
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.varying import cast_varying, match_varying, with_gradient


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
class Pairwise(ExpertParallel):
    """FasterMoE's schedule; its drop groups are the N / N_MP tokens of one device."""

    one_piece = False

    def __init__(self, roles: Roles, sizes: LayerSizes):
        super().__init__(roles, sizes, ExpertGroup(roles))
        self.pipeline = Pipeline(self.group, choose_groups(roles, sizes.config.pairwise_groups))

    def run_pass(self, routed, index, experts):
        group, layout, pipeline, sizes = self.group, self.layout, self.pipeline, self.sizes
        rows_far = layout.rows.far
        # rows of place (k, s) go to member k of group g - s; those of place (s, l) come from device l of group g + s
        g = lax.axis_index(group.axes) // pipeline.local
        step = jnp.arange(pipeline.groups, dtype=jnp.int32)
        k = jnp.arange(pipeline.each, dtype=jnp.int32)[:, None]
        origin = (g + step)[:, None] % pipeline.groups
        source = origin * pipeline.local + jnp.arange(pipeline.local, dtype=jnp.int32)[None]
        order = ((g - step)[None] % pipeline.groups * pipeline.each + k).reshape(-1)  # [D]
        source = source.reshape(-1)  # [P]
        with jax.named_scope("dispatch"):
            me = self.member()
            parcel = pack(routed.routing, index, layout, sizes.config.top_k, sizes.groups, me)
            arriving = group.send_counts(parcel.counts)  # [P, groups], of whole buckets
            # the far rows of its buckets in the order of `order`; those of other pieces stand behind them and stay
            ep_size, row = group.ep_size, parcel.row_of_choice
            place_of = jnp.zeros_like(order).at[order].set(jnp.arange(ep_size, dtype=jnp.int32), unique_indices=True)
            moved = place_of[jnp.minimum(row // rows_far, ep_size - 1)] * rows_far + row % rows_far
            chosen = parcel.choice_of_row
            first, rest = chosen[: ep_size * rows_far], chosen[ep_size * rows_far :]
            first = first.reshape(ep_size, rows_far)[order].reshape(-1)
            parcel = Parcel(
                choice_of_row=jnp.concatenate([first, rest]) if rest.size else first,
                row_of_choice=jnp.where(row < ep_size * rows_far, moved, row),
                counts=parcel.counts[order],
            )
            # every matmul needs the counts: they travel ahead of the rows
            rows, arriving = lax.optimization_barrier((permute_tokens(routed.tokens, parcel), arriving))
            pieces = dict(cut(rows, layout))
            blocks = pieces.pop("far").reshape(pipeline.each, pipeline.groups, rows_far, -1)
            more = [(kind, group.send_piece(kind, rows)) for kind, rows in pieces.items()]
            counts = [arriving] if len(layout.pieces) == 1 else []  # of each source's bucket in a piece [n, groups]
            for piece in layout.pieces if not counts else ():
                who = members_of(piece, layout, me, group.esp_size)
                whole = arriving if who is None else arriving[who]
                counts.append(counts_within(whole, piece.begin, piece.end))
        near = [(rows, counts) for (_, rows), counts in zip(more, counts[1:], strict=True)]
        home, near = pipeline.run(blocks, counts[0][source], experts, near)
        with jax.named_scope("combine"):
            back = [group.send_piece_back(kind, done) for (kind, _), done in zip(more, near, strict=True)]
            home = join([home.reshape(group.ep_size, rows_far, -1), *back])
            return unpermute_tokens(home, routed.weights, parcel)


class Pipeline:
    """The 3 Ng tasks of one layer: who sends to whom in each step, and in which order."""

    def __init__(self, group: ExpertGroup, groups: int):
        self.group, self.groups, self.each = group, groups, group.ep_size // groups
        self.local = self.each * group.esp_size

    def share(self, blocks):
        """Exchange within the group: block l of [Pg, ...] to its device l; [Pg, ...], block l from there."""
        if self.local == 1:
            return blocks
        inside = [list(range(g * self.local, (g + 1) * self.local)) for g in range(self.groups)]
        blocks = cast_varying(blocks, self.group.axes)
        return lax.all_to_all(blocks, self.group.axes, 0, 0, axis_index_groups=inside, tiled=True)

    def compute(self, blocks, experts):
        """C_s: a list of (rows [n, c, M] as they arrived, counts [n, groups]) -> the same places, computed, a list."""
        with jax.named_scope("experts"):
            if len(blocks) == 1 and blocks[0][0].shape[0] == 1:  # one bucket, already in group order
                return [experts(blocks[0][0][0], blocks[0][1][0])[None]]
            sizes = [rows.shape[0] for rows, _ in blocks]
            ids = jnp.split(jnp.arange(sum(sizes), dtype=jnp.int32), np.cumsum(sizes)[:-1])
            pieces = [
                (None if len(blocks) == 1 else who, 0, rows.shape[1])
                for who, (rows, _) in zip(ids, blocks, strict=True)
            ]
            grouping = regroup_pieces(join(counts[:, None] for _, counts in blocks), pieces)
            rows = join(rows for rows, _ in blocks)
            done = unpermute_rows(experts(permute_rows(rows, grouping), grouping.group_sizes), grouping)
            parts = jnp.split(done, np.cumsum([rows.shape[0] * rows.shape[1] for rows, _ in blocks])[:-1])
            return [part.reshape(rows.shape) for part, (rows, _) in zip(parts, blocks, strict=True)]

    def run(self, blocks, arriving, experts, near=()):
        """Run all tasks: blocks [Dg, Ng, c, M] -> the same places, computed and summed over shards.

        Args:
          arriving: int32 [P, groups of experts], counts in step order; experts: of this device.
          near: (rows [n, c', M] that came from devices of the node, counts [n, groups]) of further pieces of
            their buckets, which C_0 computes.

        Returns:
          the blocks, and what became of `near`, a list.
        """
        with jax.named_scope("dispatch"):
            esp_size = self.group.esp_size
            dumped = repeat_for_shards(blocks, esp_size) if esp_size > 1 else blocks
            collected = self.share(dumped.reshape((self.local,) + blocks.shape[1:]))  # [Pg, Ng, c, M]
            outgoing = [collected[:, s] for s in range(self.groups)]
        arriving = arriving.reshape(self.groups, self.local, -1)
        received, done, near_done = outgoing[:1], [], []
        # by steps: to the device in the same place so many groups ahead
        ring = [shift_pairs(self.groups, self.local, steps, 0) for steps in range(self.groups)]

        def compute(s, more=()):
            here, *rest = self.compute([(received[s], arriving[s]), *more], experts)
            done.append(here)
            near_done.extend(rest)

        for s in range(1, self.groups):
            if s > 1:  # C_{s-2} has run next to S_{s-1}
                outgoing[s], done[s - 2] = _both_ready(match_varying(outgoing[s], done[s - 2]))
            # the stream of transfers keeps its order; C_{s-1} is free to run next to S_s
            outgoing[s], received[-1] = lax.optimization_barrier((outgoing[s], received[-1]))
            with jax.named_scope("dispatch"):  # S_s
                received.append(lax.ppermute(outgoing[s], self.group.axes, ring[-s % self.groups]))
            compute(s - 1, near if s == 1 else ())
        last = self.groups - 1
        if last > 1:
            done[1], received[last] = lax.optimization_barrier((done[1], received[last]))
        compute(last, () if last else near)
        home = done[:1]
        for s in range(1, self.groups):
            if s > 1:
                done[s], home[-1] = lax.optimization_barrier((done[s], home[-1]))
            with jax.named_scope("combine"):  # S'_s
                home.append(lax.ppermute(done[s], self.group.axes, ring[s]))
        with jax.named_scope("combine"):
            parts = self.share(jnp.stack(home, axis=1))  # [Pg, Ng, c, M]
            if near_done:  # they come last
                *near_done, _ = lax.optimization_barrier((*near_done, home[-1]))
            if esp_size == 1:
                return parts, near_done
            acc_dtype = jnp.promote_types(parts.dtype, jnp.float32)
            parts = parts.reshape((self.each, esp_size) + parts.shape[1:])
            return jnp.sum(parts, axis=1, dtype=acc_dtype).astype(parts.dtype), near_done


@with_gradient(lambda d: d)
def _both_ready(arrays: tuple):
    """Return the arrays, none of which a compiler may use before all are ready; gradients are not ordered."""
    return lax.optimization_barrier(arrays)
