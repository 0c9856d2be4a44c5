"""`s2`: MP pauses after the gate. Every device gates all tokens of its MP group and carries its part of each bucket.

A bucket of C rows is cut into N_MP parts of c rows; device r of the MP group sends part r to the experts. On the way
back each part that arrives is passed on to the whole MP group, at once (SAA) or in one all-gather at the end (AAS);
both add the same numbers. Sending and collecting are transposes, so the gradient of one is the other. Source: Parm,
sections III-B and III-D. Letters: docs/notation.md; C = N_MP c.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from moe_jax.cluster import Cluster, cluster_named
from moe_jax.cluster.fits import fit_name
from moe_jax.moe.layer import ExpertParallel
from moe_jax.moe.permute import permute_tokens, sum_choices
from moe_jax.moe.routing import Parcel, counts_within, pack, regroup
from moe_jax.moe.schedule import LayerSizes, Sent, register
from moe_jax.parallel.exchange import ExpertGroup, by_piece, cut, join, shift_pairs
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.static_sizes import BucketLayout, BucketRows, round_up
from moe_jax.parallel.varying import declare_equal, join_parts, take_part, with_gradient


@register("s2")
class PauseAfterGate(ExpertParallel):
    """Parm's second schedule; its drop groups are the N tokens of an MP group.

    Attributes:
      part: where the rows of this device's part of each bucket stand.
    """

    gates_group = True
    cuts_buckets = True

    def __init__(self, roles: Roles, sizes: LayerSizes):
        super().__init__(roles, sizes)
        mp_size = roles.size(roles.model)  # divides all lengths: see `bucket_rows`
        self.part = dataclasses.replace(self.layout, rows=self.layout.rows.each(lambda rows: rows // mp_size))

    def bucket_rows(self):
        # A part has one length on all devices of an MP group. Where they are several EP members, one's own is another's
        # neighbour, and where they are on several nodes all buckets are alike.
        roles = self.roles
        rows, mp_size = super().bucket_rows().raised(), roles.size(roles.model)
        spanned = mp_size // roles.size(roles.expert_shard)
        if spanned > 1:
            rows = dataclasses.replace(rows, node=rows.own)
        if roles.members_per_node % max(1, spanned):
            rows = BucketRows.even(rows.own)
        return rows.each(lambda rows: round_up(rows, mp_size))

    @functools.cached_property
    def returns(self) -> tuple[str, str]:
        """'saa' or 'aas', the way in which rows come home, and why; a calibration is read only where it is asked."""
        config, roles = self.sizes.config, self.roles
        cluster = cluster_named(config.cluster if config.gather == "auto" else "", roles.device_kind)
        cluster = cluster.on_mesh(roles.mesh.size, roles.config.devices_per_node)
        far_rows = self.layout.rows.far
        return choose_gather(config.gather, roles, far_rows, self.sizes.row_bytes, cluster, config.transport)

    @property
    def notes(self):
        gather, why = self.returns
        said = (f"schedule 's2' returns by {gather!r}: {why}",) if self.sizes.config.gather == "auto" else ()
        return super().notes + said

    def route(self, tokens, choice, tables):
        # A whole MP group sends its tokens by one device's tables: where it spans EP members, those of its first one.
        axes = tuple(axis for axis in self.roles.model if axis in self.roles.expert)
        if axes:
            slot, num, den = tables.dest_slot, tables.dest_num, tables.dest_den
            flat = [lax.bitcast_convert_type(rule, jnp.int32).reshape(-1) for rule in (slot, num, den)]
            first = join_parts(jnp.concatenate(flat)[None], axes)[0]
            flat = jnp.split(first, [slot.size, slot.size + num.size])
            tables = dataclasses.replace(
                tables,
                dest_slot=flat[0].reshape(slot.shape),
                dest_num=lax.bitcast_convert_type(flat[1], jnp.uint32).reshape(num.shape),
                dest_den=lax.bitcast_convert_type(flat[2], jnp.uint32).reshape(den.shape),
            )
        return super().route(tokens, choice, tables)

    def pack(self, routed, index):
        sizes, layout, mp_size = self.sizes, self.layout, self.roles.size(self.roles.model)
        with jax.named_scope("dispatch"):
            whole = pack(routed.routing, index, layout, sizes.config.top_k, sizes.groups, self.member())
            of_row, counts = [], 0
            for piece in layout.pieces:  # of each bucket's rows in a piece this device's part
                width, part = piece.width // mp_size, lax.axis_index(self.roles.model)
                rows = whole.choice_of_row[piece.offset : piece.offset + piece.rows]
                rows = rows.reshape(piece.count, mp_size, width)
                of_row.append(lax.dynamic_index_in_dim(rows, part, axis=1, keepdims=False))
                begin = piece.begin + part * width
                counts += counts_within(whole.counts, begin, begin + width)
            mine = dataclasses.replace(whole, choice_of_row=join(of_row), counts=counts)
            arriving = self.group.send_counts(counts)
            # the tokens go on as they are: the gradient takes other rows of them than the exchange
            return routed.tokens, Sent(whole, regroup(arriving, self.part, super().member()), second=mine)

    def exchange(self, rows, sent):
        return _send_tokens(self, rows, sent.second, sent.parcel)

    def send_back(self, rows, sent):
        with jax.named_scope("combine"):
            return with_gradient(self.send_parts)(self.collect)(rows)

    def collect(self, rows):
        """Bring computed rows to every device of their MP group: [Ns R / N_MP, M] -> [R, M]; without a gradient."""
        return collect_parts(self.roles, self.group, self.returns[0], self.part, rows)

    def send_parts(self, d):
        """Send this device's part of every bucket of d [R, M] to the experts: [Ns R / N_MP, M]."""
        mine = by_piece(lambda _, blocks: take_part(blocks, self.roles.model, 1), d, self.layout)
        return self.group.send(mine, self.part)

    def member(self):
        """Return int32 [], the first EP member of this device's MP group, equal on the group."""
        axes = tuple(axis for axis in self.roles.model if axis in self.roles.expert)
        me, spanned = super().member(), self.roles.size(axes)
        return declare_equal(me // spanned * spanned, axes)


def choose_gather(
    gather: str, roles: Roles, far_rows: int, row_bytes: int, cluster: Cluster, transport: str = "all_to_all"
) -> tuple[str, str]:
    """Return how s2 brings its rows home, 'saa' or 'aas', and why, as the rest of a sentence.

    It is what was asked for, or under 'auto' the shorter one by the fits. Compared is what differs: the rows that a
    whole EP&ESP group exchanges; those that stay in a node go by an exchange and a gather in both forms. AAS is taken
    when equal, and where there are no fits to compare: in GPT-MoE-S cut to 4 layers, modelled on 4 x 8 H200, a step
    took 61.9 ms with AAS and 73.7 ms with SAA by the prices of 2026-11-24.

    far_rows: C, rows of a whole bucket that the whole group exchanges.
    """
    if gather != "auto":
        return gather, "as MoEConfig.gather says"
    ep_size, esp_size = roles.size(roles.expert), roles.size(roles.expert_shard)
    mp_size, size = roles.size(roles.model), ep_size * esp_size
    names = fit_name(transport, size), fit_name("all_gather", mp_size), fit_name("saa", size, mp_size, esp_size)
    known = dict(cluster.fits)
    missing = [name for name in names if name not in known]
    if missing:
        return "aas", f"MoEConfig.gather 'auto', and {cluster.name!r} has no fit {missing[0]!r}"
    y = ep_size * far_rows * row_bytes
    x = y * esp_size // mp_size
    a2a, gathers, saa = (known[name] for name in names)
    together, in_turn = saa.seconds(x, y), a2a.seconds(x) + gathers.seconds(y)
    why = f"MoEConfig.gather 'auto' on the fits of {cluster.name!r}: saa {together:.4g} s, aas {in_turn:.4g} s"
    return "saa" if together < in_turn else "aas", why


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send_tokens(schedule: PauseAfterGate, x, mine: Parcel, whole: Parcel):
    """Send this device's part of every bucket to the experts: [t, M] -> the rows that arrive [Ns R / N_MP, M]."""
    return schedule.group.send(permute_tokens(x, mine), schedule.part)


# each device takes its part of a bucket, and the gradient of whole buckets reaches the tokens of all parts
_send_tokens.defvjp(
    lambda schedule, x, mine, whole: (_send_tokens(schedule, x, mine, whole), whole),
    lambda schedule, whole, d: (sum_choices(schedule.collect(d), whole), None, None),
)


def collect_parts(roles: Roles, group: ExpertGroup, gather: str, part: BucketLayout, rows):
    """Bring computed rows [Ns R / N_MP, M] home, [R, M], equal on the MP group. It has no gradient of its own.

    Args:
      gather: 'aas' or 'saa'; part: where the rows of this device's part of each bucket stand. Under 'saa' the piece
        that the whole group exchanges comes by phases, the others by an exchange and a gather.
    """
    if gather == "aas":
        return by_piece(lambda _, blocks: join_parts(blocks, roles.model, dim=1), group.send_back(rows, part), part)
    pieces = dict(cut(rows, part, group.esp_size))
    # every bucket of the computed parts [P, c, ...] as [D, N_MP c, ...], phase by phase, each next to a gather
    mp_size = roles.size(roles.model)
    far = pieces.pop("far")
    blocks = far.reshape((group.ep_size, group.esp_size) + far.shape[1:])
    me = lax.axis_index(roles.expert), lax.axis_index(roles.expert_shard)
    gathered, part = [], receive_part(group, rows_ahead(group, blocks, 0, me), 0, me)
    for j in range(1, group.ep_size):
        # gather j - 1 and phase j start together, when phase j - 1 and gather j - 2 are done
        ahead, part = lax.optimization_barrier((rows_ahead(group, blocks, j, me), part))
        following = receive_part(group, ahead, j, me)
        # XLA makes a transfer synchronous where only other transfers stand between its start and its end; this
        # barrier leaves a tuple there
        blocks, part = lax.optimization_barrier((blocks, part))
        every = join_parts(part[None], roles.model)  # [N_MP, c, M]
        following, every = lax.optimization_barrier((following, every))
        gathered.append(declare_equal(every, roles.model))  # optimization_barrier drops the replicated type
        part = following
    gathered.append(join_parts(part[None], roles.model))
    # rank r of the MP group got its part j from the EP member j places before its own, which differs among ranks
    first = lax.axis_index(roles.dense) * mp_size
    members = (first + jnp.arange(mp_size)) // group.esp_size % group.ep_size
    phase = (members[None] - jnp.arange(group.ep_size)[:, None]) % group.ep_size  # [D, N_MP]
    stacked = jnp.stack(gathered)  # [phase, N_MP, c, M]
    out = stacked[phase, jnp.arange(mp_size)[None]]  # [D, N_MP, c, M]
    whole = [out.reshape((group.ep_size, -1) + out.shape[3:])]
    for kind, blocks in pieces.items():
        whole.append(join_parts(group.send_piece_back(kind, blocks), roles.model, dim=1))
    return join(whole)


def rows_ahead(group: ExpertGroup, blocks, j: int, me):
    """Return what phase j sends, the rows of the EP member j places on, [Ns, c, M]; blocks [D, Ns, c, M] by source."""
    return lax.dynamic_index_in_dim(blocks, (me[0] + j) % group.ep_size, axis=0, keepdims=False)


def receive_part(group: ExpertGroup, ahead, j: int, me):
    """Phase j: return this device's part from the EP member j places back, summed over its shards, [c, M].

    ahead: [Ns, c, M] of `rows_ahead`; me: index of this device's EP member and shard."""
    acc_dtype = jnp.promote_types(ahead.dtype, jnp.float32)
    pieces = []
    for i in range(group.esp_size):
        piece = lax.dynamic_index_in_dim(ahead, (me[1] + i) % group.esp_size, axis=0, keepdims=False)
        if i or j:
            pairs = shift_pairs(group.ep_size, group.esp_size, j, i)
            # XLA for GPUs keeps one transfer of a stream in flight: on this one it may run next to other collectives
            with set_xla_metadata(_xla_gpu_collective_stream="p2p"):
                piece = lax.ppermute(piece, group.axes, pairs)
        pieces.append(piece.astype(acc_dtype))
    return sum(pieces[1:], pieces[0]).astype(ahead.dtype)
